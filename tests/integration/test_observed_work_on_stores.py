"""Observed work on every kind of store: an ordinary record, which names the place of the first message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotencyRepository
from integr8s_idem.engine.observed_work import Place, WorkObserver
from integr8s_idem.engine.work import Work
from integr8s_idem.keys import Key
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Observation, Observed
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.homes import Home, at_hand, open_home, open_records

MEMORY = "memory"
KINDS = (MEMORY, *at_hand("redis", "redis-cluster", "sqlite", "postgresql", "mysql", "dynamodb"))


@pytest.fixture(scope="module", params=KINDS)
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    if request.param == MEMORY:
        yield Home(MEMORY, None)
        return
    with open_home(request.param) as home:
        yield home


@pytest.fixture
async def store(home: Home, tmp_path: Path, topic_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    if home.kind == MEMORY:
        yield MemoryIdempotencyRepository()
        return
    async with open_records(home.settings(tmp_path, timeout_seconds=5), topic_prefix.rstrip(".")) as store:
        yield store


class Observing:
    """The observations of one process."""

    def __init__(self, store: IdempotencyRepository, prefix: str) -> None:
        config = IdempotencyConfig(key_prefix=prefix)
        self._seen = CountingObserver()
        self.manager = IdempotencyManager(config, store, self._seen, scope="billing")
        self._observer = WorkObserver(self.manager, timedelta(hours=2))

    async def delivered(self, event_id: str, offset: int, payload: bytes = b"\1" * 16, *, ends: bool = True) -> None:
        """Observe a delivery until the store has answered."""
        key = Key.of_event("charge", "order_placed", "id", event_id)
        work = self._observer.observed(Work(key, payload), Place("orders", 3, offset))
        count = len(self.observations)
        work.begin()
        await eventually(lambda: len(self.observations) > count)
        if ends:
            work.end(is_done=True)

    @property
    def observations(self) -> list[Observation]:
        return self._seen.observations


async def test_every_store_tells_the_kinds_of_duplicates_and_their_gaps(
    store: IdempotencyRepository, topic_prefix: str
) -> None:
    here = Observing(store, topic_prefix.rstrip("."))
    await here.delivered("a", 1)
    await here.delivered("a", 1)
    await here.delivered("a", 2)
    await here.delivered("a", 3, b"\2" * 16)
    await here.delivered("b", 4, ends=False)
    await here.delivered("b", 5)
    await here.manager.close()

    assert [(each.result, each.has_other_payload) for each in here.observations] == [
        (Observed.FIRST, False),
        (Observed.REDELIVERED, False),
        (Observed.REPUBLISHED, False),
        (Observed.REPUBLISHED, True),
        (Observed.FIRST, False),
        (Observed.CONCURRENT, False),
    ]
    gaps = [each.gap for each in here.observations[1:4]]
    assert all(gap is not None and timedelta(0) <= gap < timedelta(minutes=1) for gap in gaps)
