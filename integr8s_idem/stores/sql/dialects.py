"""Differences between the supported databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sqlalchemy import BigInteger, ColumnElement, bindparam, literal_column
from sqlalchemy.dialects import mysql, postgresql, sqlite

from integr8s_idem._util.wall_clock import wall_time_ns
from integr8s_idem.errors import StoreConfigurationError

Changes: TypeAlias = dict[str, ColumnElement[Any]]
"""New values by column, in an order in which they can be assigned one after the other."""


@dataclass(frozen=True)
class Dialect:
    """A supported kind of database."""

    name: str
    insert: Callable[[Any], Any]
    """Builds an INSERT that can handle existing rows."""
    upsert: Callable[[Any, ColumnElement[Any], Callable[[Any], Changes]], Any]
    """Adds the changes to an existing row, as a function of the row to insert; takes the INSERT and the key column."""
    now: ColumnElement[int]
    """The database's clock, read once per statement: microseconds since 1970."""
    identity_sql: str
    """SQL expression that generates the identity of a store, for tables created manually."""
    size_sql: str
    """Query for the approximate number of records, answered at once; null or -1 if unknown."""
    bytes_sql: Callable[[bytes], str] = lambda value: f"x'{value.hex()}'"
    """Returns bytes as a constant."""
    time_parameters: Callable[[], dict[str, int]] = field(default=dict)
    """Returns the parameters of `now`; empty if the clock is the database's."""
    supports_returning: bool = True
    """Whether INSERT and UPDATE support RETURNING; if not, the rows are read afterwards."""
    supports_arrays: bool = False
    """Whether rows are passed as one array parameter per column; if not, each row has its own parameters."""
    indexes_tuples: bool = True
    """Whether a lookup by a tuple of columns uses the index on the first column."""
    primary_key_hint: str = ""
    """Hint to find rows by primary key, for databases that lock every row they read."""
    expiry_index_hint: str = ""
    """Hint to find rows by expiry, for the same databases."""
    continues_after_abort: bool = False
    """Whether the database accepts statements after it aborted a transaction, and runs them in a new one."""
    reuses_ids: bool = False
    """Whether a new row may get the id of a deleted one."""
    ddl_commits: bool = False
    """Whether DDL commits the transaction, so that a migration can be interrupted halfway."""


def dialect_of(name: str) -> Dialect:
    """Return the dialect that SQLAlchemy calls `name`.

    Raises:
        StoreConfigurationError: This kind of database is not supported.
    """
    found = _DIALECTS.get(name)
    if found is None:
        raise StoreConfigurationError(
            "start", f"{name} databases are not supported; use one of {', '.join(sorted(_DIALECTS))}"
        )
    return found


def _local_time() -> dict[str, int]:
    # SQLite runs in this process and uses the same clock, but reports it only in milliseconds.
    return {"now": wall_time_ns() // 1_000}


def _on_conflict(insert: Any, key: ColumnElement[Any], changes: Callable[[Any], Changes]) -> Any:
    return insert.on_conflict_do_update(index_elements=[key], set_=changes(insert.excluded))


def _on_duplicate_key(insert: Any, _key: ColumnElement[Any], changes: Callable[[Any], Changes]) -> Any:
    # As pairs, because the order matters: each assignment sees the values written by earlier ones.
    return insert.on_duplicate_key_update(list(changes(insert.inserted).items()))


_MYSQL: Final = Dialect(
    name="mysql",
    insert=mysql.insert,
    upsert=_on_duplicate_key,
    # The start of the statement in UTC; NOW() uses the time zone of the session.
    now=literal_column("timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6))", BigInteger),
    identity_sql="md5(uuid())",
    size_sql="SELECT table_rows FROM information_schema.tables WHERE table_schema = database() "
    "AND table_name = 'idempotency_records'",
    supports_returning=False,
    indexes_tuples=False,
    # Without the hint, MySQL scans small tables and locks all rows in its own order, and batches deadlock.
    primary_key_hint="FORCE INDEX (PRIMARY)",
    expiry_index_hint="FORCE INDEX (idempotency_records_expires_at)",
    continues_after_abort=True,
    ddl_commits=True,
)

_DIALECTS: Final = {
    "mariadb": _MYSQL,
    "mysql": _MYSQL,
    "postgresql": Dialect(
        name="postgresql",
        insert=postgresql.insert,
        upsert=_on_conflict,
        now=literal_column("(extract(epoch from statement_timestamp()) * 1000000)::bigint", BigInteger),
        identity_sql="md5(random()::text)",
        size_sql="SELECT reltuples::bigint FROM pg_class WHERE oid = 'idempotency_records'::regclass",
        # E fixes the meaning of the backslash, which otherwise depends on standard_conforming_strings.
        bytes_sql=lambda value: rf"E'\\x{value.hex()}'::bytea",
        supports_arrays=True,
    ),
    "sqlite": Dialect(
        name="sqlite",
        insert=sqlite.insert,
        upsert=_on_conflict,
        now=bindparam("now", type_=BigInteger),
        identity_sql="lower(hex(randomblob(16)))",
        size_sql="SELECT max(rowid) FROM idempotency_records",
        time_parameters=_local_time,
        reuses_ids=True,
    ),
}
