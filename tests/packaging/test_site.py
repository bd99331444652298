"""The site builds without warnings, all its pages are linked, and it loads nothing from other hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from os.path import normpath
from pathlib import Path
from threading import Thread
from typing import get_args
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from tests.packaging import site
from tests.packaging.repository import ROOT, files, name_of
from tests.packaging.trace_picture import PICTURE
from tests.support.browser import Browser, Colours

pytestmark = pytest.mark.timeout(600)  # Sphinx renders three hundred pages first

WIDTHS = (1280, 400)
SERVED_BY_SPHINX = {"genindex.html", "search.html"}
"""Pages that Sphinx generates: an empty index, and the search, which is a form on every page."""
FETCHING = re.compile(r"@import|url\(\s*['\"]?(?:https?:)?//|\bfetch\(\s*['\"]https?:|\bsrc=['\"](?:https?:)?//")


class Links(HTMLParser):
    """The links of a page, and the resources that a browser loads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        for name in ("src", "srcset", "data") if tag != "a" else ():
            self.fetched.append(given.get(name) or "")
        if tag == "link":
            self.fetched.append(given.get("href") or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from scratch, since Sphinx does not repeat warnings about unchanged pages."""
    folder = tmp_path_factory.mktemp("site")
    done = site.build(folder)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder / "html"


@cache
def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def reachable(start: Path, pages: set[Path]) -> set[Path]:
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        page = waiting.pop()
        if page in pages and page not in found:
            found.add(page)
            paths = {unquote(urlsplit(link).path) for link in read(page).links}
            waiting += [Path(normpath(page.parent / path)) for path in paths]
    return found


def test_every_page_is_reachable_from_the_start_page(built: Path) -> None:
    every = {page for page in built.rglob("*.html") if page.name not in SERVED_BY_SPHINX}

    assert len(every) > 100
    assert every - reachable(built / "index.html", every) == set()


def test_nothing_is_loaded_from_other_hosts(built: Path) -> None:
    strange = {
        (page.name, address)
        for page in built.rglob("*.html")
        for address in read(page).fetched
        if re.match(r"(?:[a-z]+:)?//", address)
    }
    sheets = [file.name for file in built.rglob("*.css") if FETCHING.search(file.read_text(encoding="utf-8"))]
    scripts = [file.name for file in built.rglob("*.js") if FETCHING.search(file.read_text(encoding="utf-8"))]

    assert (strange, sheets, scripts) == (set(), [], [])


def test_options_keep_their_hyphens(built: Path) -> None:
    page = (built / "reference" / "cli.html").read_text(encoding="utf-8")

    assert "JSON lines with --json" in page


def test_the_search_covers_the_pages_but_not_the_sources(built: Path) -> None:
    index = (built / "searchindex.js").read_text(encoding="utf-8")
    known = json.loads(index[index.index("{") : index.rindex("}") + 1])
    titles = set(known["titles"])

    assert {"Guarantees and their limits", "Your first service", "Errors"} <= titles
    assert not [title for title in titles if title.startswith("tests/")]


@pytest.mark.parametrize("folder", [index.parent for index in files("index.md")], ids=name_of)
def test_an_index_lists_every_page_of_its_folder(folder: Path) -> None:
    index = (folder / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", index, re.MULTILINE))

    unlisted = {page.name for page in folder.glob("*.md")} - listed - {"index.md"}

    assert site.EVERY_PAGE in index or unlisted == set(), f"list it in {name_of(folder / 'index.md')}"


def test_links_to_files_outside_docs_become_pages_of_the_site() -> None:
    every = site.pages()

    rewritten = every["explanation/guarantees.md"].text

    assert "](../repository/tests/faults/test_crash_points.py.md)" in rewritten
    assert every["repository/ARCHITECTURE.md"].source == ROOT / "ARCHITECTURE.md"


@pytest.mark.parametrize(
    "drawing", [*sorted((ROOT / "docs" / "diagrams").glob("*.svg")), PICTURE], ids=lambda file: file.name
)
def test_diagrams_have_a_title_and_description_for_screen_readers(drawing: Path) -> None:
    text = drawing.read_text(encoding="utf-8")
    titles = re.findall(r'<(title|desc) id="([\w-]+)">[^<]{10,}</\1>', text)

    assert [kind for kind, _ in titles] == ["title", "desc"]
    assert f'role="img" aria-labelledby="{" ".join(name for _, name in titles)}"' in text
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\s\"]+", text) == ["http://www.w3.org/2000/svg"]


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    """Serve the site on a loopback port."""
    handler = partial(SilentHandler, directory=str(built))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Discard the access log."""


def test_pages_fit_the_browser_window_and_follow_its_theme(browser: Browser, address: str, tmp_path: Path) -> None:
    pages = ("index", "tutorial/first-service", "explanation/guarantees")
    for page, width, colors in product(pages, WIDTHS, get_args(Colours)):
        browser.prefer(colors)
        browser.resize(width)
        browser.open(f"{address}/{page}.html")

        browser.screenshot(tmp_path / "page.png")

        seen = f"{page}, {width} pixels, {colors}"
        assert (tmp_path / "page.png").stat().st_size > 10_000, seen
        assert browser.errors() == [], seen
        assert [request for request in browser.requests() if not request.startswith((address, "data:"))] == [], seen
        assert browser.script("return document.documentElement.scrollWidth - window.innerWidth") <= 0, seen
        background = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert is_dark(background) == (colors == "dark"), seen


def test_diagrams_are_legible_fit_the_page_and_follow_the_theme_switch(browser: Browser, address: str) -> None:
    for width in WIDTHS:
        browser.resize(width)
        browser.open(f"{address}/explanation/guarantees.html")

        sizes = browser.script(
            "return [...document.querySelectorAll('figure.diagram svg')].map(svg => [svg.clientWidth, svg.clientHeight,"
            " Math.min(...[...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect().height))])"
        )

        assert len(sizes) == 3
        for wide, high, text_height in sizes:
            assert 300 < wide <= width
            assert high > 300
            assert text_height >= 10

    paper = "return getComputedStyle(document.querySelector('figure.diagram rect')).fill"
    in_light = browser.script(paper)

    browser.script("document.body.dataset.theme = 'dark'")

    assert (is_dark(in_light), is_dark(browser.script(paper))) == (False, True)


def test_the_search_finds_a_page_by_its_text(browser: Browser, address: str) -> None:
    browser.open(f"{address}/search.html?q=takeover")
    found = "return [...document.querySelectorAll('#search-results li a')].map(link => link.textContent)"

    WebDriverWait(browser.driver, 30).until(lambda _: browser.script(found))

    assert browser.script(found)[0] == "Guarantees and their limits"
    assert browser.errors() == []


def is_dark(color: str) -> bool:
    """Return whether a color such as rgb(1, 2, 3) is closer to black than to white."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) < 3 * 128
