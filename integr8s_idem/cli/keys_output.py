"""Output of `integr8s-idem keys`: panels on a terminal, lines in a pipe, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Final

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.cli.keys_format import explanation_json, heading, list_row, missing_line, record_json, rows
from integr8s_idem.cli.output import safe_console, write_line
from integr8s_idem.operations.keys.explanation import Explanation, RecordExplanation
from integr8s_idem.operations.keys.key_parser import ParsedKey
from integr8s_idem.operations.keys.record_reader import AnyRecord
from integr8s_idem.operations.keys.record_state import status_of

_COLORS: Final = {"processing": "yellow", "completed": "green", "failed": "red", "corrupt": "magenta"}
_WIDTHS: Final = (10, 10, 5, 24)
_HEADINGS: Final = ("status", "age", "tries", "details", "key")


def print_explanation(answer: Explanation, *, as_json: bool, whole_result: bool) -> None:
    """Print an explanation."""
    if as_json:
        write_line(json.dumps(explanation_json(answer, whole_result=whole_result), indent=2))
    elif sys.stdout.isatty():
        _on_screen(answer, whole_result)
    else:
        _as_text(answer, whole_result)


def print_record(found: AnyRecord, parsed: ParsedKey, *, as_json: bool) -> None:
    """Print a record with its whole result."""
    whole = record_json(found, parsed, body=sys.maxsize)
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
    for explained in answer.records:
        color = _COLORS[status_of(explained.found)]
        console.print(Panel(_grid(explained, whole_result), title=Text(heading(explained)), border_style=color))
    lines = [Text(missing_line(absent)) for absent in answer.absent]
    if lines:
        console.print(Panel(Group(*lines), title="no record", border_style="dim"))
    for note in _notes(answer):
        console.print(Text(printable(note), style="yellow"))
    console.print(Text(printable(f"read as {answer.read_as}"), style="dim"))


def _grid(explained: RecordExplanation, whole_result: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows(explained, whole_result=whole_result):
        grid.add_row(name, Text(value, style="bold" if name in ("handled", "next delivery") else ""))
    return grid


def _as_text(answer: Explanation, whole_result: bool) -> None:
    for explained in answer.records:
        write_line(f"{heading(explained)}")
        lines = list(rows(explained, whole_result=whole_result))
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            write_line(f"  {name:<{width}}  {value}")
        write_line("")
    if answer.absent:
        write_line("no record")
        for absent in answer.absent:
            write_line(f"  {missing_line(absent)}")
        write_line("")
    for note in _notes(answer):
        write_line(f"{printable(note)}\n")
    write_line(printable(f"read as {answer.read_as}"))


def _notes(answer: Explanation) -> list[str]:
    more = [f"{answer.more:,} more records match: use a longer name"] if answer.more else []
    return [*more, *answer.notes]


class Listing:
    """Prints records one at a time."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._on_terminal = sys.stdout.isatty() and not as_json
        self._has_heading = False

    def show(self, found: AnyRecord, parsed: ParsedKey) -> None:
        """Print a record.  Raises `OutputError`."""
        if self._as_json:
            write_line(json.dumps(record_json(found, parsed)))
            return
        line = list_row(found, parsed)
        if not self._on_terminal:
            write_line("\t".join(map(printable, line)))
            return
        if not self._has_heading:
            self._has_heading = True
            write_line(self._columns(_HEADINGS), dim=True)
        write_line(self._columns(line), color=_COLORS[line[0]], colored=_WIDTHS[0])

    def _columns(self, line: tuple[str, ...]) -> str:
        cells = [f"{cell[:width]:<{width}}" for cell, width in zip(line[:-1], _WIDTHS, strict=True)]
        # Never truncated: keys differ at their ends and are copied.
        return " ".join([*cells, line[-1]])
