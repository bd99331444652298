"""Store outgoing events in the database until a relay publishes them.

A handler writes its events in its own transaction, so an event exists only if the transaction committed.  All events
of one Kafka key are in one bucket, and only one relay at a time claims a bucket, so they are published in row order.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import zlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Executable, Update, delete, exists, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.events import Message
from integr8s_idem.stores.outbox import Claim, Waiting
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.engine import autocommit, reading, writing
from integr8s_idem.stores.sql.errors import MIGRATE, guarded
from integr8s_idem.stores.sql.rows import escaped, microseconds, unescaped
from integr8s_idem.stores.sql.schema import BUCKETS, buckets, outbox
from integr8s_idem.stores.sql.sqlite_engine import handler_turn

PAGE: Final = 500
"""Maximum number of rows that a relay reads at once."""

_row = outbox.c


async def put(connection: AsyncConnection, messages: Sequence[Message]) -> None:
    """Write `messages` in the transaction of `connection`.  Messages with the same key are published in this order."""
    await connection.execute(insert(outbox), [_row_of(message) for message in messages])


class SqlOutbox:
    """`Outbox` in the tables of the store."""

    def __init__(self, engine: AsyncEngine, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine.dialect.name)
        self._timeout = timeout
        self._arrived = asyncio.Event()

    def notice(self) -> None:
        """Report that a transaction with messages has committed."""
        self._arrived.set()

    def turn(self) -> AbstractAsyncContextManager[None]:
        return handler_turn(self._engine)

    async def arrived(self, at_most: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._arrived.wait()
        self._arrived.clear()

    async def claim(self, length: timedelta) -> Claim | None:
        """Claim buckets, as the protocol describes.

        `length` is truncated to microseconds, and counts from the statement that claims the buckets.
        """
        now, times = self._dialect.now, self._dialect.time_parameters()
        has_rows = exists().where(outbox.c.bucket == buckets.c.bucket)
        unclaimed = select(buckets.c.bucket).where(buckets.c.claimed_until <= now, has_rows).order_by(buckets.c.bucket)
        token = secrets.token_bytes(16)
        async with (
            self.turn(),
            guarded("claim", self._timeout, self._dialect.name),
            writing(self._engine) as connection,
        ):
            locking = unclaimed.with_for_update(skip_locked=True, of=buckets)
            found = tuple((await connection.scalars(locking, times)).all())
            if not found:
                return None
            until = now + microseconds(length)
            await connection.execute(self._update_buckets(found).values(token=token, claimed_until=until), times)
            newest = select(_row.id).where(_row.bucket.in_(found)).order_by(_row.id.desc()).limit(1)
            last = await connection.scalar(newest)
        return Claim(token, found, last or 0)

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        wanted = (_row.bucket.in_(claim.buckets), _row.id > after, _row.id <= claim.last, _row.topic.not_in(besides))
        query = select(outbox).where(*wanted).order_by(_row.id).limit(PAGE)
        async with (
            guarded("read", self._timeout, self._dialect.name),
            autocommit(self._engine, reads_only=True) as connection,
        ):
            return [_waiting(row) for row in await connection.execute(query)]

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        now, times = self._dialect.now, self._dialect.time_parameters()
        claimed = self._update_buckets(claim.buckets).where(buckets.c.token == claim.token)
        async with (
            self.turn(),
            guarded("done", self._timeout, self._dialect.name),
            writing(self._engine) as connection,
        ):
            if ids:
                # These are published, even if another relay owns the bucket by now.
                await connection.execute(self._delete_rows(sorted(ids)))
            extended = await connection.execute(claimed.values(claimed_until=now + microseconds(length)), times)
            return bool(extended.rowcount == len(claim.buckets))

    def _update_buckets(self, found: Sequence[int]) -> Update:
        change = update(buckets).where(buckets.c.bucket.in_(found))
        return change.with_hint(self._dialect.primary_key_hint) if self._dialect.primary_key_hint else change

    def _delete_rows(self, ids: Sequence[int]) -> Executable:
        if not self._dialect.primary_key_hint:
            return delete(outbox).where(_row.id.in_(ids))
        # With IN, MariaDB scans the whole table and waits for rows of open transactions.
        values, name = " UNION ALL ".join(f"SELECT {int(row_id)}" for row_id in ids), outbox.name
        return text(
            f"DELETE {name} FROM (SELECT NULL AS id FROM DUAL WHERE FALSE UNION ALL {values}) AS published "  # noqa: S608  # integers
            f"STRAIGHT_JOIN {name} {self._dialect.primary_key_hint} ON {name}.id = published.id"
        )

    async def check(self) -> None:
        count = select(func.count()).select_from(buckets).where(buckets.c.bucket.in_(range(BUCKETS)))
        async with guarded("start", self._timeout, self._dialect.name), reading(self._engine) as connection:
            await connection.execute(select(outbox.c.id).limit(1))
            found = (await connection.execute(count)).scalar_one()
        if found < BUCKETS:
            reason = (
                f"{BUCKETS - found} of the {BUCKETS} rows of {buckets.name} are missing, so their events "
                f"are never published; {MIGRATE}"
            )
            raise StoreConfigurationError("start", reason, Code.SCHEMA_MISSING)

    async def count(self) -> int:
        async with (
            guarded("count", self._timeout, self._dialect.name),
            autocommit(self._engine, reads_only=True) as connection,
        ):
            return int((await connection.execute(select(func.count()).select_from(outbox))).scalar_one())

    async def tried(self) -> None:
        row = _row_of(Message("doctor", None, b"", [], secrets.token_hex(16), "doctor"))
        inserted = select(_row.id).where(_row.bucket == row["bucket"], _row.event_id == row["event_id"])
        unchanged = self._update_buckets([row["bucket"]]).values(claimed_until=buckets.c.claimed_until)
        async with guarded("try", self._timeout, self._dialect.name), self._engine.connect() as connection:
            await connection.execute(insert(outbox), [row])
            await connection.execute(unchanged)
            await connection.execute(self._delete_rows((await connection.scalars(inserted)).all()))
            await connection.rollback()


def _row_of(message: Message) -> dict[str, Any]:
    pairs = [[name, base64.b64encode(value).decode()] for name, value in message.headers]
    return {
        "bucket": zlib.crc32(message.key or message.topic.encode()) % BUCKETS,
        "event_id": escaped(message.event_id),
        "event_type": message.event_type,
        "topic": message.topic,
        "message_key": message.key,
        "value": message.value,
        "headers": json.dumps(pairs).encode(),
    }


def _waiting(row: Any) -> Waiting:
    """Read a row.  A corrupt row still has the topic and key, so that it blocks later messages of its key."""
    topic, key = str(row.topic), _key_of(row)
    try:
        value, event_id = bytes(memoryview(row.value)), unescaped(row.event_id)
        return Waiting(row.id, Message(topic, key, value, _headers(row), event_id, row.event_type))
    except _UNREADABLE as error:
        fault = f"its columns do not hold a valid message ({type(error).__name__}: {error})"
        return Waiting(row.id, Message(topic, key, b"", [], str(row.event_id), str(row.event_type)), fault)


_UNREADABLE: Final = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Errors raised by values that this code never writes."""


def _key_of(row: Any) -> bytes | None:
    key = row.message_key
    return key if key is None or isinstance(key, bytes) else str(key).encode()


def _headers(row: Any) -> list[tuple[str, bytes]]:
    headers = [(name, base64.b64decode(value)) for name, value in json.loads(bytes(row.headers))]
    if not all(isinstance(name, str) for name, _ in headers):
        raise TypeError("the name of a header is not text")
    return headers
