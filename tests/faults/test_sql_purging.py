"""Expired rows taken away by a worker, on real databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from integr8s_idem.records import Completion, Reserved
from integr8s_idem.stores import Purging
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.schema import records
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.store_under_test import new_key, wish
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis_shop import open_redis_shop


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        "postgresql",
        pytest.param("mysql", marks=pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())),
    ],
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        path: Path = tmp_path_factory.mktemp("purging") / "idem.db"
        yield f"sqlite+aiosqlite:///{path}"
        return
    with PostgresServer() if request.param == "postgresql" else MariadbServer() as server:
        yield server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlIdempotencyRepository]:
    engine = sql_engine(url, lock_timeout_seconds=1)
    await migrate(engine)
    yield SqlIdempotencyRepository(engine, purge_every=timedelta(seconds=0.2))
    await engine.dispose()


async def fill(store: SqlIdempotencyRepository, *, expired: int, kept: int) -> list[str]:
    """Settle that many records; the keys of those that stay."""
    verdicts = await store.reserve([wish(new_key()) for _ in range(expired + kept)])
    taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    await store.complete([Completion(reservation=one, ttl=timedelta(0)) for one in taken[:expired]])
    await store.complete([Completion(reservation=one, ttl=timedelta(days=8)) for one in taken[expired:]])
    return [one.key for one in taken[expired:]]


async def rows(store: SqlIdempotencyRepository) -> int:
    async with store.engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(records))).scalar_one())


async def test_a_worker_takes_away_what_has_expired_and_nothing_else(
    store: SqlIdempotencyRepository, effects: Effects
) -> None:
    assert isinstance(store, Purging)
    before = await rows(store)
    kept = await fill(store, expired=1_200, kept=3)

    async with open_redis_shop(effects, store) as shop:
        await eventually(lambda: shop.observer.counts[Signal.PURGED] >= 1_200, state=lambda: shop.observer.counts)

        assert shop.observer.counts[Signal.PURGED] == 1_200
    assert await rows(store) == before + 3
    assert None not in await store.get(kept)


async def test_two_that_purge_at_once_share_the_work(store: SqlIdempotencyRepository) -> None:
    before = await rows(store)
    await fill(store, expired=1_000, kept=0)

    purged = 0
    while await rows(store) > before:
        purged += sum(await asyncio.gather(store.purge(200), store.purge(200)))

    assert purged == 1_000


async def test_keys_that_come_again_while_they_are_purged_are_reserved_anew(store: SqlIdempotencyRepository) -> None:
    """Purging locks rows in the order of their expiry, reserving in that of their keys: neither may fail for it."""
    verdicts = await store.reserve([wish(new_key()) for _ in range(400)])
    taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    keys = [one.key for one in taken]

    for _ in range(5):
        await store.complete([Completion(reservation=one, ttl=timedelta(0)) for one in taken])
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(store.purge(100))
            reserves = [group.create_task(store.reserve([wish(key) for key in keys[start::4]])) for start in range(4)]
        taken = [one for reserve in reserves for one in reserve.result() if isinstance(one, Reserved)]

        assert len(taken) == 400
