"""The site is built without a warning, hangs together, and fetches nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import get_args
from urllib.parse import unquote, urlsplit

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from tests.packaging import site
from tests.packaging.repository import ROOT, files, name_of
from tests.support.browser import Browser, Colours

pytestmark = pytest.mark.timeout(300)  # Sphinx reads and draws two hundred pages first

WIDTHS = (1280, 400)
SERVED_BY_SPHINX = {"genindex.html", "search.html"}
"""Pages of its own making: an index of nothing, and the search, which is a form on every page."""
FETCHING = re.compile(r"@import|url\(\s*['\"]?(?:https?:)?//|\bfetch\(\s*['\"]https?:|\bsrc=['\"](?:https?:)?//")


class Links(HTMLParser):
    """What a page links to, and what it has a browser fetch."""

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
    """The site, built from nothing: of what it has seen before Sphinx does not warn again."""
    folder = tmp_path_factory.mktemp("site")
    done = site.build(folder)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder / "html"


@cache
def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def reachable(start: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        page = waiting.pop()
        if page not in found and page.suffix == ".html" and page.exists():
            found.add(page)
            waiting += [page.parent.joinpath(unquote(urlsplit(link).path)).resolve() for link in read(page).links]
    return found


def test_every_page_can_be_reached_from_the_first_one(built: Path) -> None:
    every = {page for page in built.rglob("*.html") if page.name not in SERVED_BY_SPHINX}

    assert len(every) > 100
    assert every - reachable((built / "index.html").resolve()) == set()


def test_nothing_is_fetched_from_elsewhere(built: Path) -> None:
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


def test_what_is_searched_is_the_pages_and_not_the_sources(built: Path) -> None:
    index = (built / "searchindex.js").read_text(encoding="utf-8")
    known = json.loads(index[index.index("{") : index.rindex("}") + 1])
    titles = set(known["titles"])

    assert {"What is promised, and what is not", "Your first service", "Errors"} <= titles
    assert not [title for title in titles if title.startswith("tests/")]


@pytest.mark.parametrize("folder", [index.parent for index in files("index.md")], ids=name_of)
def test_an_index_lists_every_page_of_its_folder(folder: Path) -> None:
    index = (folder / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", index, re.MULTILINE))

    unlisted = {page.name for page in folder.glob("*.md")} - listed - {"index.md"}

    assert site.EVERY_PAGE in index or unlisted == set(), f"list it in {name_of(folder / 'index.md')}"


def test_a_link_out_of_the_documentation_leads_to_a_page_of_the_site() -> None:
    every = site.pages()

    rewritten = every["explanation/guarantees.md"].text

    assert "](../repository/tests/faults/test_crash_points.py.md)" in rewritten
    assert every["repository/ARCHITECTURE.md"].source == ROOT / "ARCHITECTURE.md"


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs" / "diagrams").glob("*.svg")), ids=lambda file: file.name)
def test_a_diagram_is_told_to_those_who_do_not_see_it(drawing: Path) -> None:
    text = drawing.read_text(encoding="utf-8")
    titles = re.findall(r'<(title|desc) id="([\w-]+)">[^<]{10,}</\1>', text)

    assert [kind for kind, _ in titles] == ["title", "desc"]
    assert f'role="img" aria-labelledby="{" ".join(name for _, name in titles)}"' in text
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\s\"]+", text) == ["http://www.w3.org/2000/svg"]


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    """The site, served on a port of the loopback address."""
    handler = partial(Quiet, directory=str(built))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


def test_pages_are_whole_in_a_browser(browser: Browser, address: str, tmp_path: Path) -> None:
    pages = ("index", "tutorial/first-service", "explanation/guarantees")
    for page, width, colours in product(pages, WIDTHS, get_args(Colours)):
        browser.prefer(colours)
        browser.resize(width)
        browser.open(f"{address}/{page}.html")

        browser.screenshot(tmp_path / "page.png")

        seen = f"{page}, {width} pixels, {colours}"
        assert (tmp_path / "page.png").stat().st_size > 10_000, seen
        assert browser.errors() == [], seen
        assert [request for request in browser.requests() if not request.startswith((address, "data:"))] == [], seen
        assert browser.script("return document.documentElement.scrollWidth - window.innerWidth") <= 0, seen
        background = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert is_dark(background) == (colours == "dark"), seen


def test_diagrams_can_be_read_and_fit_and_follow_the_switch_of_the_site(browser: Browser, address: str) -> None:
    for width in WIDTHS:
        browser.resize(width)
        browser.open(f"{address}/explanation/guarantees.html")

        sizes = browser.script(
            "return [...document.querySelectorAll('figure.diagram svg')].map(svg => [svg.clientWidth, svg.clientHeight,"
            " Math.min(...[...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect().height))])"
        )

        assert len(sizes) == 3
        for wide, high, letters in sizes:
            assert 300 < wide <= width
            assert high > 300
            assert letters >= 10

    paper = "return getComputedStyle(document.querySelector('figure.diagram rect')).fill"
    in_light = browser.script(paper)

    browser.script("document.body.dataset.theme = 'dark'")

    assert (is_dark(in_light), is_dark(browser.script(paper))) == (False, True)


def test_a_search_finds_what_is_told(browser: Browser, address: str) -> None:
    browser.open(f"{address}/search.html?q=takeover")
    found = "return [...document.querySelectorAll('#search-results li a')].map(link => link.textContent)"

    WebDriverWait(browser.driver, 30).until(lambda _: browser.script(found))

    assert browser.script(found)[0] == "What is promised, and what is not"
    assert browser.errors() == []


def is_dark(colour: str) -> bool:
    """Whether a color, as in rgb(1, 2, 3), is nearer to black."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128
