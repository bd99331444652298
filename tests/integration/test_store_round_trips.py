"""Round trips of each operation of each store, compared with the documented table in the documentation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import event

from integr8s_idem.config import (
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.records import Completed, Completion, Failure, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores import IdempotencyRepository, PurgeSupport
from integr8s_idem.stores.factory import open_engine, open_store
from integr8s_idem.stores.redis import RedisClusterIdempotencyRepository, redis_cluster_client
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate
from integr8s_idem.testing.store_under_test import LEASE, TTL, new_key, wish
from tests.support.dynamodb.fixtures import Table
from tests.support.dynamodb.server import DynamoServer
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import NAME, SentinelServer
from tests.support.turns import TurnCounter

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "stores.md"
RESULT: Final = StoredResult(b'{"receipt": 1}')
MOST: Final = 100

Count = Callable[[], int]
"""Returns the number of round trips or statements so far."""


async def reserve_all(store: IdempotencyRepository, requests: Sequence[ReserveRequest]) -> list[Reserved]:
    verdicts = await store.reserve(requests)
    assert all(isinstance(verdict, Reserved) for verdict in verdicts), verdicts
    return [verdict for verdict in verdicts if isinstance(verdict, Reserved)]


async def costs(store: IdempotencyRepository, count: Count) -> dict[str, int]:
    """Return the count for each column of the table."""
    found: dict[str, int] = {}

    async def counted(column: str, call: Awaitable[Any]) -> Any:
        before = count()
        result = await call
        found[column] = count() - before
        return result

    done, failed, released, deleted = (wish(new_key()) for _ in range(4))
    many = [wish(new_key()) for _ in range(MOST)]
    [first] = await counted("reserve", reserve_all(store, [done]))
    [second], [third], [fourth] = [await reserve_all(store, [one]) for one in (failed, released, deleted)]
    assert await counted("renew", store.renew([first], LEASE)) == [True]
    assert await counted("complete", store.complete([_done(first)])) == [True]
    [verdict] = await counted("duplicate", store.reserve([wish(done.key)]))
    assert isinstance(verdict, Completed)
    assert await counted("fail", store.fail([Failure(reservation=second, ttl=TTL, error="no")])) == [True]
    assert await counted("release", store.release([third])) == [True]
    [retaken] = await counted("takeover", reserve_all(store, [wish(released.key)]))
    assert retaken.attempt == 2
    assert len(await counted("get", store.get([done.key]))) == 1
    assert await counted("delete", store.delete([fourth.key])) == 1
    await counted("ping", store.ping())
    held = await counted("100 reserved", reserve_all(store, many))
    assert all(await counted("100 completed", store.complete([_done(one) for one in held])))
    if isinstance(store, PurgeSupport):
        await store.complete([_done(one, ttl=timedelta(0)) for one in await reserve_all(store, [wish(new_key())])])
        assert await counted("purge", store.purge()) == 1
    return found


def _done(reservation: Reserved, ttl: timedelta = TTL) -> Completion:
    return Completion(reservation=reservation, ttl=ttl, result=RESULT)


def rows() -> dict[str, dict[str, int]]:
    """Return the table on the page, by kind and column, without empty cells."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| round trips of |") :].partition("\n\n")[0].splitlines()
    (_, *columns), _, *lines = [_cells(line) for line in table]
    return {
        kind: {column: int(cell) for column, cell in zip(columns, cells, strict=True) if cell} for kind, *cells in lines
    }


def documented(kind: str) -> dict[str, int]:
    return rows()[kind]


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.removeprefix("|").removesuffix("|").split("|")]


async def settled_costs(store: IdempotencyRepository, count: Count) -> dict[str, int]:
    """Return the counts of a warm store: connected, with prepared statements and loaded scripts."""
    held = await reserve_all(store, [wish(new_key()) for _ in range(MOST)])
    await store.get([one.key for one in held])
    await store.renew(held, LEASE)
    await store.release(held)
    await costs(store, count)
    return await costs(store, count)


# The stores, opened from settings, with a counter in between.

On = Callable[[Path], AbstractAsyncContextManager[tuple[IdempotencyRepository, Count]]]


@asynccontextmanager
async def opened(settings: StoreSettings, count: Count) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    async with open_store(settings, key_prefix="trips") as store:
        yield store, count


@asynccontextmanager
async def on_redis(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with RedisServer() as server:
        async with TurnCounter(server.address) as counter:
            settings = RedisStoreSettings(kind="redis", url=f"redis://127.0.0.1:{counter.port}/0")
            async with opened(settings, lambda: counter.turns) as pair:
                yield pair


@asynccontextmanager
async def on_redis_with_a_replica(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with (
        RedisServer(tcp=True, config={"repl-diskless-sync-delay": "0"}) as primary,
        RedisServer(tcp=True, config={"replicaof": ["127.0.0.1", str(primary.port)]}),
    ):
        async with TurnCounter(primary.port) as counter:
            url, timeouts = f"redis://127.0.0.1:{counter.port}/0", {"timeout_seconds": 30, "wait_timeout_seconds": 20}
            settings = RedisStoreSettings.model_validate({"kind": "redis", "url": url, "wait_replicas": 1, **timeouts})
            async with opened(settings, lambda: counter.turns) as pair:
                yield pair


@asynccontextmanager
async def on_sentinel(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with RedisServer() as server:
        async with TurnCounter(server.address, strangers=b"sentinel-") as counter:
            # Sentinel monitors the counter, and therefore returns it of the primary.
            sentinel = SentinelServer(counter.port, quorum=1)
            await asyncio.to_thread(sentinel.start)
            try:
                address = {"sentinels": [f"127.0.0.1:{sentinel.port}"], "master_name": NAME, "timeout_seconds": 10}
                settings = RedisSentinelStoreSettings.model_validate({"kind": "redis-sentinel", **address})
                async with opened(settings, lambda: counter.turns) as pair:
                    yield pair
            finally:
                await asyncio.to_thread(sentinel.stop)


@asynccontextmanager
async def on_cluster(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with RedisCluster() as cluster:
        async with AsyncExitStack() as stack:
            counters = {
                server.port: await stack.enter_async_context(TurnCounter(server.port)) for server in cluster.servers
            }
            client = redis_cluster_client(cluster.settings(timeout_seconds=10))
            stack.push_async_callback(client.aclose)
            # Redirect the addresses that the servers announce their own addresses, which are mapped to their counters.
            direct = client._topology._make
            client._topology._make = lambda address: direct((address[0], counters[address[1]].port))
            store = RedisClusterIdempotencyRepository(client, timeout=timedelta(seconds=10))
            yield store, lambda: sum(counter.turns for counter in counters.values())


@asynccontextmanager
async def on_postgresql(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with PostgresServer() as server:
        async with TurnCounter(server.folder / ".s.PGSQL.5432") as counter:
            url = f"postgresql://postgres@127.0.0.1:{counter.port}/postgres"
            settings = PostgresqlStoreSettings.model_validate({"kind": "postgresql", "url": url, "timeout_seconds": 20})
            await migrated(settings)
            async with opened(settings, lambda: counter.turns) as pair:
                yield pair


@asynccontextmanager
async def on_mysql(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    with MariadbServer() as server:
        async with TurnCounter(server.folder / "socket") as counter:
            url = f"mysql://idem@127.0.0.1:{counter.port}/test"
            settings = MysqlStoreSettings.model_validate({"kind": "mysql", "url": url, "timeout_seconds": 20})
            await migrated(settings)
            async with opened(settings, lambda: counter.turns) as pair:
                yield pair


async def migrated(settings: MysqlStoreSettings | PostgresqlStoreSettings) -> None:
    async with open_engine(settings) as engine:
        await migrate(engine)


@asynccontextmanager
async def on_sqlite(folder: Path) -> AsyncIterator[tuple[IdempotencyRepository, Count]]:
    """Count statements, including BEGIN and COMMIT, because SQLite has no round trips."""
    settings = SqliteStoreSettings(kind="sqlite", path=str(folder / "idem.db"))
    async with open_store(settings, key_prefix="trips") as store:
        assert isinstance(store, SqlIdempotencyRepository)
        statements: list[str] = []

        def record(statement: str) -> None:
            # A statement for many rows is traced once per row, with its values after the verb and the table.
            first, *last = statements[-2:] if len(statements) > 1 else ("", "")
            if not (first.startswith("BEGIN") and statement.split()[:2] == last[0].split()[:2]):
                statements.append(statement)

        def trace(connection: Any, *_: Any) -> None:
            connection.run_async(lambda driver: driver.set_trace_callback(record))

        event.listen(store.engine.sync_engine, "checkout", trace)
        yield store, lambda: len(statements)


STORES: Final = [
    pytest.param("redis", on_redis),
    pytest.param("redis, wait_replicas = 1", on_redis_with_a_replica),
    pytest.param("redis-sentinel", on_sentinel),
    pytest.param("redis-cluster", on_cluster),
    pytest.param("postgresql", on_postgresql),
    pytest.param(
        "mysql", on_mysql, marks=pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "none")
    ),
    pytest.param("sqlite", on_sqlite),
]


@pytest.mark.parametrize(("kind", "on"), STORES)
async def test_the_page_documents_the_round_trips_of_each_operation(kind: str, on: On, tmp_path: Path) -> None:
    async with on(tmp_path) as (store, count):
        assert await settled_costs(store, count) == documented(kind)


async def test_the_page_documents_the_requests_of_dynamodb_operations(dynamodb: DynamoServer, table: Table) -> None:
    async with TurnCounter(dynamodb.port) as counter:
        settings = table.settings.model_copy(update={"endpoint_url": f"http://127.0.0.1:{counter.port}"})
        async with opened(settings, lambda: counter.turns) as (store, count):
            assert await settled_costs(store, count) == documented("dynamodb")


def test_the_page_has_a_row_for_each_kind_of_store() -> None:
    kinds = {kind.values[0] for kind in STORES} | {"dynamodb"}

    assert set(rows()) == kinds
