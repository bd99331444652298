"""What the documentation shows, block by block, and how each is held to the truth.

- `python`: run, those of a page one after the other in one namespace; `await` may stand at the top.  It finds there
  `folder`, an empty one, and `closing`, an `AsyncExitStack` for what is to be closed behind the page.
- `toml`: loaded as settings.
- `sh`, and `console` behind its prompt: programs, commands, options, modules and targets are there.
- `sql`: run on a real server.  `yaml`, `json`: read.  `text` is output, pictures, and the files of other programs.

Markdown has comments, which no reader sees; the pages use two of them:

    <!-- python                                Python that is not shown: what the code needs, and what comes of it
    manager = …
    -->

    <!-- not run: stands in examples/x.py -->  before a block: it is not run here, since it is a part of that file
    <!-- not run: run by tests/test_x.py -->   the same, since that test reads it off this page
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
"""Programs that are not ours.  What is typed behind them is their matter."""
NEW: Final = "shop"
"""What `integr8s-idem new` writes on the pages."""
SCAFFOLD: Final = ROOT / "integr8s_idem" / "operations" / "scaffold" / "app"
_PYTHON: Final = re.compile(r"(?:\.venv/bin/)?python3?")


@dataclass(frozen=True)
class Block:
    """A piece of a page that is in some language; `line` is that of its first line, from 1."""

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""
    """Why it is not run; empty if it is."""
    is_hidden: bool = False
    """Whether readers do not see it."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def pages() -> Iterator[Path]:
    """Pages that people write: what is drawn from code shows signatures, and has nothing to run."""
    return (page for page in files(".md") if "docs/reference/api" not in name_of(page))


def blocks(page: Path, language: str = "") -> list[Block]:
    """The blocks of a page in their order, of one language or of all."""
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
    """Blocks that are set apart by spaces alone, and so do not say what they are in."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [found["body"] for found in _INDENTED.finditer(text)]


def mistakes_in_shell(text: str) -> Iterator[str]:
    """What is typed and is not there."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for command in _commands(words):
            yield from _mistakes_of(command)


def _commands(words: list[str]) -> Iterator[list[str]]:
    """A line's commands, without the variables that are set for them."""
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
        yield from _mistakes_of_ours(rest)
    elif _PYTHON.fullmatch(program):
        yield from _mistakes_of_python(rest)
    elif program == "make":
        yield from (f"make has no target {word}" for word in rest if "=" not in word and word not in targets())
    elif program == "pip":
        yield from (f"there is no extra {extra}" for extra in _extras_named(rest) - extras())
    elif program not in ELSEWHERE:
        yield f"{program} is no program that is known here"


def _mistakes_of_ours(words: list[str]) -> Iterator[str]:
    known = reference_commands.commands()
    name = reference_commands.PROGRAM
    while words and f"{name} {words[0]}" in known:
        name = f"{name} {words.pop(0)}"
    command = known[name]
    if hasattr(command, "commands") and not {"--help", "--version"} & set(words):
        yield f"{name} has no command {words[0] if words else 'of its own'}"
        return
    allowed = reference_commands.options(command)
    yield from (
        f"{name} has no option {word}" for word in words if word[0] == "-" and word.split("=")[0] not in allowed
    )


def _mistakes_of_python(words: list[str]) -> Iterator[str]:
    match words:
        case ["-m", "integr8s_idem", *rest]:
            yield from _mistakes_of_ours(rest)
        case ["-m", module, *_] if module.startswith(f"{NEW}."):
            if not (SCAFFOLD / f"{module.removeprefix(f'{NEW}.')}.py.tmpl").exists():
                yield f"integr8s-idem new writes no {module}"
        case ["-m", module, *_]:
            if importlib.util.find_spec(module) is None:
                yield f"there is no module {module}"
        case [file, *_] if file.endswith(".py"):
            if not (ROOT / file).exists():
                yield f"there is no file {file}"
        case _:
            yield f"python {' '.join(words)} is not understood"


def targets() -> set[str]:
    """What `make` can make."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def extras() -> set[str]:
    """The extras of the package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    return set(re.findall(r"^([a-z-]+) = ", section, re.MULTILINE))


def _extras_named(words: list[str]) -> set[str]:
    return {extra for word in words for found in re.findall(r"\[([a-z,-]+)\]", word) for extra in found.split(",")}
