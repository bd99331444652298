"""Extract the code blocks of the documentation, so that tests can check them.

- `python`: run; the blocks of a page share a namespace, and `await` is allowed at the top level. The namespace has
  `folder`, an empty folder, and `closing`, an `AsyncExitStack` that is closed after the page.
- `toml`: loaded as settings.
- `sh`, and `console` after its prompt: the programs, commands, options, modules and make targets must exist.
- `sql`: run on a real server. `yaml`, `json`: parsed. `text`: output, diagrams and files of other programs.

The pages use two kinds of Markdown comments, which readers do not see:

    <!-- python                                Python that is not shown: preparations, and assertions on the result
    manager = …
    -->

    <!-- not run: part of examples/x.py -->   before a block that is not run: that file contains it
    <!-- not run: run by tests/test_x.py -->   before a block that is not run: that test extracts it from the page
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Final

from tests.packaging import reference_commands
from tests.packaging.repository import ROOT, files, name_of

LANGUAGES: Final = {"console", "json", "python", "sh", "sql", "text", "toml", "yaml"}
_BLOCK: Final = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<shown>.*?)^(?P=indent)```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$"
    r"|^(?:   )*<!-- not run: (?P<reason>[^\n]*) -->$",
    re.MULTILINE | re.DOTALL,
)
_INDENTED: Final = re.compile(r"(?:\A|\n\n)(?P<body>(?: {4}.*\n(?:\n(?= {4}))*)+)")

ELSEWHERE: Final = {
    ".",
    "cd",
    "curl",
    "docker",
    "export",
    "grep",
    "kafka-consumer-groups.sh",
    "kubectl",
    "source",
    "sqlite3",
}
"""Programs of others; their arguments are not checked."""
NEW: Final = "shop"
"""The application that `integr8s-idem new` creates on the pages."""
SCAFFOLD: Final = ROOT / "integr8s_idem" / "operations" / "scaffold" / "app"
_PYTHON: Final = re.compile(r"(?:\.venv/bin/)?python3?")


@dataclass(frozen=True)
class Block:
    """A code block of a page; `line` is the number of its first line, from 1."""

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""
    """Why the block is not run; empty if it is run."""
    is_hidden: bool = False
    """Whether the block is a comment that readers do not see."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def pages() -> Iterator[Path]:
    """Return the pages that people write; generated API pages only show signatures."""
    return (page for page in files(".md") if "docs/reference/api" not in name_of(page))


def blocks(page: Path, language: str = "") -> list[Block]:
    """Return the blocks of a page in order, of one language or of all."""
    return [block for block in _blocks(page) if language in {"", block.language}]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    reason = ""
    for found in _BLOCK.finditer(text):
        if found["reason"]:
            reason = found["reason"]
            continue
        hidden = found["hidden"] is not None
        line = text.count("\n", 0, found.start()) + 2
        body = found["hidden"] if hidden else dedent(found["shown"])
        yield Block(page, line, "python" if hidden else found["language"], body, reason, hidden)
        reason = ""


def indented(page: Path) -> list[str]:
    """Return indented code blocks, which have no language."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [found["body"] for found in _INDENTED.finditer(text)]


def named_commands(page: Path) -> list[str]:
    """Return the commands of this library's program in the sentences of a page, each with the first of its choices."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    named = re.findall(rf"(?<!`)`({reference_commands.PROGRAM} [^`]+)`", text)
    return [re.sub(r"[\[\]]|\|[^ ]+", "", command).replace("\n", " ") for command in named]


def mistakes_in_shell(text: str) -> Iterator[str]:
    """Yield what shell commands refer to and does not exist."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for command in _commands(words):
            yield from _mistakes_of(command)


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Yield the commands of a line, without leading variable assignments."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word in {"|", "&&", ";", "&"}:
            if command:
                yield command
            command = []
        elif command or not re.match(r"[A-Z_0-9]+=", word):
            command.append(word)


def _mistakes_of(command: list[str]) -> Iterator[str]:
    program, *rest = command
    if program.removeprefix(".venv/bin/") == reference_commands.PROGRAM:
        yield from _mistakes_of_cli(rest)
    elif _PYTHON.fullmatch(program):
        yield from _mistakes_of_python(rest)
    elif program == "make":
        yield from (f"unknown make target {word}" for word in rest if "=" not in word and word not in targets())
    elif program == "pip":
        yield from (f"unknown extra {extra}" for extra in _extras_named(rest) - extras())
    elif program not in ELSEWHERE:
        yield f"unknown program {program}"


def _mistakes_of_cli(words: list[str]) -> Iterator[str]:
    known = reference_commands.commands()
    name = reference_commands.PROGRAM
    while words and f"{name} {words[0]}" in known:
        name = f"{name} {words.pop(0)}"
    command = known[name]
    if hasattr(command, "commands") and not {"--help", "--version"} & set(words):
        yield f"{name} has no command {words[0] if words else '(none given)'}"
        return
    allowed = reference_commands.options(command)
    yield from (
        f"{name} has no option {word}" for word in words if word[0] == "-" and word.split("=")[0] not in allowed
    )


def _mistakes_of_python(words: list[str]) -> Iterator[str]:
    match words:
        case ["-m", "integr8s_idem", *rest]:
            yield from _mistakes_of_cli(rest)
        case ["-m", module, *_] if module.startswith(f"{NEW}."):
            if not (SCAFFOLD / f"{module.removeprefix(f'{NEW}.')}.py.tmpl").exists():
                yield f"integr8s-idem new does not create {module}"
        case ["-m", module, *_]:
            if importlib.util.find_spec(module) is None:
                yield f"module {module} not found"
        case [file, *_] if file.endswith(".py"):
            if not (ROOT / file).exists():
                yield f"file {file} not found"
        case _:
            yield f"unsupported arguments: python {' '.join(words)}"


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def extras() -> set[str]:
    """Return the extras of the package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    return set(re.findall(r"^([a-z-]+) = ", section, re.MULTILINE))


def _extras_named(words: list[str]) -> set[str]:
    return {extra for word in words for found in re.findall(r"\[([a-z,-]+)\]", word) for extra in found.split(",")}
