"""What services in observe mode have observed: the numbers of all workers, added up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from integr8s_idem.operations.fleet import MAX_CONCURRENCY, TIMEOUT_SECONDS
from integr8s_idem.operations.metrics_scraper import ScrapeError, ServiceMetrics, scrape
from integr8s_idem.operations.worker_addresses import Address, Endpoint, endpoints_of
from integr8s_idem.telemetry import Gauge, Observed

DUPLICATES: Final = (Observed.REDELIVERED, Observed.REPUBLISHED, Observed.CONCURRENT, Observed.UNKNOWN)
"""Results that are duplicates: a guard would have stopped these deliveries."""

SHARES: Final = (0.5, 0.9, 0.99, 0.999)
"""Shares of the duplicates for which gaps are reported."""


@dataclass(frozen=True)
class ServiceObservations:
    """What one service has observed since its workers were started."""

    service: str
    ttl_seconds: float | None
    """How long records are kept; `None` if no worker says so, since none observes any more."""
    counts: Mapping[Observed, int] = field(default_factory=dict)
    other_payloads: int = 0
    """Duplicates with another payload than the first."""
    gaps: Mapping[float, int] = field(default_factory=dict)
    """Number of duplicates by the largest gap in seconds, cumulative, without those that were concurrent."""

    def count(self, *results: Observed) -> int:
        """Return the number of deliveries with one of `results`."""
        return sum(self.counts.get(result, 0) for result in results)

    @property
    def deliveries(self) -> int:
        """Number of deliveries, including those that could not be observed."""
        return self.count(*(each for each in Observed if each is not Observed.UNRECORDED))

    @property
    def duplicates(self) -> int:
        """Number of duplicates."""
        return self.count(*DUPLICATES)

    @property
    def measured(self) -> int:
        """Number of duplicates whose gap is known; that of a concurrent one is 0."""
        return self.gaps.get(math.inf, 0) + self.count(Observed.CONCURRENT)

    def gap_of(self, share: float) -> float | None:
        """Return an upper bound in seconds of the gaps of `share` of the duplicates; `None` if no gap is known.

        A ttl of this length catches that share of the duplicates that were seen.
        """
        if not self.measured:
            return None
        # Of 1,000 duplicates, 99 % are 990, which is not exactly 0.99 * 1000 in floating point.
        needed = math.ceil(round(share * self.measured, 6)) - self.count(Observed.CONCURRENT)
        if needed <= 0:
            return 0.0
        bound = next(bound for bound in sorted(self.gaps) if self.gaps[bound] >= needed)
        # A record exists for as long as its ttl, so that no gap exceeds it.
        return min(bound, self.ttl_seconds) if self.ttl_seconds is not None else bound

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, JSON-serializable."""
        gaps = {f"{share * 100:g}": self.gap_of(share) for share in SHARES}
        return {
            "ttl_seconds": self.ttl_seconds,
            "deliveries": self.deliveries,
            "duplicates": self.duplicates,
            "duplicates_by_kind": {kind.value: self.count(kind) for kind in DUPLICATES},
            "other_payloads": self.other_payloads,
            "retried": self.count(Observed.RETRIED),
            "not_observed": self.count(Observed.FAILED),
            "unrecorded": self.count(Observed.UNRECORDED),
            "gap_seconds_at_most": {share: _finite(gap) for share, gap in gaps.items()},
            "gaps_measured": self.measured,
        }


@dataclass(frozen=True)
class ObserveReport:
    """What the services of some workers have observed."""

    services: Sequence[ServiceObservations]
    """Those that observe, or have observed, ordered by name."""
    enforcing: Mapping[str, int]
    """Number of answers without observe mode, by service; for a service that also observes, the modes are mixed."""
    answering: int
    silent: Mapping[str, str]
    """Why a worker did not answer, by its address."""

    def as_json(self) -> dict[str, Any]:
        """Return the report, JSON-serializable."""
        return {
            "workers": self.answering,
            "silent": dict(self.silent),
            "services": {
                each.service: {**each.as_json(), "enforcing_workers": self.enforcing.get(each.service, 0)}
                for each in self.services
            },
        }


async def observe_report(addresses: Sequence[Address], *, timeout: float = TIMEOUT_SECONDS) -> ObserveReport:
    """Ask all workers at `addresses` once; one that does not answer within `timeout` seconds is silent."""
    silent: dict[str, str] = {}
    found = await asyncio.gather(*(_endpoints(address, timeout, silent) for address in dict.fromkeys(addresses)))
    endpoints = {endpoint.text: endpoint for group in found for endpoint in group}
    semaphore = asyncio.Semaphore(MAX_CONCURRENCY)
    answers = await asyncio.gather(*(_ask(each, timeout, semaphore, silent) for each in endpoints.values()))
    return report_of([answer for answer in answers if answer is not None], silent)


def report_of(answers: Sequence[Mapping[str, ServiceMetrics]], silent: Mapping[str, str]) -> ObserveReport:
    """Add up the metrics of several workers, each by service."""
    observing: dict[str, list[ServiceMetrics]] = {}
    enforcing: dict[str, int] = {}
    for answer in answers:
        for service, metrics in answer.items():
            if not service:
                continue
            if Gauge.OBSERVE_TTL in metrics.levels or metrics.observations:
                observing.setdefault(service, []).append(metrics)
            else:
                enforcing[service] = enforcing.get(service, 0) + 1
    services = [_added(service, each) for service, each in sorted(observing.items())]
    return ObserveReport(services, enforcing, len(answers), silent)


def _added(service: str, metrics: Iterable[ServiceMetrics]) -> ServiceObservations:
    counts: dict[Observed, int] = {}
    gaps: dict[float, int] = {}
    ttls: list[float] = []
    others = 0
    known = {each.value: each for each in Observed}
    for each in metrics:
        for (result, payload), number in each.observations.items():
            if result in known:
                counts[known[result]] = counts.get(known[result], 0) + int(number)
            others += int(number) if payload == "other" else 0
        for bound, number in each.gaps.items():
            gaps[bound] = gaps.get(bound, 0) + int(number)
        if (ttl := each.levels.get(Gauge.OBSERVE_TTL)) is not None:
            ttls.append(ttl)
    return ServiceObservations(service, max(ttls, default=None), counts, others, gaps)


async def _endpoints(address: Address, timeout: float, silent: dict[str, str]) -> list[Endpoint]:
    try:
        async with asyncio.timeout(timeout):
            return await endpoints_of(address)
    except OSError as error:
        cause = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else error.strerror
        silent[address.text] = f"cannot resolve the host name: {cause or error}"
        return []


async def _ask(
    endpoint: Endpoint, timeout: float, semaphore: asyncio.Semaphore, silent: dict[str, str]
) -> Mapping[str, ServiceMetrics] | None:
    async with semaphore:
        try:
            return (await scrape(endpoint, timeout=timeout)).services
        except ScrapeError as error:
            silent[endpoint.text] = str(error)
            return None


def _finite(gap: float | None) -> float | None:
    return gap if gap is None or math.isfinite(gap) else None
