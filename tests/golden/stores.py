"""Stores whose raw records are read and written, bypassing the repository."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol
from uuid import uuid4
from zlib import crc32

from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.events import Message
from integr8s_idem.records import NOBODY
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository, dynamo_client
from integr8s_idem.stores.dynamodb.table import KEYS, TYPES
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.engine import reading, writing
from integr8s_idem.stores.sql.migrations import migrate_in
from integr8s_idem.stores.sql.outbox import SqlOutbox
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.schema import VERSION, metadata
from tests.support.dynamodb.server import DynamoServer

Raw = dict[str, Any]
"""Raw records as JSON, by key, and other data of the store by name."""

KINDS: Final = ("redis", "postgresql", "mysql", "sqlite", "dynamodb")

MESSAGES: Final = (
    Message(
        "order_paid",
        b"order-1",
        b'{"n": 1}',
        [("idempotency-event-id", b"e-1"), ("blob", bytes(range(4)))],
        "e-1",
        "order_paid",
    ),
    Message("order_paid", None, b"", [], "e-2", "order_paid"),
)


class RawStore(Protocol):
    """A store with raw access, empty at the beginning of each test."""

    repository: Any

    async def dump(self) -> Raw:
        """Return everything that the store contains."""
        ...

    async def load(self, raw: Raw) -> None:
        """Write everything that `dump` returned."""
        ...

    def masked(self, record: Any) -> Any:
        """Return a raw record without the values that differ in each run: times, fences, and their checksums."""
        ...

    def scheduled(self, record: Any) -> Any:
        """Return a raw record in processing as a later version writes it for scheduled work."""
        ...

    async def extend(self) -> None:
        """Add to all records what a later version may add, and this one must ignore."""
        ...


def _hex(value: object) -> str:
    assert isinstance(value, bytes)
    return value.hex()


def _json(value: object) -> Any:
    return {"hex": bytes(value).hex()} if isinstance(value, bytes | memoryview) else value


def _plain(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


@dataclass
class RawRedis:
    client: Redis
    repository: RedisIdempotencyRepository

    async def dump(self) -> Raw:
        keys = sorted([key async for key in self.client.scan_iter()])
        found = {
            key.decode(): {"value": _hex(await self.client.get(key)), "life": await self.client.pttl(key)}
            for key in keys
        }
        return {"records": {key: found.pop(key) for key in list(found) if key.startswith("golden:")}, "other": found}

    async def load(self, raw: Raw) -> None:
        for key, one in (raw["records"] | raw["other"]).items():
            await self.client.set(key, bytes.fromhex(one["value"]), px=one["life"] if one["life"] >= 0 else None)

    def masked(self, record: Any) -> Any:
        value = bytes.fromhex(record["value"])
        if value[0] == 2:
            lease = "released" if value[12:18] == bytes(6) else "lease"
            value = value[:5] + b"<fence>" + lease.encode() + b"<check>" + value[22:]
        elif value[0] == 3:
            value = value[:4] + b"<fence><elapsed><check>" + value[20:]
        return {"value": repr(value), "expires": record["life"] >= 0}

    def scheduled(self, record: Any) -> Any:
        value = bytes.fromhex(record["value"])
        return {**record, "value": _with_rest(value, NOBODY + _rest_of(value)[16:]).hex()}

    async def extend(self) -> None:
        async for key in self.client.scan_iter(match="golden:*"):
            value = await self.client.get(key)
            assert isinstance(value, bytes)
            if value[0] == 2 and b"\xff" in (rest := _rest_of(value)[16:]):
                assert rest.count(b"\xff") == 1
                await self.client.set(key, _with_rest(value, _rest_of(value) + b",later,7"), keepttl=True)


def _rest_at(value: bytes) -> int:
    """Return the offset of the token of a record in processing."""
    return 22 + (0, 16, 24, 40)[value[2] & 3] + 8


def _rest_of(value: bytes) -> bytes:
    return value[_rest_at(value) :]


def _with_rest(value: bytes, rest: bytes) -> bytes:
    return value[: _rest_at(value) - 4] + crc32(rest).to_bytes(4, "big") + rest


@dataclass
class RawSql:
    engine: AsyncEngine
    repository: SqlIdempotencyRepository

    async def dump(self) -> Raw:
        async with reading(self.engine) as connection:
            tables = {
                name: [
                    {column: _json(value) for column, value in row.items()}
                    for row in (await connection.execute(text(f"SELECT * FROM {name}"))).mappings()
                ]
                for name in sorted(metadata.tables)
            }
        records = {self._key(row): row for row in tables.pop("idempotency_records")}
        return {"schema": VERSION, "records": dict(sorted(records.items())), "other": tables}

    def _key(self, row: Mapping[str, Any]) -> str:
        key = _plain(row["key"])
        return key.decode() if isinstance(key, bytes) else str(key)

    async def load(self, raw: Raw) -> None:
        """Write the rows into the schema of their version, which is then migrated to the current one."""
        tables = {"idempotency_records": list(raw["records"].values()), **raw["other"]}
        async with writing(self.engine) as connection:
            await connection.run_sync(metadata.drop_all)
            await connection.run_sync(lambda one: migrate_in(one, up_to=raw["schema"]))
            quote = connection.dialect.identifier_preparer.quote
            for name, rows in tables.items():
                await connection.execute(text(f"DELETE FROM {name}"))
                for row in rows:
                    columns = ", ".join(map(quote, row))
                    values = ", ".join(f":v{number}" for number in range(len(row)))
                    statement = text(f"INSERT INTO {name} ({columns}) VALUES ({values})")
                    given = {f"v{number}": _plain(value) for number, value in enumerate(row.values())}
                    await connection.execute(statement, given)
        await migrate(self.engine)

    async def put_messages(self) -> None:
        async with writing(self.engine) as connection:
            await put(connection, MESSAGES)

    async def messages(self) -> list[Message]:
        outbox = SqlOutbox(self.engine)
        claim = await outbox.claim(timedelta(seconds=30))
        assert claim is not None
        return [waiting.message for waiting in await outbox.read(claim)]

    def masked(self, record: Any) -> Any:
        times = {name: record[name] is not None for name in ("fence", "lease_until", "expires_at", "settled_at")}
        return record | times | {"history_fence": record["history_fence"] == record["fence"]}

    def scheduled(self, record: Any) -> Any:
        return {**record, "token": {"hex": NOBODY.hex()}}

    async def extend(self) -> None:
        async with writing(self.engine) as connection:
            for table in ("idempotency_records", "idempotency_outbox"):
                await connection.execute(text(f"ALTER TABLE {table} ADD COLUMN later INTEGER NOT NULL DEFAULT 7"))


@dataclass
class RawDynamo:
    client: Any
    table: str
    repository: DynamoIdempotencyRepository

    async def dump(self) -> Raw:
        items = (await self.client.scan(TableName=self.table, ConsistentRead=True))["Items"]
        shown = {
            item["key"]["S"]: {
                name: {kind: _json(value) for kind, value in one.items()} for name, one in sorted(item.items())
            }
            for item in items
        }
        records = {key: item for key, item in sorted(shown.items()) if key.startswith("golden:")}
        return {"records": records, "other": {key: item for key, item in shown.items() if key not in records}}

    async def load(self, raw: Raw) -> None:
        for item in (raw["records"] | raw["other"]).values():
            plain = {name: {kind: _plain(value) for kind, value in one.items()} for name, one in item.items()}
            await self.client.put_item(TableName=self.table, Item=plain)

    def masked(self, record: Any) -> Any:
        times = ("fence", "lease_until", "expires_at", "settled_at", "purge_at")
        return record | {name: record[name] == {"N": "0"} for name in times if name in record}

    def scheduled(self, record: Any) -> Any:
        return {**record, "token": {"B": {"hex": NOBODY.hex()}}}

    async def extend(self) -> None:
        raw = await self.dump()
        for item in raw["records"].values():
            item["later"] = {"N": "7"}
        await self.load(raw)


async def raw_redis(client: Redis) -> RawRedis:
    await client.flushall()
    return RawRedis(client, RedisIdempotencyRepository(client, timeout=timedelta(seconds=30)))


@asynccontextmanager
async def raw_sql(url: str) -> AsyncIterator[RawSql]:
    engine = sql_engine(url, lock_timeout_seconds=20)
    try:
        async with writing(engine) as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(engine)
        yield RawSql(engine, SqlIdempotencyRepository(engine, timeout=timedelta(seconds=30)))
    finally:
        await engine.dispose()


@asynccontextmanager
async def new_table(server: DynamoServer) -> AsyncIterator[RawDynamo]:
    settings = server.settings(table=f"golden-{uuid4().hex}")
    async with dynamo_client(settings) as client:
        await client.create_table(
            TableName=settings.table, KeySchema=KEYS, AttributeDefinitions=TYPES, BillingMode="PAY_PER_REQUEST"
        )
        yield RawDynamo(client, settings.table, DynamoIdempotencyRepository(client, settings.table))
