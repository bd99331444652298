"""The tables, for all databases.

Times are the database's own, in microseconds since 1970, UTC: a number that every database has, that sorts, and that
fences are made of.  Texts that come from elsewhere are ASCII with Python's escapes.  `status` is 1 processing,
2 completed, 3 failed; `previous` is 0 none, 1 released, 2 lapsed.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)

VERSION: Final = 1
"""Of the schema that this code reads and writes."""

PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

BUCKETS: Final = 16
"""Of the outbox: as many relays can share the work."""

metadata: Final = MetaData()
"""All tables of the store; hand it to Alembic beside your own."""

_KEY: Final = String(255).with_variant(String(255, collation="C"), "postgresql")
"""Compared byte for byte, and read by prefix from the primary key's index."""

_ID: Final = BigInteger().with_variant(Integer, "sqlite")
"""Counted up by the database; SQLite does so for an INTEGER only, which has 64 bits there."""

records: Final = Table(
    "idempotency_records",
    metadata,
    Column("key", _KEY, primary_key=True),
    Column("status", SmallInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("token", LargeBinary(16), nullable=False),
    Column("lease_until", BigInteger, comment="null once released or settled"),
    Column("expires_at", BigInteger, nullable=False),
    Column("settled_at", BigInteger),
    Column("previous", SmallInteger, nullable=False),
    Column("fingerprint", LargeBinary(16)),
    Column("owner", Text, nullable=False),
    Column("trace", LargeBinary(24)),
    Column("result", LargeBinary),
    Column("content_type", Text),
    Column("result_dropped", Boolean, nullable=False),
    Column("error", Text, nullable=False),
    Index("idempotency_records_expires_at", "expires_at"),
)
"""One row a key.  A row whose `expires_at` has passed is as good as absent; purging takes it away."""

outbox: Final = Table(
    "idempotency_outbox",
    metadata,
    Column("id", _ID, primary_key=True, autoincrement=True),
    Column("bucket", SmallInteger, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("event_type", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("message_key", LargeBinary),
    Column("value", LargeBinary, nullable=False),
    Column("headers", LargeBinary, nullable=False, comment="JSON: pairs of a name and Base64"),
    Index("idempotency_outbox_bucket", "bucket", "id"),
)
"""Events that wait to be published; a row goes when the broker has confirmed it."""

buckets: Final = Table(
    "idempotency_outbox_buckets",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("token", LargeBinary(16), nullable=False),
    Column("claimed_until", BigInteger, nullable=False),
)
"""Who publishes what: the events of one key are in one bucket, which one relay at a time has claimed."""

store: Final = Table(
    "idempotency_store",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("identity", String(64), nullable=False),
    Column("seen_at", BigInteger, nullable=False),
)
"""One row: the version of the schema, what names these data, and when somebody last looked whether it takes writes."""
