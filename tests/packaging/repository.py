"""The files of the repository, without downloaded and generated ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_GENERATED: Final = {"__pycache__", "dist", "build"}
_DOT_FILES: Final = {
    ".ci",
    ".github",
    ".gitignore",
    ".dockerignore",
    ".editorconfig",
    ".pre-commit-config.yaml",
}
_FENCE: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"^ *<!--.*?-->$", re.MULTILINE | re.DOTALL)


def files(suffix: str = "") -> Iterator[Path]:
    """Yield the files of the repository whose names end with `suffix`, sorted."""
    return (path for path in _below(ROOT) if path.name.endswith(suffix))


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name not in _DOT_FILES
        if hidden or path.name in _GENERATED or path.is_symlink():
            continue
        if path.is_dir():
            yield from _below(path)
        else:
            yield path


def name_of(path: Path) -> str:
    """Return the path of a file relative to the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def code_blocks(markdown: str, language: str) -> list[str]:
    """Return the fenced code blocks in a language."""
    return [body for found, body in _FENCE.findall(markdown) if found == language]


def without_code(markdown: str) -> str:
    """Return the prose without comments, fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", _COMMENT.sub("", markdown)))


def prose_lines(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are neither comments nor fenced code, with their numbers from 1."""

    def emptied(block: re.Match[str]) -> str:
        return "\n" * block[0].count("\n")

    return enumerate(_COMMENT.sub(emptied, _FENCE.sub(emptied, markdown)).splitlines(), 1)


def anchors(markdown: str) -> set[str]:
    """Return the link anchors of the headings: lower case, spaces as hyphens, without punctuation."""
    headings = re.findall(r"^#{1,6} (.+)$", _FENCE.sub("", _COMMENT.sub("", markdown)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def section(markdown: str, heading: str) -> str:
    """Return the text below a second-level heading, up to the next one."""
    _, found, after = markdown.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    return after.partition("\n## ")[0]
