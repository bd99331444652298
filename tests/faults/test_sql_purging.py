"""Expired rows are purged by workers, on real databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.records import Completion, Reserved
from integr8s_idem.stores import PurgeSupport
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine, statements
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.schema import records
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.store_under_test import new_key, wish
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis_shop import open_redis_shop

POSTGRESQL = dialect_of("postgresql")

MANY_ROWS = """
    INSERT INTO idempotency_records
        (key, status, attempt, fence, token, expires_at, settled_at, previous, owner, result_dropped, error)
    SELECT 'key-' || n, 2, 1, n, '', n, n, 0, '', false, '' FROM generate_series(1, :rows) AS n
"""
"""Insert records that expired long ago."""


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
    """Complete records that expire immediately and records that do not, and return the keys of the latter."""
    verdicts = await store.reserve([wish(new_key()) for _ in range(expired + kept)])
    taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    await store.complete([Completion(reservation=reservation, ttl=timedelta(0)) for reservation in taken[:expired]])
    await store.complete(
        [Completion(reservation=reservation, ttl=timedelta(days=8)) for reservation in taken[expired:]]
    )
    return [reservation.key for reservation in taken[expired:]]


async def rows(store: SqlIdempotencyRepository) -> int:
    async with store.engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(records))).scalar_one())


async def test_a_worker_purges_only_expired_records(store: SqlIdempotencyRepository, effects: Effects) -> None:
    assert isinstance(store, PurgeSupport)
    before = await rows(store)
    kept = await fill(store, expired=1_200, kept=3)

    async with open_redis_shop(effects, store) as shop:
        await eventually(lambda: shop.observer.counts[Signal.PURGED] >= 1_200, state=lambda: shop.observer.counts)

        assert shop.observer.counts[Signal.PURGED] == 1_200
    assert await rows(store) == before + 3
    assert None not in await store.get(kept)


async def test_concurrent_purges_share_the_work(store: SqlIdempotencyRepository) -> None:
    before = await rows(store)
    await fill(store, expired=1_000, kept=0)

    purged = 0
    while await rows(store) > before:
        purged += sum(await asyncio.gather(store.purge(200), store.purge(200)))

    assert purged == 1_000


async def test_keys_can_be_reserved_while_they_are_purged(store: SqlIdempotencyRepository) -> None:
    """Purging locks rows in order of expiry, reserving in order of keys: this must not cause deadlocks."""
    verdicts = await store.reserve([wish(new_key()) for _ in range(400)])
    taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    keys = [reservation.key for reservation in taken]

    for _ in range(5):
        await store.complete([Completion(reservation=reservation, ttl=timedelta(0)) for reservation in taken])
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(store.purge(100))
            reserves = [group.create_task(store.reserve([wish(key) for key in keys[start::4]])) for start in range(4)]
        verdicts = [verdict for reserve in reserves for verdict in reserve.result()]
        taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]

        assert len(taken) == 400


async def test_purging_uses_indexes_even_if_its_plan_was_made_for_an_empty_table() -> None:
    with PostgresServer() as server:
        engine = sql_engine(server.url)
        await migrate(engine)
        purging: Any = statements.delete_expired(POSTGRESQL, statements.select_expired(POSTGRESQL, 500))
        statement = str(purging.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
        async with engine.connect() as connection:
            await connection.exec_driver_sql(
                f"PREPARE purging (bigint) AS {statement.replace('LIMIT 500', 'LIMIT $1')}"
            )
            for _ in range(7):  # PostgreSQL may keep a generic plan from the sixth execution on
                await connection.exec_driver_sql("EXECUTE purging (500)")
            await connection.execute(text(MANY_ROWS), {"rows": 20_000})

            early = await plan_of(connection, "EXECUTE purging (500)")
            await connection.exec_driver_sql("ANALYZE idempotency_records")
            late = await plan_of(connection, "EXECUTE purging (500)")
        await engine.dispose()

    assert "idempotency_records_pkey" in early
    assert "Seq Scan" not in late
    assert "Index Scan using idempotency_records_expires_at" in late
    assert "rows=500.00 loops=1" in late


async def plan_of(connection: AsyncConnection, statement: str) -> str:
    return "\n".join((await connection.exec_driver_sql(f"EXPLAIN (ANALYZE) {statement}")).scalars())
