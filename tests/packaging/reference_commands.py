"""Generate `docs/reference/cli.md`, the commands with their options, from the Typer application."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import typer

from integr8s_idem.cli.app import app
from tests.packaging.markdown import MADE, cell, table

PROGRAM: Final = "integr8s-idem"
_HEAD: Final = """\
The program is installed as `integr8s-idem`; `python -m integr8s_idem` is equivalent. `COMMAND --help` prints what this
page says. Settings come from the environment and from `settings.toml`: see [settings](settings.md).

Commands print their results to standard output; summaries of lists, questions, progress and errors go to standard
error. Standard streams that are closed are opened on `/dev/null`. All commands except `doctor` have the same exit
statuses:

| status | meaning |
| --- | --- |
| 0 | Success, including an empty list, and a reader that closes the pipe early, such as `head`. |
| 1 | A service or a server failed, nothing matched the given names, you answered no to the question, or the output \
could not be written. `run`: or a handler was still running at the end. |
| 2 | The arguments or the settings are invalid, or a confirmation is needed and there is no terminal. |
| 130 | Interrupted by Ctrl-C. |
| 128 + N | Of `run --processes`: signal N killed a worker process. Of other commands: signal N ended the command. |

If a command that changes something cannot write its report, because the disk is full or the reader has closed the pipe,
the change has been made nevertheless. The command says on standard error what it changed, and exits with status 1.
"""
_VALUES: Final = {"str": "TEXT", "int": "N", "int range": "N", "float": "N", "float range": "N", "path": "FILE"}
_TYPE_OF_ARGUMENT: Final = re.compile(r"^([A-Z][A-Z:]*) (?:TEXT|N|FILE)$")


def commands() -> dict[str, Any]:
    """Map the full name of each command and group to it, sorted by name."""
    return dict(sorted(_below(typer.main.get_command(app), PROGRAM)))


def _below(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _below(inner, f"{words} {name}")


def options(command: Any) -> set[str]:
    """Return the options of a command, including `--help`."""
    return {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}


def page() -> str:
    every = commands()
    lines = ["# Commands", "", MADE, "", _HEAD]
    rows = [(f"[`{words}`](#{_anchor(words)})", _summary(each)) for words, each in every.items() if not _is_group(each)]
    lines += [*table(("command", "description"), rows), ""]
    for words, command in every.items():
        if not _is_group(command) or words == PROGRAM:
            lines += _section(words, command)
    return "\n".join(lines).rstrip() + "\n"


def _section(words: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=words)
    usage = " ".join(command.get_usage(context).split()).removeprefix("Usage: ").replace("{", "").replace("}", "")
    yield from (f"## `{words}`", "", inspect.cleandoc(command.help or ""), "", "```text", usage, "```", "")
    records = [each.get_help_record(context) for each in command.params if not getattr(each, "hidden", False)]
    rows = [(cell(f"`{_name(name)}`"), _meaning(says)) for name, says in filter(None, records)]
    if rows:
        yield from (*table(("option", "meaning"), rows), "")


def _name(shown: str) -> str:
    """Return the option with a placeholder for its value."""
    for kind, word in _VALUES.items():
        shown = shown.replace(f"<{kind}>", word)
    return _TYPE_OF_ARGUMENT.sub(r"\1", shown)


def _meaning(text: str) -> str:
    """Return the help text, with default and bounds in parentheses."""
    text = re.sub(r"(\d+)<=x<=(\d+)", r"from \1 to \2", text.replace("[required]", ""))
    return cell(text.replace("[", "(").replace("]", ")"))


def _is_group(command: Any) -> bool:
    return hasattr(command, "commands")


def _summary(command: Any) -> str:
    return cell(inspect.cleandoc(command.help or "").partition("\n\n")[0])


def _anchor(words: str) -> str:
    return words.replace(" ", "-")
