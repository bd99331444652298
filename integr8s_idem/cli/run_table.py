"""The table of `integr8s-idem run`: one row for each service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.worker import ServiceReport

_COLOURS: Final = {"running": "green", "paused": "yellow", "draining": "yellow", "failed": "red", "stopped": "dim"}


@dataclass(frozen=True)
class _Column:
    heading: str
    short: str
    number: Callable[[ServiceReport], int]
    is_always_shown: bool = True


_WIDE: Final = 120
"""Width of a terminal that fits all columns."""
_COLUMNS: Final = (
    _Column("partitions", "", lambda report: report.partitions, is_always_shown=False),
    _Column("in flight", "", lambda report: report.in_flight, is_always_shown=False),
    _Column("handled", "handled", lambda report: report.tally.handled),
    _Column("duplicates", "dups", lambda report: report.tally.duplicates),
    _Column("retries", "retries", lambda report: report.tally.retries),
    _Column("dead letters", "dead", lambda report: report.tally.dead_letters),
    _Column("lag", "lag", lambda report: report.lag),
)


def report_table(reports: Sequence[ServiceReport], width: int) -> Group:
    """Return the table for a terminal of `width` columns, followed by the reasons for the services' states."""
    is_wide = width >= _WIDE
    # Numbers are never truncated; long names are folded.
    table = Table(box=box.ROUNDED if is_wide else box.SIMPLE_HEAD)
    table.add_column("service", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    columns = [column for column in _COLUMNS if is_wide or column.is_always_shown]
    for column in columns:
        table.add_column(column.heading if is_wide else column.short, justify="right", no_wrap=True)
    for report in reports:
        state = Text(report.state, style=_COLOURS.get(report.state, ""))
        table.add_row(Text(report.name), state, *(f"{column.number(report):,}" for column in columns))
    return Group(table, *_reasons(reports))


def _reasons(reports: Sequence[ServiceReport]) -> Iterator[Text]:
    for report in reports:
        if report.reason:
            text = printable(f"{report.name} {report.state}: {report.reason}")
            yield Text(text, style=_COLOURS.get(report.state, ""))
