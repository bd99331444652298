"""The documentation as a site: `make docs` writes it to `.cache/docs/html/`.

Pages are written for a plain Git host: relative links, also to what stands outside of `docs/`, and index pages that
are lists of links.  Sphinx sees copies of them, in which

- a list of links on an index page is a table of contents as well;
- a page or a source outside of `docs/` that is linked to has a page of its own below `repository/`;
- a diagram stands in the page itself, so that it follows the light or dark of the site;
- comments are left out.

Nothing is fetched, neither to build nor to look.
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
"""The folder of the site for what stands outside of `docs/`."""

EVERY_PAGE: Final = "<!-- every page of this folder -->"
"""Stands on an index page for a list of links that would only repeat the folder."""

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
    """A page of the site: what it is made of, and what it links to."""

    source: Path
    text: str
    wants: frozenset[Path] = frozenset()
    """Files that need a page as well."""
    pictures: frozenset[Path] = frozenset()
    """Files that go along as they are."""


def place_of(source: Path) -> str:
    """Where a file of the repository stands among those that Sphinx sees."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    name = f"{OUTSIDE}/{name_of(source)}"
    return name if source.suffix in {".md", *_PICTURES} else f"{name}.md"


def pages() -> dict[str, Page]:
    """Every page by its place: those of `docs/`, and whatever these lead to."""
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
        return Page(source, _as_it_stands(source, text))
    wants: set[Path] = set()
    pictures: set[Path] = set()

    def rewritten(part: re.Match[str]) -> str:
        if part["comment"]:
            return ""
        if part["image"]:
            return _drawn(source.parent / part["image"])
        if not part["target"] or re.match(r"[a-z]+:|#", part["target"]):
            return part[0]
        file, _, anchor = part["target"].partition("#")
        target = (source.parent / file).resolve()
        target = target / "index.md" if target.is_dir() else target
        if not target.exists():
            return part[0]  # Sphinx says so
        if target.suffix in _PICTURES:
            pictures.add(target)
            return part[0]
        wants.add(target)
        way = os.path.relpath(place_of(target), Path(place_of(source)).parent)
        return f"{part['words']}({way}{'#' * bool(anchor)}{anchor})"

    text = _PART.sub(rewritten, text.replace(EVERY_PAGE, "\n".join(_pages_beside(source))))
    # A page from elsewhere need not be in a table of contents: other pages lead to it.
    front = "" if source.is_relative_to(DOCS) else "---\norphan: true\n---\n\n"
    return Page(source, front + text + "".join(_contents(source, text)), frozenset(wants), frozenset(pictures))


def _pages_beside(index: Path) -> Iterator[str]:
    """A list of the pages of a folder, by name."""
    for page in sorted(index.parent.glob("*.md")):
        if page != index:
            yield f"- [{title_of(page)}]({page.name})"


def title_of(page: Path) -> str:
    """Its first heading."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _contents(source: Path, text: str) -> Iterator[str]:
    """What an index page lists, as Sphinx wants it.  The lists of the first page keep their headings."""
    if source.name != "index.md" and source != DOCS / "reference" / "api" / "README.md":
        return
    pieces = _HEADING.split(text)
    for heading, piece in zip(["", *pieces[1::2]], pieces[::2], strict=True):
        listed = [part["target"] for part in _LISTED.finditer(piece)]
        if listed:
            caption = f":caption: {heading}\n" if source == DOCS / "index.md" else ""
            yield f"\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(listed) + "\n```\n"


def _as_it_stands(source: Path, text: str) -> str:
    """A page for a file that is no page.  It can be read, and is not what a search looks for."""
    language = _LANGUAGES.get(source.suffix, "text")
    head = f"---\norphan: true\nnosearch: true\n---\n\n# `{name_of(source)}`"
    return f"{head}\n\n``````{language}\n{text.rstrip()}\n``````\n"


def _drawn(image: Path) -> str:
    """The picture itself, whose dark colors count where the reader has chosen dark, and not where light."""
    drawing = _DARK.sub(
        r'@media (prefers-color-scheme: dark) { body:not([data-theme="light"]) .idem \1 }'
        r' body[data-theme="dark"] .idem \1',
        image.read_text(encoding="utf-8"),
    )
    lines = [line for line in drawing.splitlines() if line.strip()]  # an empty one would end it
    return '<figure class="diagram">\n' + "\n".join(lines) + "\n</figure>"


def prepare(folder: Path) -> None:
    """Write the pages to `folder`.  A page that has not changed stays as it is, so that Sphinx need not read it."""
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
    """Build the site in `folder`/html; a warning is an error.  What Sphinx says is in `stderr`."""
    prepare(folder / "source")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--nitpicky", "--write-all", "--jobs", "2"]
    places = ["--conf-dir", DOCS, "--doctree-dir", folder / "doctrees", folder / "source", folder / "html"]
    command = [sys.executable, "-m", "sphinx", "--builder", "html", *options, *map(str, places)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def main() -> None:
    """Build, say what is wrong or where the site is."""
    built = build()
    if built.returncode:
        # Sphinx names the copy; people fix the page itself.
        said = (built.stdout + built.stderr).replace(f"{FOLDER / 'source' / OUTSIDE}{os.sep}", "")
        sys.exit(said.replace(str(FOLDER / "source"), "docs"))
    print(f"the site is in {(FOLDER / 'html' / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
