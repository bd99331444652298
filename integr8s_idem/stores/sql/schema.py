"""The tables, for all databases.

Times are the database's own, in microseconds since 1970, UTC: a number that every database has, that sorts, and that
fences are made of.  Texts that come from elsewhere are ASCII with Python's escapes.  `status` is 1 processing,
2 completed, 3 failed; `previous` is 0 none, 1 released, 2 lapsed; `lease_until` is null once released or settled;
`lapsed` counts attempts whose lease ended without a word, `lapsed_alone` those of them that ran alone in their process,
as `alone` says of the present one.  These three describe the attempt with the fence `history_fence` and are ignored in
a row with another fence: workers of version 1 take a row over and leave them as they were.  `headers` is JSON, pairs of
a name and Base64.

This is the schema of today.  Those of each version, as migrations make them, are in version_*.sql.
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

VERSION: Final = 2
"""Of the schema that this code reads and writes."""

COMPATIBLE_VERSION: Final = 1
"""The oldest version of the code that can work with this schema: the number in `idempotency_store`.

Workers of that version go on while a database is migrated.
"""

PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

BUCKETS: Final = 16
"""Of the outbox: as many relays can share the work."""

metadata: Final = MetaData()
"""All tables of the store; for Alembic to know them, beside your own."""


class _Bytes(TypeDecorator[str]):
    """Text as bytes: every collation that all versions of MySQL and MariaDB know ignores case, or spaces at the end."""

    impl = VARBINARY
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return None if value is None else value.encode()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return None if value is None else value.decode()


def _of_mysql(type_: TypeEngine[Any], theirs: TypeEngine[Any]) -> TypeEngine[Any]:
    return type_.with_variant(theirs, "mysql", "mariadb")


_KEY: Final = _of_mysql(String(255).with_variant(String(255, collation="C"), "postgresql"), _Bytes(1020))
"""Compared byte for byte, and read by prefix from the primary key's index."""

_ID: Final = BigInteger().with_variant(Integer, "sqlite")
"""Counted up by the database; SQLite does so for an INTEGER only, which has 64 bits there."""


class _AsItIs(LargeBinary):
    """SQLite gives back whatever is there: where that are no bytes, one row is damaged, and not the batch."""

    def result_processor(self, dialect: Dialect, coltype: object) -> None:
        return None


def _bytes(length: int) -> TypeEngine[Any]:
    """A few bytes, within the row."""
    return _of_mysql(LargeBinary(length).with_variant(_AsItIs(length), "sqlite"), VARBINARY(length))


_BODY: Final = _of_mysql(LargeBinary().with_variant(_AsItIs(), "sqlite"), mysql.LONGBLOB())
"""As many bytes as a result may have."""

_STORY: Final = _of_mysql(Text(), mysql.MEDIUMTEXT())
"""A text of any length; MySQL's own TEXT ends at 64 KiB."""

_NAME: Final = _of_mysql(Text(), mysql.TEXT(charset="utf8mb4"))
"""A text of a few words, in any script, whatever the database's own charset."""

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
    Column("owner", _STORY, nullable=False),
    Column("trace", _bytes(24)),
    Column("result", _BODY),
    Column("content_type", _STORY),
    Column("result_dropped", Boolean, nullable=False),
    Column("error", _STORY, nullable=False),
    Column("lapsed", Integer, nullable=False, server_default=text("0")),
    Column("lapsed_alone", Integer, nullable=False, server_default=text("0")),
    Column("alone", Boolean, nullable=False, server_default=false()),
    Column("history_fence", BigInteger, nullable=False, server_default=text("0")),
    Index("idempotency_records_expires_at", "expires_at"),
    **_INNODB,
)
"""One row a key.  A row whose `expires_at` has passed is as good as absent; purging takes it away."""

outbox: Final = Table(
    "idempotency_outbox",
    metadata,
    Column("id", _ID, primary_key=True, autoincrement=True),
    Column("bucket", SmallInteger, nullable=False),
    Column("event_id", _STORY, nullable=False),
    Column("event_type", _NAME, nullable=False),
    Column("topic", _NAME, nullable=False),
    Column("message_key", _BODY),
    Column("value", _BODY, nullable=False),
    Column("headers", _BODY, nullable=False),
    Index("idempotency_outbox_bucket", "bucket", "id"),
    **_INNODB,
)
"""Events that wait to be published; a row goes when the broker has confirmed it."""

buckets: Final = Table(
    "idempotency_outbox_buckets",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("token", _bytes(16), nullable=False),
    Column("claimed_until", BigInteger, nullable=False),
    **_INNODB,
)
"""Who publishes what: the events of one key are in one bucket, which one relay at a time has claimed."""

store: Final = Table(
    "idempotency_store",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    **_INNODB,
)
"""One row: the version of the schema, what names these data, and when somebody last looked whether it takes writes."""
