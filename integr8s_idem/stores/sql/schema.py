"""The tables of the store, for all databases.

Times come from the clock of the database, in microseconds since 1970, UTC: an integer that every database supports and
sorts, and that fences are derived from.  External text is stored as ASCII with Python's escapes.  `status` is
1 processing, 2 completed, 3 failed; `previous` is 0 none, 1 released, 2 lapsed; `lease_until` is null once released or
settled; `lapsed` counts attempts whose lease expired, `lapsed_alone` those of them that ran alone in their process, as
`alone` says of the current one.  These three columns are valid only if `history_fence` equals `fence`: workers of
version 1 take a row over without updating them.  `previous_trace` is the trace of the attempt that the current one took
the row over from; null if there was none.  `headers` is JSON, pairs of a name and Base64.  `created_at` of a message is
0 if a worker of version 3 or earlier wrote it.

A row in processing whose `token` is 16 zero bytes belongs to nobody: the work is scheduled, and to be tried again when
`lease_until` has passed.  Later versions may add columns with defaults.

This is the current schema.  The migrations that create each version are in version_*.sql.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    VARBINARY,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

VERSION: Final = 4
"""Version of the schema that this code reads and writes."""

COMPATIBLE_VERSION: Final = 1
"""The oldest version of the code that can work with this schema, stored in `idempotency_store`.

Workers of that version continue while a database is migrated.
"""

PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

BUCKETS: Final = 16
"""Number of buckets of the outbox, and so the maximum number of relays that can share the work."""

metadata: Final = MetaData()
"""All tables of the store, for Alembic's `target_metadata`."""


class _Bytes(TypeDecorator[str]):
    """Text stored as bytes: no collation common to all versions of MySQL and MariaDB compares all characters."""

    impl = VARBINARY
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return None if value is None else value.encode()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return None if value is None else value.decode()


def _for_mysql(type_: TypeEngine[Any], variant: TypeEngine[Any]) -> TypeEngine[Any]:
    return type_.with_variant(variant, "mysql", "mariadb")


_KEY: Final = _for_mysql(String(255).with_variant(String(255, collation="C"), "postgresql"), _Bytes(1020))
"""Compared bytewise, so that the index of the primary key supports prefix scans."""

_ID: Final = BigInteger().with_variant(Integer, "sqlite")
"""Auto-incremented; SQLite supports that only for INTEGER, which has 64 bits there."""


class _UncheckedBinary(LargeBinary):
    """Returns values of SQLite unconverted, so that a value of another type corrupts only its row, not the batch."""

    def result_processor(self, dialect: Dialect, coltype: object) -> None:
        return None


def _bytes(length: int) -> TypeEngine[Any]:
    """Return the type of a short byte string, stored in the row."""
    return _for_mysql(LargeBinary(length).with_variant(_UncheckedBinary(length), "sqlite"), VARBINARY(length))


_BODY: Final = _for_mysql(LargeBinary().with_variant(_UncheckedBinary(), "sqlite"), mysql.LONGBLOB())
"""A byte string of any length."""

_LONG_TEXT: Final = _for_mysql(Text(), mysql.MEDIUMTEXT())
"""Text of any length; MySQL's TEXT is limited to 64 KiB."""

_NAME: Final = _for_mysql(Text(), mysql.TEXT(charset="utf8mb4"))
"""A short text in any script, regardless of the default charset of the database."""

_INNODB: Final[dict[str, Any]] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}

records: Final = Table(
    "idempotency_records",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("status", SmallInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("token", _bytes(16), nullable=False),
    Column("lease_until", BigInteger),
    Column("expires_at", BigInteger, nullable=False),
    Column("settled_at", BigInteger),
    Column("previous", SmallInteger, nullable=False),
    Column("fingerprint", _bytes(16)),
    Column("owner", _LONG_TEXT, nullable=False),
    Column("trace", _bytes(24)),
    Column("result", _BODY),
    Column("content_type", _LONG_TEXT),
    Column("result_dropped", Boolean, nullable=False),
    Column("error", _LONG_TEXT, nullable=False),
    Column("lapsed", Integer, nullable=False, server_default=text("0")),
    Column("lapsed_alone", Integer, nullable=False, server_default=text("0")),
    Column("alone", Boolean, nullable=False, server_default=false()),
    Column("history_fence", BigInteger, nullable=False, server_default=text("0")),
    Column("previous_trace", _bytes(24)),
    Index("idempotency_records_expires_at", "expires_at"),
    **_INNODB,
)
"""One row per key.  A row whose `expires_at` has passed counts as absent; the purge deletes it."""

outbox: Final = Table(
    "idempotency_outbox",
    metadata,
    Column("id", _ID, primary_key=True, autoincrement=True),
    Column("bucket", SmallInteger, nullable=False),
    Column("event_id", _LONG_TEXT, nullable=False),
    Column("event_type", _NAME, nullable=False),
    Column("topic", _NAME, nullable=False),
    Column("message_key", _BODY),
    Column("value", _BODY, nullable=False),
    Column("headers", _BODY, nullable=False),
    Column("created_at", BigInteger, nullable=False, server_default=text("0")),
    Index("idempotency_outbox_bucket", "bucket", "id"),
    **_INNODB,
)
"""Events to publish; a row is deleted once the broker has acknowledged the event."""

buckets: Final = Table(
    "idempotency_outbox_buckets",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("token", _bytes(16), nullable=False),
    Column("claimed_until", BigInteger, nullable=False),
    **_INNODB,
)
"""Which relay publishes which events: the events of one key are in one bucket, claimed by one relay at a time."""

store: Final = Table(
    "idempotency_store",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    **_INNODB,
)
"""One row: the version of the schema, the identity of the store, and the time of the last health check."""
