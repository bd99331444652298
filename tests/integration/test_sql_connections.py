"""Connection pools: their size, and restarts of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, idle_connections, migrate, sql_engine
from integr8s_idem.testing.store_under_test import new_key, wish
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer

CONNECTIONS = 3

Server = PostgresServer | MariadbServer


@pytest.fixture(
    scope="module",
    params=[
        PostgresServer,
        pytest.param(MariadbServer, marks=pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())),
    ],
    ids=["postgresql", "mysql"],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.param(keeps_commits=True) as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(server.url, pool_size=CONNECTIONS)
    await migrate(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def store(engine: AsyncEngine) -> SqlIdempotencyRepository:
    return SqlIdempotencyRepository(engine, timeout=timedelta(seconds=20))


async def fill(engine: AsyncEngine) -> None:
    """Fill the pool with connections."""
    async with AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = await stack.enter_async_context(engine.connect())
            await connection.execute(text("SELECT 1"))


async def reserve_concurrently(store: SqlIdempotencyRepository) -> list[bool]:
    """Make concurrent calls, and return whether each reserved its key."""
    verdicts = await asyncio.gather(*(store.reserve([wish(new_key())]) for _ in range(CONNECTIONS)))
    return [isinstance(verdict, Reserved) for (verdict,) in verdicts]


def restart(server: Server) -> None:
    server.crash()
    server.start_again()


@pytest.mark.scenario(55)
async def test_no_call_fails_when_the_server_restarts_under_idle_connections(
    server: Server, engine: AsyncEngine, store: SqlIdempotencyRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_connections, "MAX_IDLE_SECONDS", 3600.0)  # the driver notices without a ping
    await fill(engine)

    await asyncio.to_thread(restart, server)

    assert await reserve_concurrently(store) == [True] * CONNECTIONS


@pytest.mark.scenario(55)
async def test_no_call_fails_when_connections_miss_the_restart_of_the_server(
    server: Server, engine: AsyncEngine, store: SqlIdempotencyRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_connections, "MAX_IDLE_SECONDS", 0.0)
    await fill(engine)

    restart(server)  # blocks the event loop, so that the driver does not notice

    assert await reserve_concurrently(store) == [True] * CONNECTIONS


async def test_one_call_fails_after_a_restart_if_the_engine_does_not_ping_connections(server: Server) -> None:
    name = "postgresql+asyncpg" if isinstance(server, PostgresServer) else "mysql+aiomysql"
    engine = create_async_engine(make_url(server.url).set(drivername=name), pool_size=CONNECTIONS)
    store = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=20))
    await migrate(engine)
    await fill(engine)
    await asyncio.to_thread(restart, server)

    failed = 0
    for _ in range(CONNECTIONS):
        try:
            await store.reserve([wish(new_key())])
        except StoreUnavailableError:
            failed += 1

    await engine.dispose()
    assert failed == 1


async def test_a_pool_has_at_most_the_configured_number_of_connections(
    engine: AsyncEngine, store: SqlIdempotencyRepository
) -> None:
    opened: list[object] = []
    event.listen(engine.sync_engine, "connect", lambda connection, entry: opened.append(connection))

    verdicts = await asyncio.gather(*(store.reserve([wish(new_key())]) for _ in range(20 * CONNECTIONS)))

    assert all(isinstance(verdict, Reserved) for (verdict,) in verdicts)
    assert 0 < len(opened) < CONNECTIONS  # one is open already


async def test_a_timeout_of_the_pool_is_reported(server: Server) -> None:
    engine = sql_engine(server.url, pool_size=1, pool_timeout_seconds=0.1)
    store = SqlIdempotencyRepository(engine)
    async with engine.connect():
        with pytest.raises(StoreUnavailableError, match="are in use"):
            await store.reserve([wish(new_key())])

    (verdict,) = await store.reserve([wish(new_key())])
    assert isinstance(verdict, Reserved)
    await engine.dispose()


@pytest.mark.parametrize("server", [PostgresServer], indirect=True)  # MySQL counts in whole seconds
async def test_the_shortest_lock_timeout_of_postgresql_is_a_millisecond(server: Server) -> None:
    engine = sql_engine(server.url, lock_timeout_seconds=0.0004)

    async with engine.connect() as connection:
        lock_timeout = await connection.scalar(text("SHOW lock_timeout"))

    await engine.dispose()
    assert lock_timeout == "1ms"
