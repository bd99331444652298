"""Drivers alone, as hand-written deduplication uses them: insert the key if it is new, then mark it as done.

Without lease, token and fence, a crash between the two writes blocks the key, and a late writer overwrites the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.contestants import LEASE, RESULT, ensure
from integr8s_idem.stores.sql import writing

_SECONDS: Final = int(LEASE.total_seconds())
_HELD, _DONE = b"processing", b"done:" + RESULT
_CONCURRENCY: Final = 32
"""Concurrent DynamoDB requests of one batch, as many as the store sends."""

TABLES: Final = {
    "postgresql": "CREATE TABLE bare (key varchar(255) PRIMARY KEY, status smallint NOT NULL, result bytea)",
    "mysql": "CREATE TABLE bare (`key` varbinary(255) PRIMARY KEY, status smallint NOT NULL, result longblob)",
    "sqlite": "CREATE TABLE bare (key varchar(255) PRIMARY KEY, status smallint NOT NULL, result blob) WITHOUT ROWID",
}


class BareRedis:
    """redis-py: SET NX EX, then SET XX KEEPTTL; with `wait`, WAIT after each write in the same round trip."""

    def __init__(self, client: Any, *, wait: bool = False) -> None:
        self._client = client
        self._wait = wait

    async def pair(self, key: str) -> None:
        if self._wait:
            await self.batch([key])
            return
        ensure(await self._client.set(key, _HELD, nx=True, ex=_SECONDS), key)
        ensure(await self._client.set(key, _DONE, xx=True, keepttl=True), key)

    async def batch(self, keys: Sequence[str]) -> None:
        await self._pipeline([(key, _HELD, {"nx": True, "ex": _SECONDS}) for key in keys])
        await self._pipeline([(key, _DONE, {"xx": True, "keepttl": True}) for key in keys])

    async def _pipeline(self, sets: Sequence[tuple[str, bytes, dict[str, Any]]]) -> None:
        pipeline = self._client.pipeline(**self._options)
        for key, value, options in sets:
            pipeline.set(key, value, **options)
        if self._wait:
            pipeline.execute_command("WAIT", 1, 10_000)
        ensure(all(await pipeline.execute()), "some keys were not new")

    _options: dict[str, Any] = {"transaction": False}  # noqa: RUF012  # never mutated


class BareRedisCluster(BareRedis):
    """The same commands on redis-py's RedisCluster."""

    _options: dict[str, Any] = {}  # noqa: RUF012  # never mutated


class BareAsyncpg:
    """asyncpg and its pool: each statement is a transaction."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def pair(self, key: str) -> None:
        status = await self._pool.execute("INSERT INTO bare VALUES ($1, 1, NULL) ON CONFLICT DO NOTHING", key)
        ensure(status == "INSERT 0 1", status)
        status = await self._pool.execute("UPDATE bare SET status = 2, result = $2 WHERE key = $1", key, RESULT)
        ensure(status == "UPDATE 1", status)

    async def batch(self, keys: Sequence[str]) -> None:
        insert = "INSERT INTO bare SELECT unnest($1::text[]), 1, NULL ON CONFLICT DO NOTHING"
        status = await self._pool.execute(insert, keys)
        ensure(status == f"INSERT 0 {len(keys)}", status)
        status = await self._pool.execute("UPDATE bare SET status = 2, result = $2 WHERE key = ANY($1)", keys, RESULT)
        ensure(status == f"UPDATE {len(keys)}", status)


class BareAiomysql:
    """aiomysql and its pool, autocommit: each statement is a transaction."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def pair(self, key: str) -> None:
        await self.batch([key])

    async def batch(self, keys: Sequence[str]) -> None:
        rows, names = ", ".join(["(%s, 1, NULL)"] * len(keys)), ", ".join(["%s"] * len(keys))
        await self._execute(f"INSERT IGNORE INTO bare VALUES {rows}", [*keys], len(keys))
        await self._execute(
            f"UPDATE bare SET status = 2, result = %s WHERE `key` IN ({names})", [RESULT, *keys], len(keys)
        )

    async def _execute(self, statement: str, parameters: Sequence[Any], rows: int) -> None:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            ensure(await cursor.execute(statement, parameters) == rows, statement)


class BareAiosqlite:
    """aiosqlite with one connection, autocommit: each statement is a transaction; a batch is two transactions."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    async def pair(self, key: str) -> None:
        await self._execute("INSERT INTO bare VALUES (?, 1, NULL) ON CONFLICT DO NOTHING", (key,))
        await self._execute("UPDATE bare SET status = 2, result = ? WHERE key = ?", (RESULT, key))

    async def _execute(self, statement: str, parameters: tuple[Any, ...]) -> None:
        cursor = await self._connection.execute(statement, parameters)
        ensure(cursor.rowcount == 1, statement)
        await cursor.close()

    async def batch(self, keys: Sequence[str]) -> None:
        await self._execute_many(
            "INSERT INTO bare VALUES (?, 1, NULL) ON CONFLICT DO NOTHING", [(key,) for key in keys]
        )
        await self._execute_many(
            "UPDATE bare SET status = 2, result = ? WHERE key = ?", [(RESULT, key) for key in keys]
        )

    async def _execute_many(self, statement: str, parameters: Sequence[tuple[Any, ...]]) -> None:
        async with self._lock:
            await self._connection.execute("BEGIN IMMEDIATE")
            cursor = await self._connection.executemany(statement, parameters)
            ensure(cursor.rowcount == len(parameters), statement)
            await self._connection.execute("COMMIT")


class BareSqlalchemy:
    """SQLAlchemy Core on the store's engine, as an application would write it: each statement is a transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        ignore, on_conflict = (
            ("IGNORE ", "") if engine.dialect.name in {"mysql", "mariadb"} else ("", " ON CONFLICT DO NOTHING")
        )
        column = "`key`" if ignore else "key"
        self._insert = text(f"INSERT {ignore}INTO bare VALUES (:key, 1, NULL){on_conflict}")
        self._update = text(f"UPDATE bare SET status = 2, result = :result WHERE {column} = :key")

    async def pair(self, key: str) -> None:
        for statement, parameters in ((self._insert, {"key": key}), (self._update, {"key": key, "result": RESULT})):
            async with writing(self._engine) as connection:
                ensure((await connection.execute(statement, parameters)).rowcount == 1, key)

    async def batch(self, keys: Sequence[str]) -> None:
        async with writing(self._engine) as connection:
            await connection.execute(self._insert, [{"key": key} for key in keys])
        async with writing(self._engine) as connection:
            await connection.execute(self._update, [{"key": key, "result": RESULT} for key in keys])


class BareDynamodb:
    """aiobotocore: put_item with attribute_not_exists, then update_item."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    async def pair(self, key: str) -> None:
        await self._client.put_item(
            TableName=self._table,
            Item={"key": {"S": key}, "status": {"S": "processing"}},
            ConditionExpression="attribute_not_exists(#k)",
            ExpressionAttributeNames={"#k": "key"},
        )
        await self._client.update_item(
            TableName=self._table,
            Key={"key": {"S": key}},
            UpdateExpression="SET #s = :done, #r = :result",
            ExpressionAttributeNames={"#s": "status", "#r": "result"},
            ExpressionAttributeValues={":done": {"S": "done"}, ":result": {"B": RESULT}},
        )

    async def batch(self, keys: Sequence[str]) -> None:
        slots = asyncio.Semaphore(_CONCURRENCY)

        async def one(key: str) -> None:
            async with slots:
                await self.pair(key)

        await asyncio.gather(*map(one, keys))
