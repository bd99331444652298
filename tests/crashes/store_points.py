"""The trials of `tests.crashes.points` with records in other stores than a single Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from tests.campaigns.figures import Campaign, Figures
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.points import CRASHES, POINTS, Trial, points_of, run_trials
from tests.support.homes import at_hand, open_records

ALL: Final = ("postgresql", "sqlite", "mysql", "redis-cluster", "redis-sentinel", "dynamodb")
KINDS: Final = at_hand(*ALL)
"""Kinds that are available; the trials alternate between them."""

KILLS_OF_A_KIND: Final = 500

AT_ONCE: Final = 10
"""Concurrent trials; servers of all kinds and their workers share the machine."""

LEASES: Final = {"dynamodb": 4.0}
"""Leases in seconds that differ from the default: DynamoDB Local handles key by key, and soon renews too slowly."""

STORE_TIMEOUT: Final = 1.0
"""Timeout in seconds of a worker's store; longer than with Redis, because databases wait for a disk."""


class StoreTrial(Trial):
    """A trial on a kind of store that depends on its number."""

    def __init__(self, servers: Servers, fork_server: ForkServer, number: int, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(servers, fork_server, number)
        self._kind = kinds[number % len(kinds)]
        # Eleven consecutive trials of one kind cover each point once.
        self._points = points_of(number // len(kinds))
        self._slowness = LEASES.get(self._kind, self._order.lease)
        self._patience *= self._slowness / self._order.lease
        self._order = replace(self._order, lease=self._slowness)

    @asynccontextmanager
    async def _resources(self) -> AsyncIterator[None]:
        home = self._servers.homes[self._kind]
        self._order = replace(self._order, store=home.settings(self._folder, timeout_seconds=STORE_TIMEOUT))
        judging = home.settings(self._folder, timeout_seconds=30)
        async with open_records(judging, self._order.key_prefix) as self._store, super()._resources():
            yield

    async def _verdict(self, topics: Topics) -> Figures:
        figures = await super()._verdict(topics)
        return Figures(figures | {f"kills:{self._kind}": self._figures["kills"]})


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), StoreTrial, AT_ONCE, kinds=KINDS))


CAMPAIGN = Campaign(
    name="crash-points-stores",
    counts="kills",
    says="a process kills itself with SIGKILL at a named point, on a real PostgreSQL, SQLite, MariaDB, Redis "
    "Cluster, Redis with Sentinels, or on DynamoDB Local, and a real Kafka",
    scenarios=(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    in_test=2 * len(KINDS),
    at_least=2 * CRASHES * len(KINDS) - 2,
    target=KILLS_OF_A_KIND * len(KINDS),
    on_page=(2 * CRASHES * len(ALL) - 2, KILLS_OF_A_KIND * len(ALL)),
    batch=len(POINTS) // CRASHES * len(KINDS),
    run=run,
)
