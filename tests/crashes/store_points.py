"""The trials of `tests.crashes.points`, with records elsewhere than in a single Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from tests.campaigns.figures import Campaign, Figures
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.points import LIVES, POINTS, Trial, points_of, run_trials
from tests.support.homes import at_hand, open_records

ALL: Final = ("postgresql", "sqlite", "mysql", "redis-cluster", "redis-sentinel", "dynamodb")
KINDS: Final = at_hand(*ALL)
"""Those of the trials in turn."""

KILLS_OF_A_KIND: Final = 500

AT_ONCE: Final = 10
"""Trials; servers of all kinds and their workers share the machine."""

LEASES: Final = {"dynamodb": 4.0}
"""Seconds, where it is not that of all trials: DynamoDB Local is asked key by key, and is soon too slow to renew."""

STORE_TIMEOUT: Final = 1.0
"""Seconds of a worker; more than with Redis, for databases wait for a disk."""


class StoreTrial(Trial):
    """One trial, on the kind that its number gives it."""

    def __init__(self, ground: Ground, nursery: Nursery, number: int, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(ground, nursery, number)
        self._kind = kinds[number % len(kinds)]
        # Eleven trials of one kind in a row have each point once.
        self._points = points_of(number // len(kinds))
        self._slowness = LEASES.get(self._kind, self._order.lease)
        self._patience *= self._slowness / self._order.lease
        self._order = replace(self._order, lease=self._slowness)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        home = self._ground.homes[self._kind]
        self._order = replace(self._order, store=home.settings(self._folder, timeout_seconds=STORE_TIMEOUT))
        looking = home.settings(self._folder, timeout_seconds=30)
        async with open_records(looking, self._order.key_prefix) as self._store, super()._opened():
            yield

    async def _verdict(self, topics: Topics) -> Figures:
        figures = await super()._verdict(topics)
        return Figures(figures | {f"kills:{self._kind}": self._figures["kills"]})


def run(first: int, count: int) -> Figures:
    """The trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), StoreTrial, AT_ONCE, kinds=KINDS))


CAMPAIGN = Campaign(
    name="crash-points-stores",
    counts="kills",
    says="a process that killed itself by SIGKILL at a named point, on a real PostgreSQL, SQLite, MariaDB, Redis "
    "Cluster, Redis with Sentinels, or on DynamoDB Local, and a real Kafka",
    scenarios=(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    in_test=2 * len(KINDS),
    at_least=2 * LIVES * len(KINDS) - 2,
    target=KILLS_OF_A_KIND * len(KINDS),
    on_page=(2 * LIVES * len(ALL) - 2, KILLS_OF_A_KIND * len(ALL)),
    batch=len(POINTS) // LIVES * len(KINDS),
    run=run,
)
