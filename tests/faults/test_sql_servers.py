"""Workers whose database is down, locked or restarted.

The broker is in memory (see `tests.support.redis_shop`); PostgreSQL, MariaDB, SQLite, drivers, store and worker
are real.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, sql_engine
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis_shop import briefly, open_redis_shop


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(keeps_commits=True) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariadbServer]:
    if why := missing_programs():
        pytest.skip(why)
    with MariadbServer(keeps_commits=True) as server:
        yield server


@pytest.fixture(params=["postgresql", "mysql", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlIdempotencyRepository]:
    servers = {"postgresql": "postgres", "mysql": "mariadb"}
    server = request.getfixturevalue(servers[request.param]) if request.param in servers else None
    url = server.url if server is not None else f"sqlite+aiosqlite:///{tmp_path / 'idem.db'}"
    engine = sql_engine(url, lock_timeout_seconds=0.3)
    await migrate(engine)
    yield SqlIdempotencyRepository(engine, timeout=timedelta(seconds=2))
    await engine.dispose()


async def test_a_worker_handles_each_event_once_and_answers_duplicates_from_the_table(
    store: SqlIdempotencyRepository, effects: Effects
) -> None:
    async with open_redis_shop(effects, store) as shop:
        events = shop.order(100)
        shop.publish(*events)
        await shop.settled()

        assert (shop.tally.handled, shop.tally.duplicates) == (100, 100)
        shop.untouched()


@pytest.mark.parametrize(("store", "name"), [("postgresql", "postgres"), ("mysql", "mariadb")], indirect=["store"])
@pytest.mark.scenario(55)
async def test_a_database_that_crashes_costs_no_attempt_and_work_resumes(
    store: SqlIdempotencyRepository, effects: Effects, name: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(name)
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(100)
        await eventually(lambda: shop.acknowledged >= 20)

        await asyncio.to_thread(server.crash)
        shop.order(50)
        await shop.paused()
        await asyncio.to_thread(server.start_again)
        await shop.settled()

        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 0
        shop.untouched()


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.scenario(58)
async def test_a_file_locked_by_another_process_pauses_the_worker(
    store: SqlIdempotencyRepository, effects: Effects, tmp_path: Path
) -> None:
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(20)
        await shop.settled()
        other = sqlite3.connect(tmp_path / "idem.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        shop.order(20)
        reason = await shop.paused()
        other.execute("ROLLBACK")
        other.close()
        await shop.settled()

        assert "another process locks the SQLite file" in reason
        shop.untouched()


@pytest.mark.scenario(46)
async def test_recreated_tables_are_detected_and_counted(
    store: SqlIdempotencyRepository, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)
    async with open_redis_shop(effects, store) as shop:
        events = shop.order(10)
        await shop.settled()

        async with writing(store.engine) as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(store.engine)
        await eventually(lambda: shop.observer.counts[Signal.STORE_DATA_LOST] == 1)
        shop.publish(*events)
        await shop.settled()

        assert shop.judge(records_lost=True)["repeats"] == 10
