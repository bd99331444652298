"""Check the spelling: `python -m tests.packaging.spelling`, part of `make check`.

codespell looks for misspellings everywhere, including names in code. British words are reported in prose only: in
comments, docstrings and pages without their code. Names in code follow the spelling of their libraries.
"""

from __future__ import annotations

import ast
import importlib.resources
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.packaging.repository import ROOT, files, name_of, prose_lines

_TEXTS: Final = (".md", ".py", ".lua", ".sql", ".toml", ".yaml", ".yml", ".svg", ".css", ".sh", ".tmpl", "Makefile")
_WORD: Final = re.compile(r"[A-Za-z]+")
_TARGET: Final = re.compile(r"\]\([^)]*\)")
_AS_IT_IS: Final = re.compile(r"`[^`]*`|\S*[_/.:@=]\S+|\w+\(\S*|\"[^\"]*\"")
"""Code, paths, addresses, dotted names and quotations, which are not checked."""

AMERICAN_TOO: Final = {
    "cancelled",  # asyncio's CancelledError
    "cancelling",
    "licence",
    "programme",
    "storey",
    "storeys",
}
"""Words that codespell lists as British, and that are correct here."""


@dataclass(frozen=True)
class Slip:
    """A word in British spelling."""

    place: str
    word: str
    american: str

    def __str__(self) -> str:
        return f"{self.place}: {self.word} is British for {self.american}"


@cache
def british() -> Mapping[str, str]:
    """Map British words in lower case to the American ones."""
    return {word: american for word, american in listed().items() if word not in AMERICAN_TOO}


def listed() -> Mapping[str, str]:
    """Return the list of codespell."""
    data = importlib.resources.files("codespell_lib") / "data" / "dictionary_en-GB_to_en-US.txt"
    pairs = (line.partition("->") for line in data.read_text(encoding="utf-8").splitlines())
    return {word: others.split(",")[0].strip() for word, _, others in pairs}


def slips(name: str, prose: Iterable[tuple[int, str]]) -> Iterator[Slip]:
    """Yield the British words in numbered lines of prose."""
    for number, line in prose:
        for word in _WORD.findall(_AS_IT_IS.sub(" ", _TARGET.sub("] ", line))):
            if (american := british().get(word.lower())) is not None:
                yield Slip(f"{name}:{number}", word, american)


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a page or Python file; none for other files."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield from prose_lines(text)
    elif file.suffix == ".py":
        yield from _comments(text)
        yield from _docstrings(text)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from enumerate(text.splitlines(), node.lineno)


def misspellings(*paths: Path) -> str:
    """Return the output of codespell for the files; `[tool.codespell]` in pyproject.toml configures it."""
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml"), *map(str, paths)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def main() -> None:
    """Print each finding with its file and line; exit with status 1 if there are any."""
    output = misspellings(*(file for suffix in _TEXTS for file in files(suffix))).replace(f"{ROOT}/", "")
    found = [
        slip for suffix in (".md", ".py") for file in files(suffix) for slip in slips(name_of(file), prose_of(file))
    ]
    for slip in found:
        print(slip)
    print(output, end="")
    if found or output:
        sys.exit(1)


if __name__ == "__main__":
    main()
