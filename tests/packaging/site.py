"""Build the documentation site: `make docs` writes it to `.cache/docs/html/`.

Pages are written for a Git host: they have relative links, also to files outside `docs/`, and index pages with lists of
links. Sphinx gets copies of them, in which

- a list of links on an index page becomes a table of contents as well, unless it is a list of all pages of a folder;
- each page or source outside `docs/` that is linked to becomes a page under `repository/`;
- diagrams are embedded in the page, so that they follow the light or dark theme of the site;
- comments are removed.

Neither building nor viewing the site downloads anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.packaging.repository import ROOT, files, name_of

DOCS: Final = ROOT / "docs"
FOLDER: Final = ROOT / ".cache" / "docs"
OUTSIDE: Final = "repository"
"""The folder of the site for files outside `docs/`."""

EVERY_PAGE: Final = "<!-- every page of this folder -->"
"""Placeholder on an index page for a list of links to all pages of its folder, which are in no table of contents."""

_FENCED: Final = r"^ *(?P<fence>`{3,})[^\n]*\n.*?^ *(?P=fence)$"
_COMMENT: Final = r"^ *(?P<comment><!--).*?-->\n+"
_SPAN: Final = r"(?P<ticks>`+)[^`].*?(?P=ticks)"
_IMAGE: Final = r"^!\[[^\]]*\]\((?P<image>[^)\s]+\.svg)\)$"
_LINK: Final = r"(?P<words>\[(?:`[^`]*`|[^\]`])*\])\((?P<target>[^)\s]+)\)"
_PART: Final = re.compile(f"{_FENCED}|{_COMMENT}|{_IMAGE}|{_LINK}|{_SPAN}", re.MULTILINE | re.DOTALL)
_LISTED: Final = re.compile(r"^- \[[^\]]+\]\((?P<target>[^)\s#]+\.md)\)", re.MULTILINE)
_HEADING: Final = re.compile(r"^## (?P<words>.+)$", re.MULTILINE)
_DARK: Final = re.compile(r"@media \(prefers-color-scheme: dark\) \{\s*\.idem (\{[^}]*\})\s*\}")
_PICTURES: Final = {".png", ".svg"}
_LANGUAGES: Final = {".py": "python", ".toml": "toml", ".lua": "lua", ".sql": "sql", ".yaml": "yaml"}


@dataclass(frozen=True)
class Page:
    """A page of the site, and the files that it links to."""

    source: Path
    text: str
    wants: frozenset[Path] = frozenset()
    """Files that need a page, too."""
    pictures: frozenset[Path] = frozenset()
    """Files that are copied unchanged."""


def place_of(source: Path) -> str:
    """Return the path of a repository file among the sources of Sphinx."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    name = f"{OUTSIDE}/{name_of(source)}"
    return name if source.suffix in {".md", *_PICTURES} else f"{name}.md"


def pages() -> dict[str, Page]:
    """Return each page by its path: those in `docs/`, and all files that they link to."""
    found: dict[str, Page] = {}
    waiting = [file for file in files(".md") if file.is_relative_to(DOCS)]
    while waiting:
        source = waiting.pop()
        if place_of(source) not in found:
            page = found[place_of(source)] = _page(source)
            waiting += page.wants
    return found


def _page(source: Path) -> Page:
    text = source.read_text(encoding="utf-8")
    if source.suffix != ".md":
        return Page(source, _source_page(source, text))
    wants: set[Path] = set()
    pictures: set[Path] = set()

    def rewritten(part: re.Match[str]) -> str:
        if part["comment"]:
            return ""
        if part["image"]:
            return _embedded(source.parent / part["image"])
        if not part["target"] or re.match(r"[a-z]+:|#", part["target"]):
            return part[0]
        file, _, anchor = part["target"].partition("#")
        target = (source.parent / file).resolve()
        target = target / "index.md" if target.is_dir() else target
        if not target.exists():
            return part[0]  # Sphinx reports the broken link
        if target.suffix in _PICTURES:
            pictures.add(target)
            return part[0]
        wants.add(target)
        way = os.path.relpath(place_of(target), Path(place_of(source)).parent)
        return f"{part['words']}({way}{'#' * bool(anchor)}{anchor})"

    text = _PART.sub(rewritten, text.replace(EVERY_PAGE, "\n".join(_pages_next_to(source))))
    front = "---\norphan: true\n---\n\n" if _is_only_linked(source) else ""
    return Page(source, front + text + "".join(_contents(source, text)), frozenset(wants), frozenset(pictures))


def _is_only_linked(source: Path) -> bool:
    """Tell whether a page is in no table of contents: it is outside `docs/`, or in a folder with a list of all pages.

    The sidebar of each page holds the whole table of contents; ninety decisions would hide the other pages in it.
    """
    return not source.is_relative_to(DOCS) or (source.name != "index.md" and _lists_all(source.with_name("index.md")))


def _lists_all(index: Path) -> bool:
    return index.is_file() and EVERY_PAGE in index.read_text(encoding="utf-8")


def _pages_next_to(index: Path) -> Iterator[str]:
    """Yield links to the other pages of a folder, sorted by name."""
    for page in sorted(index.parent.glob("*.md")):
        if page != index:
            yield f"- [{title_of(page)}]({page.name})"


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _contents(source: Path, text: str) -> Iterator[str]:
    """Yield the lists of an index page as Sphinx tables of contents. Those of the first page keep their headings."""
    if source.name != "index.md" and source != DOCS / "reference" / "api" / "README.md":
        return
    if _lists_all(source):
        return
    pieces = _HEADING.split(text)
    for heading, piece in zip(["", *pieces[1::2]], pieces[::2], strict=True):
        listed = [part["target"] for part in _LISTED.finditer(piece)]
        if listed:
            caption = f":caption: {heading}\n" if source == DOCS / "index.md" else ""
            yield f"\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(listed) + "\n```\n"


def _source_page(source: Path, text: str) -> str:
    """Return a page that shows a source file. The search ignores it."""
    language = _LANGUAGES.get(source.suffix, "text")
    head = f"---\norphan: true\nnosearch: true\n---\n\n# `{name_of(source)}`"
    return f"{head}\n\n``````{language}\n{text.rstrip()}\n``````\n"


def _embedded(image: Path) -> str:
    """Return the SVG itself, with dark colors that follow the theme the reader has chosen."""
    drawing = _DARK.sub(
        r'@media (prefers-color-scheme: dark) { body:not([data-theme="light"]) .idem \1 }'
        r' body[data-theme="dark"] .idem \1',
        image.read_text(encoding="utf-8"),
    )
    lines = [line for line in drawing.splitlines() if line.strip()]  # an empty line would end the HTML block
    return '<figure class="diagram">\n' + "\n".join(lines) + "\n</figure>"


def prepare(folder: Path) -> None:
    """Write the pages to `folder`; leave unchanged pages alone, so that Sphinx does not read them again."""
    every = pages()
    made = {place: page.text.encode() for place, page in every.items()}
    made |= {place_of(file): file.read_bytes() for page in every.values() for file in page.pictures}
    for old in {file for file in folder.rglob("*") if file.is_file()} - {folder / place for place in made}:
        old.unlink()
    for file, content in ((folder / place, content) for place, content in made.items()):
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def build(folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    """Build the site in `folder`/html; warnings are errors. `stderr` holds the messages of Sphinx."""
    prepare(folder / "source")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--nitpicky", "--write-all", "--jobs", "2"]
    places = ["--conf-dir", DOCS, "--doctree-dir", folder / "doctrees", folder / "source", folder / "html"]
    command = [sys.executable, "-m", "sphinx", "--builder", "html", *options, *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def main() -> None:
    """Build the site, and print its path or the errors."""
    built = build()
    if built.returncode:
        # Sphinx reports paths of the copies; show those of the originals.
        messages = (built.stdout + built.stderr).replace(f"{FOLDER / 'source' / OUTSIDE}{os.sep}", "")
        sys.exit(messages.replace(str(FOLDER / "source"), "docs"))
    print(f"the site is in {(FOLDER / 'html' / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
