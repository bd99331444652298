"""The tables, for all databases.

Times are the database's own, in microseconds since 1970, UTC: a number that every database has, that sorts, and that
fences are made of.  Texts that come from elsewhere are ASCII with Python's escapes.  `status` is 1 processing,
2 completed, 3 failed; `previous` is 0 none, 1 released, 2 lapsed.
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
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

VERSION: Final = 1
"""Of the schema that this code reads and writes."""

PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

metadata: Final = MetaData()
"""All tables of the store; hand it to Alembic beside your own."""


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


def _bytes(length: int) -> TypeEngine[Any]:
    """A few bytes, within the row."""
    return _of_mysql(LargeBinary(length), VARBINARY(length))


_BODY: Final = _of_mysql(LargeBinary(), mysql.LONGBLOB())
"""As many bytes as a result may have."""

_STORY: Final = _of_mysql(Text(), mysql.MEDIUMTEXT())
"""A text of any length; MySQL's own TEXT ends at 64 KiB."""

records: Final = Table(
    "idempotency_records",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("status", SmallInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("token", _bytes(16), nullable=False),
    Column("lease_until", BigInteger, comment="null once released or settled"),
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
    Index("idempotency_records_expires_at", "expires_at"),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)
"""One row a key.  A row whose `expires_at` has passed is as good as absent; purging takes it away."""

store: Final = Table(
    "idempotency_store",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)
"""One row: the version of the schema, what names these data, and when somebody last looked whether it takes writes."""
