"""Interrupted statements on a SQLite file: the file is unlocked immediately, and the caller gets the right error."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem import IdempotencyManager
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from tests.support.conditions import eventually


class Gate:
    """The SQL function `wait_here()`, which blocks a statement until the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> int:
        self.reached.set()
        assert self.opened.wait(30)
        return 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    # A garbage collection must not release a lock by chance.
    gc.disable()
    yield gate
    gc.enable()
    gate.opened.set()


@pytest.fixture
async def engine(tmp_path: Path, gate: Gate) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'idem.db'}")

    @event.listens_for(engine.sync_engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.create_function("wait_here", 0, gate.wait)

    await migrate(engine)
    yield engine
    await engine.dispose()


async def slow_statement(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE slow (x)"))
        await connection.execute(text("INSERT INTO slow SELECT wait_here() RETURNING x"))


async def test_a_cancelled_statement_raises_cancelled_error_and_unlocks_the_file(
    engine: AsyncEngine, gate: Gate, tmp_path: Path
) -> None:
    running = asyncio.create_task(slow_statement(engine))
    await eventually(gate.reached.is_set)

    running.cancel()
    asyncio.get_running_loop().call_later(0.05, gate.opened.set)
    with pytest.raises(asyncio.CancelledError) as kept:
        await running

    # `kept` references everything that the statement used.
    assert kept.value is not None
    with closing(sqlite3.connect(tmp_path / "idem.db", timeout=1, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM sqlite_master WHERE name = 'slow'").fetchone() == (0,)


async def test_a_reservation_timeout_is_an_outage_and_the_next_reservation_succeeds(
    engine: AsyncEngine, gate: Gate
) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "CREATE TRIGGER slow BEFORE INSERT ON idempotency_records WHEN NEW.key LIKE '%slow' "
                "BEGIN SELECT wait_here(); END"
            )
        )
    store = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=0.5))
    manager = IdempotencyManager(repository=store, scope="billing")
    asyncio.get_running_loop().call_later(1.0, gate.opened.set)

    with pytest.raises(StoreUnavailableError, match="no answer from sqlite within") as kept:
        await manager.reserve("slow")
    following = await manager.reserve("next")

    assert kept.value is not None
    assert isinstance(following, Reserved)
    await manager.close()
