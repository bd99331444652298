"""What `integr8s-idem keys` shows: a screen on a terminal, lines in a pipe, JSON for scripts."""

from __future__ import annotations

import json
import sys
from typing import Final

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.cli.keys_format import absent_line, explanation_json, heading, line_of, record_json, rows
from integr8s_idem.cli.output import safe_console, write_line
from integr8s_idem.operations.keys.explanation import Account, Explanation
from integr8s_idem.operations.keys.key_parser import Named
from integr8s_idem.operations.keys.record_reader import Found
from integr8s_idem.operations.keys.record_state import state_of

_COLOURS: Final = {"processing": "yellow", "completed": "green", "failed": "red", "corrupt": "magenta"}
_WIDTHS: Final = (10, 10, 5, 24)
_HEADINGS: Final = ("status", "age", "tried", "then", "key")


def show_explanation(answer: Explanation, *, as_json: bool, whole_result: bool) -> None:
    """All of an answer."""
    if as_json:
        write_line(json.dumps(explanation_json(answer, whole_result=whole_result), indent=2))
    elif sys.stdout.isatty():
        _on_screen(answer, whole_result)
    else:
        _as_text(answer, whole_result)


def show_record(found: Found, told: Named, *, as_json: bool) -> None:
    """One record, and all of its result."""
    whole = record_json(found, told, body=sys.maxsize)
    if as_json:
        write_line(json.dumps(whole))
        return
    result = whole.pop("result", None) or {}
    fields = {**whole, **{f"result_{name}": value for name, value in result.items()}}
    for name, value in fields.items():
        if value not in ("", None):
            write_line(f"{name:<18}  {printable(str(value))}")
    write_line("")


def _on_screen(answer: Explanation, whole_result: bool) -> None:
    console = safe_console()
    for account in answer.accounts:
        colour = _COLOURS[state_of(account.found)]
        console.print(Panel(_grid(account, whole_result), title=Text(heading(account)), border_style=colour))
    lines = [Text(absent_line(absent)) for absent in answer.absent]
    if lines:
        console.print(Panel(Group(*lines), title="no record", border_style="dim"))
    for note in _notes(answer):
        console.print(Text(printable(note), style="yellow"))
    console.print(Text(printable(f"read as {answer.read_as}"), style="dim"))


def _grid(account: Account, whole_result: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows(account, whole_result=whole_result):
        grid.add_row(name, Text(value, style="bold" if name in ("handled", "next delivery") else ""))
    return grid


def _as_text(answer: Explanation, whole_result: bool) -> None:
    for account in answer.accounts:
        write_line(f"{heading(account)}")
        told = list(rows(account, whole_result=whole_result))
        width = max(len(name) for name, _ in told)
        for name, value in told:
            write_line(f"  {name:<{width}}  {value}")
        write_line("")
    if answer.absent:
        write_line("no record")
        for absent in answer.absent:
            write_line(f"  {absent_line(absent)}")
        write_line("")
    for note in _notes(answer):
        write_line(f"{printable(note)}\n")
    write_line(printable(f"read as {answer.read_as}"))


def _notes(answer: Explanation) -> list[str]:
    more = [f"{answer.more:,} more records have such a name: say more of it"] if answer.more else []
    return [*more, *answer.notes]


class Listing:
    """Lines of records, one by one."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._on_terminal = sys.stdout.isatty() and not as_json
        self._begun = False

    def show(self, found: Found, told: Named) -> None:
        """Another one.  Raises `ReaderGoneError`."""
        if self._as_json:
            write_line(json.dumps(record_json(found, told)))
            return
        line = line_of(found, told)
        if not self._on_terminal:
            write_line("\t".join(map(printable, line)))
            return
        if not self._begun:
            self._begun = True
            write_line(self._columns(_HEADINGS), dim=True)
        write_line(self._columns(line), color=_COLOURS[line[0]], colored=_WIDTHS[0])

    def _columns(self, line: tuple[str, ...]) -> str:
        cells = [f"{cell[:width]:<{width}}" for cell, width in zip(line[:-1], _WIDTHS, strict=True)]
        # Never cut: keys differ at their ends, and people copy them.
        return " ".join([*cells, line[-1]])
