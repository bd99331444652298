"""The checkout as its files: what stands in it, what was fetched or made is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_MADE: Final = {"__pycache__", "dist", "build"}
_HIDDEN_BUT_OURS: Final = {".ci", ".github", ".gitignore", ".dockerignore", ".editorconfig", ".pre-commit-config.yaml"}
_FENCE: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"^ *<!--.*?-->$", re.MULTILINE | re.DOTALL)


def files(suffix: str = "") -> Iterator[Path]:
    """Every file of ours whose name ends with `suffix`, sorted."""
    return (path for path in _below(ROOT) if path.name.endswith(suffix))


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name not in _HIDDEN_BUT_OURS
        if hidden or path.name in _MADE or path.is_symlink():
            continue
        if path.is_dir():
            yield from _below(path)
        else:
            yield path


def name_of(path: Path) -> str:
    """How people name a file of the checkout."""
    return path.relative_to(ROOT).as_posix()


def code_blocks(markdown: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for found, body in _FENCE.findall(markdown) if found == language]


def without_code(markdown: str) -> str:
    """Prose alone: neither comments nor fenced blocks nor spans of code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", _COMMENT.sub("", markdown)))


def prose_lines(markdown: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are neither comments nor fenced code, each with its number from 1."""

    def emptied(block: re.Match[str]) -> str:
        return "\n" * block[0].count("\n")

    return enumerate(_COMMENT.sub(emptied, _FENCE.sub(emptied, markdown)).splitlines(), 1)


def anchors(markdown: str) -> set[str]:
    """What links can point at: headings, lower case, spaces as hyphens, other marks dropped."""
    headings = re.findall(r"^#{1,6} (.+)$", _FENCE.sub("", _COMMENT.sub("", markdown)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def section(markdown: str, heading: str) -> str:
    """What stands below a heading of the second level, up to the next one."""
    _, found, behind = markdown.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    return behind.partition("\n## ")[0]
