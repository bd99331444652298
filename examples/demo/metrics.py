"""Sum the metrics of the services, including those of killed processes."""

from __future__ import annotations

import asyncio
import http.client
from collections import Counter
from collections.abc import Iterable
from typing import Final

_TIMEOUT_SECONDS: Final = 5.0
_PREFIX: Final = "idempotency_"
_COUNTERS: Final = ("deliveries", "duplicates_blocked", "takeovers", "dead_letters", "waits")
_LEVELS: Final = ("in_flight", "consumer_lag")
_NAMES: Final = {f"{_PREFIX}{name}_total": name for name in _COUNTERS} | {_PREFIX + name: name for name in _LEVELS}


class Metrics:
    """Sums of counters. The last known counts of dead processes are included."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._now: dict[str, Counter[str]] = {}

    async def scrape(self, service: str, port: int) -> bool:
        """Scrape one service, and return whether it answered. Without an answer, its previous numbers are kept."""
        try:
            status, page = await get(port, "/metrics")
        except (OSError, http.client.HTTPException):
            return False
        if status != http.HTTPStatus.OK:
            return False
        self._now[service] = _sums(page.splitlines())
        return True

    def died(self, service: str) -> None:
        """Note that a process has died: its successor counts from zero."""
        seen = self._now.pop(service, Counter())
        self._before += Counter({name: seen[name] for name in _COUNTERS})

    def __getitem__(self, name: str) -> int:
        """Return the sum of a counter or gauge, named without prefix and suffix."""
        return self._before[name] + sum(seen[name] for seen in self._now.values())


async def get(port: int, path: str) -> tuple[int, str]:
    """Return status and body of a page on this machine. Raises OSError or HTTPException."""
    return await asyncio.to_thread(_get, port, path)


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _sums(lines: Iterable[str]) -> Counter[str]:
    """Sum lines of the form `name{labels} value` by name, over all labels. Only the names of interest are parsed."""
    sums: Counter[str] = Counter()
    for line in lines:
        name = _NAMES.get(line.partition("{")[0])
        if name is not None:
            sums[name] += int(float(line.rpartition(" ")[2]))
    return sums
