"""The table of `integr8s-idem top`: one row for each service of each worker, with totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.operations.fleet import ERRORS, Figures, FleetSnapshot, ServiceRow, WorkerSnapshot
from integr8s_idem.telemetry import Signal

_STATES: Final = {"ready": "green", "running": "green", "not ready": "yellow"}
_FAILING: Final = "bold red"
"""Style of all other states, and of error counts that are growing."""
_WARNING: Final = "yellow"
_OLD_SECONDS: Final = 60.0
"""Age of an event in an outbox that is highlighted."""
_UNKNOWN: Final = Text("-", style="dim")
_GROWING: Final = "▲ "  # before the number, so that digits stay aligned


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[Figures], Text]
    drop_order: int = 0
    """On narrow terminals, columns with the highest number are dropped first; 0 is never dropped."""


def _counted(*signals: Signal, style: str = "") -> Callable[[Figures], Text]:
    """Show a count.  With a style, highlight counts above zero, and add an arrow while they grow."""

    def cell(figures: Figures) -> Text:
        count, rate = figures.count(*signals), figures.rate(*signals)
        if not style or not count:
            return Text(f"{count:,}")
        return Text(f"{_GROWING}{count:,}", style=_FAILING) if rate else Text(f"{count:,}", style=style)

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
        return Text(f"{_GROWING}{figures.lag:,}", style=_WARNING)
    return Text(f"{figures.lag:,}")


_COLUMNS: Final = (
    _Column("handled/s", _per_second(Signal.HANDLED), 2),
    _Column("handled", _counted(Signal.HANDLED), 9),
    _Column("dups/s", _per_second(Signal.DUPLICATE_BLOCKED), 11),
    _Column("dups", _counted(Signal.DUPLICATE_BLOCKED), 3),
    _Column("in flight", lambda figures: Text(f"{figures.in_flight:,}"), 6),
    _Column("takeovers", _counted(Signal.TAKEOVER), 10),
    _Column("retries", _counted(Signal.RETRY), 7),
    _Column("dead", _counted(Signal.DEAD_LETTER, style=_WARNING), 5),
    _Column("errors", _counted(*ERRORS, style=_WARNING)),
    _Column("lag", _lag, 1),
)
_WORKER: Final = 8
"""Drop order of the worker's name, if there is only one worker."""
_FOLDING: Final = 4
"""Columns with a lower drop order are dropped only if the table does not fit although names are folded."""


def fleet_table(snapshot: FleetSnapshot, width: int) -> Group:
    """Return the table of a snapshot for `width` columns, followed by the reasons for the rows' states."""
    has_one_worker = len(snapshot.workers) == 1
    columns, shows_worker = list(_COLUMNS), True
    table = _table(snapshot, columns, shows_worker=True)
    while _width(table, width) > width:
        next_drop = max(column.drop_order for column in columns)
        if has_one_worker and shows_worker and next_drop < _WORKER:
            shows_worker = False
        elif not next_drop or (next_drop < _FOLDING and _folded_width(table, width) <= width):
            break  # rich folds the names
        else:
            columns = [column for column in columns if column.drop_order < next_drop]
        table = _table(snapshot, columns, shows_worker=shows_worker)
    return Group(table, *_reasons(snapshot))


def _table(snapshot: FleetSnapshot, columns: Sequence[_Column], *, shows_worker: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("service", "worker")[: 1 + shows_worker]:
        table.add_column(heading, overflow="fold", min_width=len(heading))
    table.add_column("state", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)

    def add(service: str, worker: str, state: Text, figures: Figures | None, style: str = "") -> None:
        names = [Text(printable(service) or "-"), *([Text(printable(worker))] if shows_worker else [])]
        cells = [column.cell(figures) if figures is not None else _UNKNOWN for column in columns]
        table.add_row(*names, state, *cells, style=style)

    shown = {worker.worker: _shown_worker(worker) for worker in snapshot.workers}
    for service, rows in _by_service(snapshot).items():
        for row in rows:
            add(service, shown[row.worker], Text(row.state, style=_STATES.get(row.state, _FAILING)), row.figures)
        if service and len(rows) > 1:
            answering = sum(row.figures is not None for row in rows)
            add(service, f"{answering} of {len(rows)}", Text("total"), snapshot.total(service), "bold")
            table.add_section()
    if len(_by_service(snapshot)) > 1:
        table.add_section()
        add("all", f"{snapshot.answering} of {len(snapshot.workers)}", Text("total"), snapshot.total(), "bold")
    return table


def _shown_worker(worker: WorkerSnapshot) -> str:
    """Return its address, with the number of processes if a supervisor answers for several."""
    return f"{worker.worker} ({worker.processes} processes)" if worker.processes > 1 else worker.worker


def _by_service(snapshot: FleetSnapshot) -> dict[str, list[ServiceRow]]:
    services: dict[str, list[ServiceRow]] = {}
    for row in snapshot.rows:
        services.setdefault(row.service, []).append(row)
    return services


def _width(table: Table, width: int) -> int:
    """Return the width of the table without line breaks, regardless of the terminal's width."""
    # With a height, since rich ignores a width alone on terminals without control sequences, such as TERM=dumb.
    return Console(width=max(width, 1_000), height=1).measure(table).maximum


def _folded_width(table: Table, width: int) -> int:
    """Return the width of the table with names folded to the width of their headings."""
    folded = copy(table)
    folded.columns = [
        replace(column, width=column.min_width) if column.min_width else column for column in table.columns
    ]
    return _width(folded, width)


def _reasons(snapshot: FleetSnapshot) -> Iterator[Text]:
    native_code = {row.worker: row.native_code for row in snapshot.rows if row.native_code is not None}
    processes = {worker.worker: worker.processes for worker in snapshot.workers if worker.worker in native_code}
    if processes:
        using = sum(number for worker, number in processes.items() if native_code[worker])
        yield Text(f"native code is used by {using} of {sum(processes.values())} workers", style="dim")
    for worker in snapshot.workers:
        if not worker.is_up:
            yield Text(printable(f"{worker.worker} down: {worker.reason}"), style=_FAILING)
        if worker.restarts:
            times = "once" if worker.restarts == 1 else f"{worker.restarts} times"
            yield Text(f"{worker.worker} restarted {times} since top was started", style=_WARNING)
    for row in snapshot.rows:
        if row.reason and row.figures is not None:
            text = f"{row.service} at {row.worker} {row.state}: {row.reason}"
            yield Text(printable(text), style=_STATES.get(row.state, _FAILING))
    for service in _by_service(snapshot):
        yield from _notes(service, snapshot.total(service))


def _notes(service: str, figures: Figures) -> Iterator[Text]:
    """Describe what has no column: the outbox of a service, and replays."""
    if waiting := figures.outbox_waiting:
        text = f"{service}: {waiting:,} events wait in the outbox, the oldest for {figures.outbox_age:.0f} s"
        yield Text(printable(text), style=_WARNING if figures.outbox_age >= _OLD_SECONDS else "")
    refused, for_others = figures.count(Signal.REPLAY_REFUSED), figures.count(Signal.REPLAY_FOR_OTHERS)
    if refused:
        text = f"{service}: {refused:,} messages with refused replay headers, handled as ordinary deliveries"
        yield Text(printable(text), style=_WARNING)
    if for_others:
        yield Text(printable(f"{service}: {for_others:,} replays for other consumer groups skipped"))
