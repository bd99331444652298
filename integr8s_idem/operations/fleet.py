"""Poll the metrics and readiness of workers, and compute rates and totals."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from integr8s_idem.operations.metrics_scraper import Scrape, ScrapeError, ServiceMetrics, scrape
from integr8s_idem.operations.worker_addresses import Address, Endpoint, endpoints_of
from integr8s_idem.telemetry import Gauge, Signal

TIMEOUT_SECONDS: Final = 3.0
"""Timeout for one worker."""
MAX_CONCURRENCY: Final = 32
"""Number of workers that are polled concurrently."""
LAG_SAMPLES: Final = 5
"""A lag is growing if it exceeds the lag of this many previous snapshots."""

ERRORS: Final = (
    Signal.HANDLER_FAILED,
    Signal.STORE_ERROR,
    Signal.UNDECODABLE,
    Signal.COMMIT_FAILED,
    Signal.RESERVATION_LOST,
    Signal.RECORD_VANISHED,
    Signal.STORE_DATA_LOST,
    Signal.KEY_REUSED,
    Signal.CORRUPT_RECORD,
    Signal.PARTITION_DAMAGED,
    Signal.SERVICE_STOPPED,
    Signal.OUTBOX_FAILURE,
)
"""Signals that count as errors.  Dead letters do not: their failures are counted as `HANDLER_FAILED`."""


@dataclass(frozen=True)
class Figures:
    """The numbers of a row.  Counts are totals since the worker was started."""

    counts: Mapping[Signal, int] = field(default_factory=dict)
    rates: Mapping[Signal, float] | None = None
    """Per second, between the last two successful polls; `None` until there are two."""
    in_flight: int = 0
    lag: int = 0
    lag_is_growing: bool = False
    outbox_waiting: int = 0
    outbox_age: float = 0.0
    """How long the oldest event of the outbox has waited, in seconds."""

    def count(self, *signals: Signal) -> int:
        """Return the sum of the counts of `signals`."""
        return sum(self.counts.get(signal, 0) for signal in signals)

    def rate(self, *signals: Signal) -> float | None:
        """Return the sum of the rates of `signals`, or `None` if they are unknown."""
        return None if self.rates is None else sum(self.rates.get(signal, 0.0) for signal in signals)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, JSON-serializable."""
        return {
            "handled": self.count(Signal.HANDLED),
            "handled_per_second": _rounded(self.rate(Signal.HANDLED)),
            "duplicates_blocked": self.count(Signal.DUPLICATE_BLOCKED),
            "duplicates_blocked_per_second": _rounded(self.rate(Signal.DUPLICATE_BLOCKED)),
            "in_flight": self.in_flight,
            "takeovers": self.count(Signal.TAKEOVER),
            "lag": self.lag,
            "lag_is_growing": self.lag_is_growing,
            "outbox_waiting": self.outbox_waiting,
            "outbox_age_seconds": round(self.outbox_age, 3),
            "replays_refused": self.count(Signal.REPLAY_REFUSED),
            "replays_for_other_groups": self.count(Signal.REPLAY_FOR_OTHERS),
            "retries": self.count(Signal.RETRY),
            "dead_letters": self.count(Signal.DEAD_LETTER),
            "errors": self.count(*ERRORS),
            "errors_per_second": _rounded(self.rate(*ERRORS)),
            "errors_by_kind": {_kind(signal): count for signal in ERRORS if (count := self.count(signal))},
        }


@dataclass(frozen=True)
class ServiceRow:
    """One service of one worker."""

    service: str
    worker: str
    state: str
    """`ready`, `not ready`, `dead` (requests a restart), `store down`, `running` (readiness unknown) or `down`."""
    reason: str = ""
    figures: Figures | None = None
    """`None` while the worker does not answer."""
    native_code: bool | None = None
    """Whether the worker uses native code; `None` if it does not say."""


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker in a snapshot.  A worker that is down keeps the services of its last answer."""

    worker: str
    rows: Sequence[ServiceRow]
    reason: str = ""
    """Why the worker is down; empty if it answers."""
    restarts: int = 0
    """Number of restarts that were observed."""
    processes: int = 1
    """Number of running processes, of which a supervisor reports the sum."""

    @property
    def is_up(self) -> bool:
        """Whether the worker answers."""
        return not self.reason


@dataclass(frozen=True)
class FleetSnapshot:
    """All workers at one moment."""

    workers: Sequence[WorkerSnapshot]

    @property
    def rows(self) -> list[ServiceRow]:
        """The rows of all workers, ordered by service."""
        return sorted(
            (row for worker in self.workers for row in worker.rows), key=lambda row: (row.service == "", row.service)
        )

    @property
    def answering(self) -> int:
        """Number of workers that answer."""
        return sum(worker.is_up for worker in self.workers)

    def total(self, service: str | None = None) -> Figures:
        """Return the totals of one service, or of all services."""
        rows = (row for row in self.rows if service is None or row.service == service)
        return total(row.figures for row in rows if row.figures is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot, JSON-serializable."""
        services = sorted({row.service for row in self.rows if row.figures is not None})
        return {
            "workers": [_worker_json(worker) for worker in self.workers],
            "services": {service: self.total(service).as_json() for service in services},
            "total": self.total().as_json(),
        }


def total(figures: Iterable[Figures]) -> Figures:
    """Return the sum of `figures`; unknown rates count as zero.

    Of outboxes, it has the largest numbers: all workers of a service count the rows of one table.
    """
    counts: dict[Signal, int] = {}
    rates: dict[Signal, float] | None = None
    in_flight, lag, is_growing, waiting, age = 0, 0, False, 0, 0.0
    for each in figures:
        for signal, count in each.counts.items():
            counts[signal] = counts.get(signal, 0) + count
        if each.rates is not None:
            rates = rates or {}
            for signal, rate in each.rates.items():
                rates[signal] = rates.get(signal, 0.0) + rate
        in_flight, lag = in_flight + each.in_flight, lag + each.lag
        is_growing |= each.lag_is_growing
        waiting, age = max(waiting, each.outbox_waiting), max(age, each.outbox_age)
    return Figures(counts, rates, in_flight, lag, is_growing, waiting, age)


class Fleet:
    """The workers at some addresses.  `poll` never raises for a worker that does not answer."""

    def __init__(self, addresses: Sequence[Address], *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._addresses = addresses
        self._timeout = timeout
        self._semaphore = asyncio.Semaphore(MAX_CONCURRENCY)
        self._known: dict[Endpoint, _Worker] = {}
        self._resolved: dict[Address, list[Endpoint]] = {}

    async def poll(self) -> FleetSnapshot:
        """Poll all workers; takes as long as the slowest of them, or the timeout."""
        unknown: list[WorkerSnapshot] = []
        resolved = await asyncio.gather(
            *(self._resolve(address, unknown) for address in dict.fromkeys(self._addresses))
        )
        endpoints = {endpoint.text: endpoint for group in resolved for endpoint in group}
        # Forget workers whose host name no longer resolves to them.
        self._known = {each: self._known.get(each) or _Worker(each.text) for each in endpoints.values()}
        snapshots = await asyncio.gather(*(self._poll_worker(each, worker) for each, worker in self._known.items()))
        return FleetSnapshot([*snapshots, *unknown])

    async def _resolve(self, address: Address, unknown: list[WorkerSnapshot]) -> list[Endpoint]:
        """Return the endpoints of an address; if its name cannot be resolved, those of the last time."""
        try:
            async with asyncio.timeout(self._timeout):
                self._resolved[address] = await endpoints_of(address)
        except OSError as error:
            if address not in self._resolved:
                cause = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else error.strerror
                reason = f"cannot resolve the host name: {cause or error}"
                unknown.append(WorkerSnapshot(address.text, [ServiceRow("", address.text, "down", reason)], reason))
        return self._resolved.get(address, [])

    async def _poll_worker(self, endpoint: Endpoint, worker: _Worker) -> WorkerSnapshot:
        async with self._semaphore:
            try:
                return worker.answered(await scrape(endpoint, timeout=self._timeout))
            except ScrapeError as error:
                return worker.failed(str(error))


class _Worker:
    """The state of a worker between polls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Scrape | None = None
        self._restarts = 0
        self._lags: dict[str, deque[float]] = {}

    def answered(self, now: Scrape) -> WorkerSnapshot:
        """Return the snapshot of a worker that answered."""
        before, self._last = self._last, now
        has_restarted = before is not None and _has_restarted(before, now)
        self._restarts += has_restarted
        if before is not None and not has_restarted:
            self._restarts += max(0, now.restarts - before.restarts)
        names = sorted({*now.services, *now.readiness})
        rows = [self._row(name, now, before, has_restarted) for name in names]
        return WorkerSnapshot(self._name, rows, restarts=self._restarts, processes=now.processes)

    def failed(self, reason: str) -> WorkerSnapshot:
        """Return the snapshot of a worker that did not answer."""
        services = sorted(self._last.services) if self._last is not None else [""]
        rows = [ServiceRow(service, self._name, "down", reason) for service in services]
        return WorkerSnapshot(self._name, rows, reason, self._restarts)

    def _row(self, service: str, now: Scrape, before: Scrape | None, has_restarted: bool) -> ServiceRow:
        metrics = now.services.get(service)
        state, reason = _state(service, now)
        if metrics is None:
            return ServiceRow(service, self._name, state, reason, Figures())
        lag = metrics.levels.get(Gauge.CONSUMER_LAG, 0.0)
        lags = self._lags.setdefault(service, deque(maxlen=LAG_SAMPLES))
        is_growing = bool(lags) and lag > max(lags)
        lags.append(lag)
        figures = Figures(
            {signal: int(count) for signal, count in metrics.counts.items()},
            _rates(service, now, before, has_restarted),
            int(metrics.levels.get(Gauge.IN_FLIGHT, 0)),
            int(lag),
            is_growing,
            int(metrics.levels.get(Gauge.OUTBOX_WAITING, 0)),
            metrics.levels.get(Gauge.OUTBOX_AGE, 0.0),
        )
        native_code = metrics.levels.get(Gauge.NATIVE_CODE)
        uses_native_code = None if native_code is None else bool(native_code)
        return ServiceRow(service, self._name, state, reason, figures, uses_native_code)


def _state(service: str, now: Scrape) -> tuple[str, str]:
    readiness = now.readiness.get(service)
    metrics = now.services.get(service)
    reason = readiness.reason if readiness is not None else ""
    if readiness is not None and not readiness.live:
        return "dead", reason
    if metrics is not None and metrics.levels.get(Gauge.STORE_UP) == 0:
        return "store down", reason
    if readiness is None:
        return "running", ""
    return ("ready" if readiness.ready else "not ready"), reason


def _has_restarted(before: Scrape, now: Scrape) -> bool:
    if before.started_at is not None and now.started_at is not None:
        return before.started_at != now.started_at
    # The start time is unknown, but counters only decrease when a process restarts.
    return any(
        count < was.counts.get(signal, 0)
        for service, was in before.services.items()
        if (metrics := now.services.get(service)) is not None
        for signal, count in metrics.counts.items()
    )


def _rates(service: str, now: Scrape, before: Scrape | None, has_restarted: bool) -> dict[Signal, float] | None:
    """Return the rates per second since `before`, by this process' monotonic clock.

    After a restart the counters start at zero; events between the previous poll and the restart are not included.
    """
    if before is None or now.at <= before.at:
        return None
    was = ServiceMetrics() if has_restarted else before.services.get(service, ServiceMetrics())
    return {
        signal: max(0.0, count - was.counts.get(signal, 0.0)) / (now.at - before.at)
        for signal, count in now.services[service].counts.items()
    }


def _worker_json(worker: WorkerSnapshot) -> dict[str, Any]:
    services = [
        {
            "service": row.service,
            "state": row.state,
            "reason": row.reason,
            "native_code": row.native_code,
            **(row.figures.as_json() if row.figures is not None else {}),
        }
        for row in worker.rows
        if row.service or worker.is_up
    ]
    fields = {key: value for key, value in asdict(worker).items() if key != "rows"}
    return {**fields, "is_up": worker.is_up, "services": services}


def _kind(signal: Signal) -> str:
    return signal.value.removeprefix("idempotency_")


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
