"""A transactional handler is reserved again if its lease has expired before it starts.

The store is SQLite, whose clock cannot be moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from dishka import Provider, Scope
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import Attempt, EventRouter, IdempotencyConfig, IdempotencyManager
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.integrations.dishka import (
    FromDishka,
)
from integr8s_idem.records import Completion, Reserved, ReserveRequest, StoredResult, Verdict
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from tests.support.late_starts import (
    GIVEN,
    OrderPlaced,
    Run,
    Tariff,
    container_of,
    value_of,
)
from tests.support.stalling import HOUR, ManualClock


class Transactional(Run):
    """A handler whose outcome commits with its session."""

    lease = 1.0

    def __init__(self, clock: ManualClock, store: SqlIdempotencyRepository) -> None:
        super().__init__(clock, store)
        config = IdempotencyConfig(processing_timeout_seconds=self.lease)
        self.manager = IdempotencyManager(config, store, self.observer, scope="billing", clock=clock)
        self.engine = store.engine

    async def call(self) -> Any:
        router, requests = EventRouter(), Provider(scope=Scope.REQUEST)

        async def session() -> AsyncIterator[AsyncSession]:
            async with AsyncSession(self.engine) as opened:
                error = yield opened
                if error is None:
                    await opened.commit()

        async def tariff(session: AsyncSession) -> Tariff:
            return Tariff()

        @router.on(OrderPlaced)
        async def charge(event: OrderPlaced, tariff: FromDishka[Tariff], attempt: FromDishka[Attempt]) -> str:
            self.starts.append(attempt)
            return f"receipt {attempt.number}"

        requests.provide(session)
        container = container_of(self, router, tariff, requests, transaction=AsyncSession)
        try:
            [outcome] = await (await container.get(EventDispatcher)).dispatch(GIVEN)
        finally:
            await container.close()
        return value_of(outcome)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Callable[[], SqlIdempotencyRepository]]:
    """Makes stores, one per process, that share a file."""
    engines: list[AsyncEngine] = []

    def made() -> SqlIdempotencyRepository:
        engines.append(sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"))
        return SqlIdempotencyRepository(engines[-1])

    await migrate(made().engine)
    yield made
    for engine in engines:
        await engine.dispose()


def stall_after_reserve(
    store: SqlIdempotencyRepository,
    monkeypatch: pytest.MonkeyPatch,
    stall: Callable[[], Awaitable[None]],
    is_silent: asyncio.Event | None = None,
) -> list[Reserved]:
    """Stall once after the store has reserved; returns the reservations that are made.

    Call it before the manager of the store is made.  `is_silent`: set while the store does not answer.
    """
    reserve, reserved, calls = store.reserve, list[Reserved](), iter([stall])

    async def stalling(requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if is_silent is not None and is_silent.is_set():
            raise StoreUnavailableError("reserve", "switched off by the test")
        verdicts = await reserve(requests)
        reserved.extend(verdict for verdict in verdicts if isinstance(verdict, Reserved))
        for each in calls:
            await each()
        return verdicts

    monkeypatch.setattr(store, "reserve", stalling)
    return reserved


async def test_a_transactional_handler_with_a_late_lease_still_held_starts_as_the_same_attempt(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()

    reserved = stall_after_reserve(store, monkeypatch, clock.stall)
    entry = Transactional(clock, store)

    assert await entry.call() == "receipt 1"
    await entry.close()

    assert [(attempt.number, attempt.fence) for attempt in entry.starts] == [(1, reserved[0].fence)]
    assert [each.token for each in reserved] == [reserved[0].token] * 2
    assert entry.prevented == 1


async def test_a_transactional_handler_completed_by_another_process_does_not_start(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other_store = stores(), stores()

    async def done_elsewhere() -> None:
        clock.leap()
        await asyncio.sleep(1.1 * Transactional.lease)
        asked = ReserveRequest(key=reserved[0].key, token=bytes(16), lease=timedelta(seconds=60), retention=HOUR)
        [taken_over] = await other_store.reserve([asked])
        assert isinstance(taken_over, Reserved)
        assert taken_over.attempt == 2
        result = StoredResult(b'"receipt 2"')
        assert await other_store.complete([Completion(reservation=taken_over, ttl=HOUR, result=result)]) == [True]

    reserved = stall_after_reserve(store, monkeypatch, done_elsewhere)
    entry = Transactional(clock, store)

    assert await entry.call() == "receipt 2"
    await entry.close()

    assert entry.starts == []
    assert entry.prevented == 1


async def test_a_transactional_handler_does_not_start_on_a_late_lease_while_its_database_does_not_answer(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()

    async def leap_into_an_outage() -> None:
        clock.leap()
        is_silent.set()

    is_silent = asyncio.Event()
    stall_after_reserve(store, monkeypatch, leap_into_an_outage, is_silent)
    entry = Transactional(clock, store)

    with pytest.raises(StoreUnavailableError):
        await entry.call()
    await entry.close()

    assert entry.starts == []
