"""Rules for errors of transactional handlers, whose writes are rolled back when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from dishka import FromDishka, Provider, Scope, provide
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import Attempt, BaseEvent, EventRouter, IdempotencyStatus, Service, Settings
from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.errors import RetryAfter, ServiceStoppedError
from integr8s_idem.failures import FailureRule, discard, retry, stop
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing import CrashPoint, WorkerHarness

pytestmark = pytest.mark.slow


class Booked(BaseEvent):
    event_type: Literal["booked"] = "booked"
    account: str


class Database(Provider):
    @provide(scope=Scope.APP)
    async def engine(self, settings: Settings) -> AsyncGenerator[AsyncEngine, None]:
        assert isinstance(settings.store, SqliteStoreSettings)
        engine = sql_engine(f"sqlite+aiosqlite:///{settings.store.path}")
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS bookings (account TEXT)"))
        yield engine
        await engine.dispose()

    @provide(scope=Scope.REQUEST)
    async def session(self, engine: AsyncEngine) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()


def harness_of(file: Path, errors: Sequence[Exception], *rules: FailureRule) -> WorkerHarness:
    """Return a harness whose handler writes a booking and raises these errors, one in each attempt."""
    router = EventRouter()

    @router.on(Booked, failures=rules)
    async def book(event: Booked, session: FromDishka[AsyncSession], attempt: FromDishka[Attempt]) -> None:
        await session.execute(text("INSERT INTO bookings VALUES (:account)"), {"account": event.account})
        if attempt.number <= len(errors):
            raise errors[attempt.number - 1]

    dispatcher = IdempotentDispatcherProvider(router, transaction=AsyncSession)
    providers = [IdempotencyProvider(), KafkaProvider(), dispatcher, Database()]
    return WorkerHarness(Service("books", providers=providers), settings=Settings(), sqlite_file=file)


async def bookings(file: Path) -> list[str]:
    engine = sql_engine(f"sqlite+aiosqlite:///{file}")
    async with engine.connect() as connection:
        found = (await connection.execute(text("SELECT account FROM bookings"))).scalars().all()
    await engine.dispose()
    return list(found)


async def test_a_discarded_event_is_completed_without_the_writes_of_its_handler(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"

    async with harness_of(file, [KeyError("withdrawn")], discard(KeyError)) as harness:
        await harness.publish(Booked(account="1"))
        await harness.redeliver_all()
        [record] = await harness.records()

        assert (harness.attempts, harness.duplicates, harness.dead_letters) == ([1], 1, [])
    assert record.status is IdempotencyStatus.COMPLETED
    assert await bookings(file) == []


async def test_an_event_that_was_discarded_before_a_crash_is_a_duplicate(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"

    async with harness_of(file, [KeyError("withdrawn")], discard(KeyError)) as harness:
        harness.crash_at(CrashPoint.BEFORE_COMMIT)
        await harness.publish(Booked(account="1"))

        assert (harness.attempts, harness.duplicates) == ([1], 1)
    assert await bookings(file) == []


async def test_attempts_and_delays_are_those_of_the_rules(tmp_path: Path) -> None:
    file, loop = tmp_path / "shop.db", asyncio.get_running_loop()
    errors = [RetryAfter(600), *[OSError()] * 5]

    async with harness_of(file, errors, retry(OSError, attempts=9)) as harness:
        began = loop.time()
        await harness.publish(Booked(account="1"))
        took = loop.time() - began

        assert harness.attempts == [1, 2, 3, 4, 5, 6, 7]
    assert 600 <= took < 700
    assert await bookings(file) == ["1"]


async def test_an_error_stops_the_service_without_the_writes_of_its_handler(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"

    async with harness_of(file, [MemoryError()], stop(MemoryError)) as harness:
        with pytest.raises(ServiceStoppedError):
            await harness.publish(Booked(account="1"))
        [record] = await harness.records()

    assert (record.status, record.lease_until) == (IdempotencyStatus.PROCESSING, None)
    assert await bookings(file) == []

    async with harness_of(file, []) as harness:
        await harness.publish(Booked(account="2"))

    assert await bookings(file) == ["2"]
