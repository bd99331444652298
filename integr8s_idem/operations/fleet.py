"""Workers as they are watched: look after look, how much, how fast, and who does not answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from integr8s_idem.operations.metrics_scraper import NoAnswerError, Numbers, Scrape, scraped
from integr8s_idem.operations.worker_addresses import Address, Endpoint, endpoints_of
from integr8s_idem.telemetry import Gauge, Signal

TIMEOUT_SECONDS: Final = 3.0
"""Longest time for one worker to answer."""
AT_ONCE: Final = 32
"""Workers that are asked at the same time."""
LAG_LOOKS: Final = 5
"""A lag is growing if it is more than in any of so many looks before."""

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
)
"""What counts as an error; a dead letter is none, since its failures were counted."""


@dataclass(frozen=True)
class Figures:
    """The numbers of a row: counted since the worker began, except where they say otherwise."""

    counts: Mapping[Signal, int] = field(default_factory=dict)
    rates: Mapping[Signal, float] | None = None
    """Per second, between the last two looks that were answered; `None` before there are two."""
    in_flight: int = 0
    lag: int = 0
    lag_is_growing: bool = False

    def count(self, *signals: Signal) -> int:
        """Of these together."""
        return sum(self.counts.get(signal, 0) for signal in signals)

    def rate(self, *signals: Signal) -> float | None:
        """Of these together, per second, if it is known."""
        return None if self.rates is None else sum(self.rates.get(signal, 0.0) for signal in signals)

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "handled": self.count(Signal.HANDLED),
            "handled_per_second": _rounded(self.rate(Signal.HANDLED)),
            "duplicates_blocked": self.count(Signal.DUPLICATE_BLOCKED),
            "duplicates_blocked_per_second": _rounded(self.rate(Signal.DUPLICATE_BLOCKED)),
            "in_flight": self.in_flight,
            "takeovers": self.count(Signal.TAKEOVER),
            "lag": self.lag,
            "lag_is_growing": self.lag_is_growing,
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
    """`ready`, `not ready`, `dead` (asks for a restart), `store down`, `running` (it tells no more), `down`."""
    reason: str = ""
    figures: Figures | None = None
    """`None` while the worker does not answer."""


@dataclass(frozen=True)
class WorkerLook:
    """One worker at one look; one that is down has the services that it was last seen with."""

    worker: str
    rows: Sequence[ServiceRow]
    reason: str = ""
    """Why it is down; empty if it answers."""
    restarts: int = 0
    """How often it was seen to have begun anew."""

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        return not self.reason


@dataclass(frozen=True)
class FleetLook:
    """All workers at one look."""

    workers: Sequence[WorkerLook]

    @property
    def rows(self) -> list[ServiceRow]:
        """Of all workers, service by service."""
        return sorted(
            (row for worker in self.workers for row in worker.rows), key=lambda row: (row.service == "", row.service)
        )

    @property
    def answering(self) -> int:
        """How many workers do."""
        return sum(worker.is_up for worker in self.workers)

    def total(self, service: str | None = None) -> Figures:
        """Of one service, or of all."""
        rows = (row for row in self.rows if service is None or row.service == service)
        return total(row.figures for row in rows if row.figures is not None)

    def told(self) -> dict[str, Any]:
        """For JSON."""
        services = sorted({row.service for row in self.rows if row.figures is not None})
        return {
            "workers": [_worker_told(worker) for worker in self.workers],
            "services": {service: self.total(service).told() for service in services},
            "total": self.total().told(),
        }


def total(figures: Iterable[Figures]) -> Figures:
    """All of them together; a rate that is not yet known counts nothing."""
    counts: dict[Signal, int] = {}
    rates: dict[Signal, float] | None = None
    in_flight, lag, is_growing = 0, 0, False
    for each in figures:
        for signal, count in each.counts.items():
            counts[signal] = counts.get(signal, 0) + count
        if each.rates is not None:
            rates = rates or {}
            for signal, rate in each.rates.items():
                rates[signal] = rates.get(signal, 0.0) + rate
        in_flight, lag = in_flight + each.in_flight, lag + each.lag
        is_growing |= each.lag_is_growing
    return Figures(counts, rates, in_flight, lag, is_growing)


class Fleet:
    """The workers behind some addresses.  `look` may be called as often as anybody likes, and never raises for them."""

    def __init__(self, addresses: Sequence[Address], *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._addresses = addresses
        self._timeout = timeout
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._known: dict[Endpoint, _Worker] = {}
        self._found: dict[Address, list[Endpoint]] = {}

    async def look(self) -> FleetLook:
        """Ask all workers; takes as long as the slowest of them, or its timeout."""
        unknown: list[WorkerLook] = []
        places = await asyncio.gather(*(self._places(address, unknown) for address in dict.fromkeys(self._addresses)))
        endpoints = {endpoint.text: endpoint for found in places for endpoint in found}
        # Whoever is behind a name no more is no worker of ours.
        self._known = {each: self._known.get(each) or _Worker(each.text) for each in endpoints.values()}
        looks = await asyncio.gather(*(self._look_at(each, worker) for each, worker in self._known.items()))
        return FleetLook([*looks, *unknown])

    async def _places(self, address: Address, unknown: list[WorkerLook]) -> list[Endpoint]:
        """The machines behind an address: those of before while nobody can tell."""
        try:
            async with asyncio.timeout(self._timeout):
                self._found[address] = await endpoints_of(address)
        except OSError as error:
            if address not in self._found:
                told = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else error.strerror
                why = f"its name is not known: {told or error}"
                unknown.append(WorkerLook(address.text, [ServiceRow("", address.text, "down", why)], why))
        return self._found.get(address, [])

    async def _look_at(self, endpoint: Endpoint, worker: _Worker) -> WorkerLook:
        async with self._at_once:
            try:
                return worker.seen(await scraped(endpoint, timeout=self._timeout))
            except NoAnswerError as error:
                return worker.missed(str(error))


class _Worker:
    """What is remembered of a worker from look to look."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Scrape | None = None
        self._restarts = 0
        self._lags: dict[str, deque[float]] = {}

    def seen(self, now: Scrape) -> WorkerLook:
        """It has answered."""
        before, self._last = self._last, now
        has_restarted = before is not None and _has_restarted(before, now)
        self._restarts += has_restarted
        names = sorted({*now.services, *now.readiness})
        rows = [self._row(name, now, before, has_restarted) for name in names]
        return WorkerLook(self._name, rows, restarts=self._restarts)

    def missed(self, reason: str) -> WorkerLook:
        """It has not answered."""
        services = sorted(self._last.services) if self._last is not None else [""]
        rows = [ServiceRow(service, self._name, "down", reason) for service in services]
        return WorkerLook(self._name, rows, reason, self._restarts)

    def _row(self, service: str, now: Scrape, before: Scrape | None, has_restarted: bool) -> ServiceRow:
        numbers = now.services.get(service)
        state, reason = _state(service, now)
        if numbers is None:
            return ServiceRow(service, self._name, state, reason, Figures())
        lag = numbers.levels.get(Gauge.CONSUMER_LAG, 0.0)
        lags = self._lags.setdefault(service, deque(maxlen=LAG_LOOKS))
        is_growing = bool(lags) and lag > max(lags)
        lags.append(lag)
        figures = Figures(
            {signal: int(count) for signal, count in numbers.counts.items()},
            _rates(service, now, before, has_restarted),
            int(numbers.levels.get(Gauge.IN_FLIGHT, 0)),
            int(lag),
            is_growing,
        )
        return ServiceRow(service, self._name, state, reason, figures)


def _state(service: str, now: Scrape) -> tuple[str, str]:
    told = now.readiness.get(service)
    numbers = now.services.get(service)
    reason = told.reason if told is not None else ""
    if told is not None and not told.live:
        return "dead", reason
    if numbers is not None and numbers.levels.get(Gauge.STORE_UP) == 0:
        return "store down", reason
    if told is None:
        return "running", ""
    return ("ready" if told.ready else "not ready"), reason


def _has_restarted(before: Scrape, now: Scrape) -> bool:
    if before.began is not None and now.began is not None:
        return before.began != now.began
    # One that does not say when it began: what is counted grows as long as a process lives.
    return any(
        count < was.counts.get(signal, 0)
        for service, was in before.services.items()
        if (numbers := now.services.get(service)) is not None
        for signal, count in numbers.counts.items()
    )


def _rates(service: str, now: Scrape, before: Scrape | None, has_restarted: bool) -> dict[Signal, float] | None:
    """Per second, since `before`, by our monotonic clock.

    After a restart it has counted from zero: what was counted between the look before and the end of the process is
    known to nobody.
    """
    if before is None or now.at <= before.at:
        return None
    was = Numbers() if has_restarted else before.services.get(service, Numbers())
    return {
        signal: max(0.0, count - was.counts.get(signal, 0.0)) / (now.at - before.at)
        for signal, count in now.services[service].counts.items()
    }


def _worker_told(worker: WorkerLook) -> dict[str, Any]:
    services = [
        {
            "service": row.service,
            "state": row.state,
            "reason": row.reason,
            **(row.figures.told() if row.figures is not None else {}),
        }
        for row in worker.rows
        if row.service or worker.is_up
    ]
    told = {key: value for key, value in asdict(worker).items() if key != "rows"}
    return {**told, "is_up": worker.is_up, "services": services}


def _kind(signal: Signal) -> str:
    return signal.value.removeprefix("idempotency_")


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
