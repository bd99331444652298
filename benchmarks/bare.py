"""Drivers alone, doing what a deduplication written by hand does: insert the key if it is new, then mark it as done.

No lease, no token, no fence: a crash between the two writes blocks the key, and whoever comes late overwrites.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.contestants import LEASE, RESULT, must
from integr8s_idem.stores.sql import writing

_SECONDS: Final = int(LEASE.total_seconds())
_HELD, _DONE = b"processing", b"done:" + RESULT
_AT_ONCE: Final = 32
"""Requests of a batch in DynamoDB: as many as the store sends."""

TABLES: Final = {
    "postgresql": "CREATE TABLE bare (key varchar(255) PRIMARY KEY, status smallint NOT NULL, result bytea)",
    "mysql": "CREATE TABLE bare (`key` varbinary(255) PRIMARY KEY, status smallint NOT NULL, result longblob)",
    "sqlite": "CREATE TABLE bare (key varchar(255) PRIMARY KEY, status smallint NOT NULL, result blob) WITHOUT ROWID",
}


class BareRedis:
    """redis-py: SET NX EX, then SET XX KEEPTTL; with `wait`, WAIT behind each write in the same round trip."""

    def __init__(self, client: Any, *, wait: bool = False) -> None:
        self._client = client
        self._wait = wait

    async def pair(self, key: str) -> None:
        if self._wait:
            await self.batch([key])
            return
        must(await self._client.set(key, _HELD, nx=True, ex=_SECONDS), key)
        must(await self._client.set(key, _DONE, xx=True, keepttl=True), key)

    async def batch(self, keys: Sequence[str]) -> None:
        await self._together([(key, _HELD, {"nx": True, "ex": _SECONDS}) for key in keys])
        await self._together([(key, _DONE, {"xx": True, "keepttl": True}) for key in keys])

    async def _together(self, sets: Sequence[tuple[str, bytes, dict[str, Any]]]) -> None:
        pipeline = self._client.pipeline(**self._options)
        for key, value, how in sets:
            pipeline.set(key, value, **how)
        if self._wait:
            pipeline.execute_command("WAIT", 1, 10_000)
        must(all(await pipeline.execute()), "not all were new")

    _options: dict[str, Any] = {"transaction": False}  # noqa: RUF012  # never changed


class BareRedisCluster(BareRedis):
    """redis-py's RedisCluster, the same."""

    _options: dict[str, Any] = {}  # noqa: RUF012  # never changed


class BareAsyncpg:
    """asyncpg and its pool: each statement is a transaction."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def pair(self, key: str) -> None:
        said = await self._pool.execute("INSERT INTO bare VALUES ($1, 1, NULL) ON CONFLICT DO NOTHING", key)
        must(said == "INSERT 0 1", said)
        said = await self._pool.execute("UPDATE bare SET status = 2, result = $2 WHERE key = $1", key, RESULT)
        must(said == "UPDATE 1", said)

    async def batch(self, keys: Sequence[str]) -> None:
        insert = "INSERT INTO bare SELECT unnest($1::text[]), 1, NULL ON CONFLICT DO NOTHING"
        said = await self._pool.execute(insert, keys)
        must(said == f"INSERT 0 {len(keys)}", said)
        said = await self._pool.execute("UPDATE bare SET status = 2, result = $2 WHERE key = ANY($1)", keys, RESULT)
        must(said == f"UPDATE {len(keys)}", said)


class BareAiomysql:
    """aiomysql and its pool, autocommit: each statement is a transaction."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def pair(self, key: str) -> None:
        await self.batch([key])

    async def batch(self, keys: Sequence[str]) -> None:
        row, name = ", ".join(["(%s, 1, NULL)"] * len(keys)), ", ".join(["%s"] * len(keys))
        await self._one(f"INSERT IGNORE INTO bare VALUES {row}", [*keys], len(keys))
        await self._one(f"UPDATE bare SET status = 2, result = %s WHERE `key` IN ({name})", [RESULT, *keys], len(keys))

    async def _one(self, statement: str, told: Sequence[Any], rows: int) -> None:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            must(await cursor.execute(statement, told) == rows, statement)


class BareAiosqlite:
    """aiosqlite with one connection, autocommit: each statement is a transaction; a batch is two."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()

    async def pair(self, key: str) -> None:
        await self._one("INSERT INTO bare VALUES (?, 1, NULL) ON CONFLICT DO NOTHING", (key,))
        await self._one("UPDATE bare SET status = 2, result = ? WHERE key = ?", (RESULT, key))

    async def _one(self, statement: str, told: tuple[Any, ...]) -> None:
        cursor = await self._connection.execute(statement, told)
        must(cursor.rowcount == 1, statement)
        await cursor.close()

    async def batch(self, keys: Sequence[str]) -> None:
        await self._all("INSERT INTO bare VALUES (?, 1, NULL) ON CONFLICT DO NOTHING", [(key,) for key in keys])
        await self._all("UPDATE bare SET status = 2, result = ? WHERE key = ?", [(RESULT, key) for key in keys])

    async def _all(self, statement: str, told: Sequence[tuple[Any, ...]]) -> None:
        async with self._turn:
            await self._connection.execute("BEGIN IMMEDIATE")
            cursor = await self._connection.executemany(statement, told)
            must(cursor.rowcount == len(told), statement)
            await self._connection.execute("COMMIT")


class BareSqlalchemy:
    """SQLAlchemy Core on the engine of the store, as an application would write it: each statement in a transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        ignore, rest = (
            ("IGNORE ", "") if engine.dialect.name in {"mysql", "mariadb"} else ("", " ON CONFLICT DO NOTHING")
        )
        key = "`key`" if ignore else "key"
        self._insert = text(f"INSERT {ignore}INTO bare VALUES (:of, 1, NULL){rest}")
        self._update = text(f"UPDATE bare SET status = 2, result = :result WHERE {key} = :of")

    async def pair(self, key: str) -> None:
        for statement, told in ((self._insert, {"of": key}), (self._update, {"of": key, "result": RESULT})):
            async with writing(self._engine) as connection:
                must((await connection.execute(statement, told)).rowcount == 1, key)

    async def batch(self, keys: Sequence[str]) -> None:
        async with writing(self._engine) as connection:
            await connection.execute(self._insert, [{"of": key} for key in keys])
        async with writing(self._engine) as connection:
            await connection.execute(self._update, [{"of": key, "result": RESULT} for key in keys])


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
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> None:
            async with room:
                await self.pair(key)

        await asyncio.gather(*map(one, keys))
