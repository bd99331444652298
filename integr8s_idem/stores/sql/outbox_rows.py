"""Rows of the outbox: how messages are written and read."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Insert, insert, text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.events import Message
from integr8s_idem.stores.outbox import Waiting
from integr8s_idem.stores.sql.dialects import Dialect, dialect_of
from integr8s_idem.stores.sql.rows import escaped, unescaped
from integr8s_idem.stores.sql.schema import BUCKETS, outbox

CHANNEL: Final = "integr8s_idem_outbox"
"""PostgreSQL notifies this channel when a transaction that wrote messages has committed."""


async def put(connection: AsyncConnection, messages: Sequence[Message]) -> None:
    """Write `messages` in the transaction of `connection`.  Messages with the same key are published in this order."""
    await connection.execute(*insertion(connection.dialect.name, messages))


def put_with_hint(connection: Connection, messages: Sequence[Message]) -> None:
    """Write `messages` as `put`, and make PostgreSQL notify the relays of all processes after the commit."""
    connection.execute(*insertion(connection.dialect.name, messages))
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_notify('{CHANNEL}', '')"))


def insertion(kind: str, messages: Sequence[Message]) -> tuple[Insert, list[dict[str, Any]]]:
    """Return the statement that writes `messages` into a `kind` of database, and its parameters."""
    dialect = dialect_of(kind)
    return insert(outbox).values(created_at=dialect.now), [parameters_of(message, dialect) for message in messages]


def parameters_of(message: Message, dialect: Dialect) -> dict[str, Any]:
    """Return the parameters of `insertion` for a message."""
    pairs = [[name, base64.b64encode(value).decode()] for name, value in message.headers]
    return {
        "bucket": zlib.crc32(message.key or message.topic.encode()) % BUCKETS,
        "event_id": escaped(message.event_id),
        "event_type": message.event_type,
        "topic": message.topic,
        "message_key": message.key,
        "value": message.value,
        "headers": json.dumps(pairs).encode(),
        **dialect.time_parameters(),
    }


def waiting(row: Any) -> Waiting:
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
