"""`in_transaction` with `on_key_reused = "run"`: the run without a record obeys the same rules as others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Column, MetaData, Table, Text, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import IdempotencyConfig, IdempotencyManager
from integr8s_idem.errors import ApplicationError
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine

metadata = MetaData()
refunds = Table("refunds", metadata, Column("name", Text))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    yield engine
    await engine.dispose()


async def refund(engine: AsyncEngine, name: str, then: Callable[[AsyncSession], Awaitable[None]]) -> None:
    """Insert a row in a run of the same key, whose payload is `name`."""
    config = IdempotencyConfig(on_key_reused="run")
    manager = IdempotencyManager(config, SqlIdempotencyRepository(engine), scope="shop")
    async with AsyncSession(engine) as session, session.begin(), manager.in_transaction(session):

        async def work() -> None:
            await session.execute(insert(refunds).values(name=name))
            await then(session)

        with suppress(ConnectionError):  # the caller goes on, and commits
            await manager.run("order:7", work, fingerprint=name.encode() * 16)


async def nothing(_: AsyncSession) -> None: ...


async def fail(_: AsyncSession) -> None:
    raise ConnectionError


async def names(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return sorted((await connection.execute(select(refunds.c.name))).scalars())


async def test_a_run_of_a_reused_key_commits_with_the_transaction(engine: AsyncEngine) -> None:
    for name in ("a", "b"):
        await refund(engine, name, nothing)

    assert await names(engine) == ["a", "b"]


async def test_the_writes_of_a_failed_run_of_a_reused_key_are_undone(engine: AsyncEngine) -> None:
    await refund(engine, "a", nothing)

    await refund(engine, "b", fail)

    assert await names(engine) == ["a"]


async def test_a_run_of_a_reused_key_must_not_commit(engine: AsyncEngine) -> None:
    await refund(engine, "a", nothing)

    with pytest.raises(ApplicationError, match="tried to commit"):
        await refund(engine, "b", AsyncSession.commit)

    assert await names(engine) == ["a"]
