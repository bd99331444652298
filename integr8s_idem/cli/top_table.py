"""The table of `integr8s-idem top`: one row for each service of each worker, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.operations.fleet import ERRORS, Figures, FleetLook, ServiceRow
from integr8s_idem.telemetry import Signal

_STATES: Final = {"ready": "green", "running": "green", "not ready": "yellow"}
_BAD: Final = "bold red"
"""Of all other states, of what is failing now."""
_WORTH_A_LOOK: Final = "yellow"
_UNKNOWN: Final = Text("-", style="dim")
_GROWS: Final = "▲ "  # before the number, so that digits stand below each other


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[Figures], Text]
    given_up: int = 0
    """Where it is narrow, those with the greatest number go first; 0 stays."""


def _counted(*signals: Signal, style: str = "") -> Callable[[Figures], Text]:
    """How many there were; in color and with an arrow if there are more of what should not be."""

    def cell(figures: Figures) -> Text:
        count, rate = figures.count(*signals), figures.rate(*signals)
        if not style or not count:
            return Text(f"{count:,}")
        return Text(f"{_GROWS}{count:,}", style=_BAD) if rate else Text(f"{count:,}", style=style)

    return cell


def _per_second(signal: Signal) -> Callable[[Figures], Text]:
    def cell(figures: Figures) -> Text:
        rate = figures.rate(signal)
        if rate is None:
            return _UNKNOWN
        return Text(f"{rate:,.0f}" if rate >= 100 or not rate else f"{rate:.1f}")

    return cell


def _lag(figures: Figures) -> Text:
    if figures.lag_is_growing:
        return Text(f"{_GROWS}{figures.lag:,}", style=_WORTH_A_LOOK)
    return Text(f"{figures.lag:,}")


_COLUMNS: Final = (
    _Column("handled/s", _per_second(Signal.HANDLED)),
    _Column("handled", _counted(Signal.HANDLED), 6),
    _Column("dups/s", _per_second(Signal.DUPLICATE_BLOCKED), 8),
    _Column("dups", _counted(Signal.DUPLICATE_BLOCKED)),
    _Column("in flight", lambda figures: Text(f"{figures.in_flight:,}"), 3),
    _Column("takeovers", _counted(Signal.TAKEOVER), 7),
    _Column("retries", _counted(Signal.RETRY), 4),
    _Column("dead", _counted(Signal.DEAD_LETTER, style=_WORTH_A_LOOK), 2),
    _Column("errors", _counted(*ERRORS, style=_WORTH_A_LOOK)),
    _Column("lag", _lag),
)
_WORKER: Final = 5
"""Given up in its turn, where there is one worker only."""


def fleet_table(look: FleetLook, width: int) -> Group:
    """The table of one look, for `width` columns, and below it why rows are as they are."""
    has_one_worker = len(look.workers) == 1
    columns, names_workers = list(_COLUMNS), True
    table = _table(look, columns, names_workers=True)
    while _width(table, width) > width:
        most = max(column.given_up for column in columns)
        if has_one_worker and names_workers and most < _WORKER:
            names_workers = False
        elif most:
            columns = [column for column in columns if column.given_up < most]
        else:
            break  # names are folded
        table = _table(look, columns, names_workers=names_workers)
    return Group(table, *_reasons(look))


def _table(look: FleetLook, columns: Sequence[_Column], *, names_workers: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("service", overflow="fold")
    if names_workers:
        table.add_column("worker", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)

    def add(service: str, worker: str, state: Text, figures: Figures | None, style: str = "") -> None:
        names = [Text(printable(service) or "-"), *([Text(printable(worker))] if names_workers else [])]
        cells = [column.cell(figures) if figures is not None else _UNKNOWN for column in columns]
        table.add_row(*names, state, *cells, style=style)

    for service, rows in _by_service(look).items():
        for row in rows:
            add(service, row.worker, Text(row.state, style=_STATES.get(row.state, _BAD)), row.figures)
        if service and len(rows) > 1:
            answering = sum(row.figures is not None for row in rows)
            add(service, f"{answering} of {len(rows)}", Text("total"), look.total(service), "bold")
            table.add_section()
    if len(_by_service(look)) > 1:
        table.add_section()
        add("all", f"{look.answering} of {len(look.workers)}", Text("total"), look.total(), "bold")
    return table


def _by_service(look: FleetLook) -> dict[str, list[ServiceRow]]:
    services: dict[str, list[ServiceRow]] = {}
    for row in look.rows:
        services.setdefault(row.service, []).append(row)
    return services


def _width(table: Table, width: int) -> int:
    """Columns that it takes with all its names in one line, whatever room there is."""
    return Console(width=max(width, 1_000)).measure(table).maximum


def _reasons(look: FleetLook) -> Iterator[Text]:
    for worker in look.workers:
        if not worker.is_up:
            yield Text(printable(f"{worker.worker} down: {worker.reason}"), style=_BAD)
        if worker.restarts:
            times = "once" if worker.restarts == 1 else f"{worker.restarts} times"
            yield Text(f"{worker.worker} has restarted {times} since this began", style=_WORTH_A_LOOK)
    for row in look.rows:
        if row.reason and row.figures is not None:
            told = f"{row.service} at {row.worker} {row.state}: {row.reason}"
            yield Text(printable(told), style=_STATES.get(row.state, _BAD))
    for service in _by_service(look):
        figures = look.total(service)
        refused, for_others = figures.count(Signal.REPLAY_REFUSED), figures.count(Signal.REPLAY_FOR_OTHERS)
        if refused:
            told = f"{service}: {refused:,} with replay headers that were refused, handled as if they had none"
            yield Text(printable(told), style=_WORTH_A_LOOK)
        if for_others:
            yield Text(printable(f"{service}: {for_others:,} replays for other groups passed by"))
