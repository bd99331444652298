"""What differs between the databases, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sqlalchemy import BigInteger, ColumnElement, bindparam, literal_column
from sqlalchemy.dialects import mysql, postgresql, sqlite

from integr8s_idem._util.wall_clock import wall_time_ns
from integr8s_idem.errors import StoreConfigurationError

Changes: TypeAlias = dict[str, ColumnElement[Any]]
"""New values by column, in the order in which they may be written one after the other."""


@dataclass(frozen=True)
class Dialect:
    """One kind of database."""

    name: str
    insert: Callable[[Any], Any]
    """An INSERT that can say what to do about a row that is there already."""
    upsert: Callable[[Any, ColumnElement[Any], Callable[[Any], Changes]], Any]
    """An INSERT, the key's column, and what becomes of a row that is there, as a function of the row that is not."""
    now: ColumnElement[int]
    """The database's clock, read once per statement: microseconds since 1970."""
    identity: str
    """What makes a name for a store, where its tables are made by hand."""
    size: str
    """A question for about how many records there are, which the database answers at once; null or -1: it cannot."""
    times: Callable[[], dict[str, int]] = field(default=dict)
    """Parameters that `now` needs: none where the clock is the database's."""
    returns: bool = True
    """Whether a statement that writes can answer with the rows that it wrote; else they are read behind it."""
    arrays: bool = False
    """Whether rows of parameters are told as one array a column; else a statement has as many as there are rows."""
    finds_tuples: bool = True
    """Whether rows named by several columns together are found by the index on the first."""
    by_key: str = ""
    """Says that a statement finds its rows by their keys, to a database that else locks whatever it looks at."""
    by_expiry: str = ""
    """The same of their expiry."""
    goes_on: bool = False
    """Whether a transaction that has been given up takes statements on, as a new one that nobody has begun."""
    ddl_commits: bool = False
    """Whether a statement that makes a table ends the transaction: a migration can then stop half way."""


def dialect_of(name: str) -> Dialect:
    """The one that SQLAlchemy calls `name`.

    Raises:
        StoreConfigurationError: Records cannot be kept in such a database.
    """
    found = _DIALECTS.get(name)
    if found is None:
        raise StoreConfigurationError(
            "start", f"no store for {name} databases; there are {', '.join(sorted(_DIALECTS))}"
        )
    return found


def _this_machines_time() -> dict[str, int]:
    # SQLite runs in our process: its clock is ours, and what it tells of it has a resolution of a millisecond only.
    return {"now": wall_time_ns() // 1_000}


def _on_conflict(insert: Any, key: ColumnElement[Any], changes: Callable[[Any], Changes]) -> Any:
    return insert.on_conflict_do_update(index_elements=[key], set_=changes(insert.excluded))


def _on_duplicate_key(insert: Any, _key: ColumnElement[Any], changes: Callable[[Any], Changes]) -> Any:
    # In pairs, since the order matters here: each change sees what those before it have written.
    return insert.on_duplicate_key_update(list(changes(insert.inserted).items()))


_MYSQL: Final = Dialect(
    name="mysql",
    insert=mysql.insert,
    upsert=_on_duplicate_key,
    # Of the statement's start, and of no time zone: NOW() is of the session's.
    now=literal_column("timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6))", BigInteger),
    identity="md5(uuid())",
    size="SELECT table_rows FROM information_schema.tables WHERE table_schema = database() "
    "AND table_name = 'idempotency_records'",
    returns=False,
    finds_tuples=False,
    # Left to itself it reads a small table whole, and locks all of it, in an order of its own: batches then
    # wait for each other in a circle.
    by_key="FORCE INDEX (PRIMARY)",
    by_expiry="FORCE INDEX (idempotency_records_expires_at)",
    goes_on=True,
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
        identity="md5(random()::text)",
        size="SELECT reltuples::bigint FROM pg_class WHERE oid = 'idempotency_records'::regclass",
        arrays=True,
    ),
    "sqlite": Dialect(
        name="sqlite",
        insert=sqlite.insert,
        upsert=_on_conflict,
        now=bindparam("now", type_=BigInteger),
        identity="lower(hex(randomblob(16)))",
        size="SELECT max(rowid) FROM idempotency_records",
        times=_this_machines_time,
    ),
}
