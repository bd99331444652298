"""Migrate a database to the schema version of this code.

Each migration is an SQL file that never changes after its release.  The tables of schema.py are the current ones.  The
database stores the oldest version of the code that can work with it, and its columns show how far it has been migrated:
workers of the previous version continue during a migration that only adds columns with defaults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from typing import Final

from sqlalchemy import inspect, select, text, update
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import ApplicationError, StoreConfigurationError, StoreUnavailableError
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.engine import reading, writing
from integr8s_idem.stores.sql.errors import ConcurrentMigrationError, guarded
from integr8s_idem.stores.sql.health import NO_VERSION, check_version, new_identity
from integr8s_idem.stores.sql.schema import BUCKETS, COMPATIBLE_VERSION, VERSION, buckets, store
from integr8s_idem.stores.sql.schema_completeness import (
    missing_ddl,
    missing_indexes,
    missing_tables,
    version_by_columns,
)

_EMPTY: Final = {"mariadb": "x''", "mysql": "x''", "postgresql": "''::bytea", "sqlite": "x''"}
"""Literal of an empty byte string."""

_LOCK: Final = 0x1DE3_0001
"""Key of the advisory lock that serializes migrations."""

_UNCLAIMED: Final = {"token": b"", "claimed_until": 0}

_CREATED: Final = re.compile(r"^CREATE (TABLE|INDEX) (\w+)(?: ON (\w+))?", re.MULTILINE)
"""The table or index that a statement creates, and the table of an index."""

_ADDED: Final = re.compile(r"^ALTER TABLE (\w+) ADD COLUMN (\w+)", re.MULTILINE)
"""The table and column that a statement adds."""

_TIMEOUT: Final = timedelta(minutes=5)
"""Long, because a migration may rewrite a large table."""


@dataclass(frozen=True)
class Migration:
    """A migration to `version` of the schema."""

    version: int
    description: str

    def steps(self, kind: str) -> list[str]:
        """Return its statements for a `kind` of database."""
        name = f"version_{self.version}.{dialect_of(kind).name}.sql"
        written = files(__package__).joinpath(name).read_text("utf-8")
        return [step.strip() for step in written.split(";\n") if step.strip()]


MIGRATIONS: Final = (
    Migration(1, "add records and the outbox"),
    Migration(2, "count lapsed attempts in records"),
    Migration(3, "keep the trace of the previous attempt in records"),
    Migration(4, "note when messages of the outbox were written"),
)


async def migrate(engine: AsyncEngine) -> list[Migration]:
    """Migrate the database to the version of this code, and recreate missing tables and indexes.

    Returns the steps done, in order.  Any number of processes may call this concurrently.

    Raises:
        StoreConfigurationError: The schema is newer than this code.
    """
    if await _is_current(engine):
        return []
    if dialect_of(engine.dialect.name).ddl_commits:
        return await _migrate_under_lock(engine)
    async with guarded("migrate", _TIMEOUT, engine.dialect.name), writing(engine) as connection:
        return await connection.run_sync(migrate_in)


async def _migrate_under_lock(engine: AsyncEngine) -> list[Migration]:
    """Hold a lock of the connection: a lock of the transaction would end with the first DDL statement."""
    name = {"name": f"integr8s-idem.{_LOCK}", "wait": int(_TIMEOUT.total_seconds())}
    async with guarded("migrate", _TIMEOUT, engine.dialect.name), engine.connect() as connection:
        taken = await connection.scalar(text("SELECT GET_LOCK(CONCAT(:name, '.', SHA1(DATABASE())), :wait)"), name)
        if taken != 1:
            raise StoreUnavailableError("migrate", "another process has been migrating the database for too long")
        try:
            done = await connection.run_sync(migrate_in)
            # The process that gets the lock next must see the result.
            await connection.commit()
        finally:
            await connection.rollback()
            await connection.execute(text("SELECT RELEASE_LOCK(CONCAT(:name, '.', SHA1(DATABASE())))"), name)
    return done


async def _is_current(engine: AsyncEngine) -> bool:
    # Each worker checks its SQLite file at its start; that must not wait for writers or block them.
    try:
        async with guarded("migrate", _TIMEOUT, engine.dialect.name), reading(engine) as connection:
            return await connection.run_sync(lambda one: version_of(one) == VERSION and not _missing(one))
    except ConcurrentMigrationError:
        return False  # look again when the lock is free


async def check_schema(engine: AsyncEngine, operation: str, timeout: timedelta = _TIMEOUT) -> None:
    """Check that the database has the schema version of this code; an error names `operation`.

    Raises:
        StoreConfigurationError: The schema is missing, older or newer.
        StoreUnavailableError: The database does not respond.
    """
    async with guarded(operation, timeout, engine.dialect.name), reading(engine) as connection:
        found = await connection.run_sync(version_of)
    if found == 0:
        raise StoreConfigurationError(operation, NO_VERSION, Code.SCHEMA_MISSING)
    check_version(found, operation)


def migrate_in(connection: Connection, up_to: int = VERSION) -> list[Migration]:
    """Migrate like `migrate`, in a transaction of the caller, such as that of an Alembic revision.

    Returns the steps done, in order.

    Args:
        connection: A synchronous SQLAlchemy connection, such as `op.get_bind()` returns.
        up_to: The version to stop at, so that an Alembic revision never changes its effect.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    found = version_of(connection)
    if found > VERSION:
        check_version(found, "migrate")
    todo = [migration for migration in MIGRATIONS if found < migration.version <= up_to]
    for migration in todo:
        for step in migration.steps(connection.dialect.name):
            if not _is_done(connection, step):
                connection.exec_driver_sql(step)
    if todo:
        _write_version(connection, min(todo[-1].version, COMPATIBLE_VERSION))
        _add_buckets(connection)
    if max(found, up_to) == VERSION and (missing := _missing(connection)):
        _restore(connection)
        todo.append(Migration(VERSION, f"recreate missing {', '.join(missing)}"))
    return todo


def _write_version(connection: Connection, version: int) -> None:
    times = dialect_of(connection.dialect.name).time_parameters()
    if connection.execute(update(store).values(version=version), times).rowcount == 0:
        row = {"id": 1, "version": version, "identity": new_identity(), "seen_at": 0}
        connection.execute(store.insert(), row)


def _restore(connection: Connection) -> None:
    for step in missing_ddl(connection):
        connection.execute(step)
    _add_buckets(connection)


def _missing(connection: Connection) -> list[str]:
    """Return the names of missing tables, indexes and rows, for a database of the current version."""
    tables, indexes = missing_tables(connection), missing_indexes(connection)
    rows = [f"rows of {buckets.name}"] if buckets.name not in tables and _absent_buckets(connection) else []
    return [*tables, *indexes, *rows]


def _absent_buckets(connection: Connection) -> list[int]:
    existing = set(connection.scalars(select(buckets.c.bucket)))
    return [bucket for bucket in range(BUCKETS) if bucket not in existing]


def _add_buckets(connection: Connection) -> None:
    if missing := [{"bucket": bucket, **_UNCLAIMED} for bucket in _absent_buckets(connection)]:
        connection.execute(buckets.insert(), missing)


def _is_done(connection: Connection, step: str) -> bool:
    """Whether the table, index or column exists, after an interrupted migration or if `metadata` created it."""
    created, added, inspector = _CREATED.search(step), _ADDED.search(step), inspect(connection)
    if added is not None:
        return added[2] in {column["name"] for column in inspector.get_columns(added[1])}
    if created is None:
        return False
    kind, name, table = created.groups()
    if kind == "TABLE":
        return inspector.has_table(name)
    return any(index["name"] == name for index in inspector.get_indexes(table))


def version_of(connection: Connection) -> int:
    """Return the version of the schema; 0 if there is none."""
    if not inspect(connection).has_table(store.name):
        return 0
    found: int = connection.execute(select(store.c.version).where(store.c.id == 1)).scalar_one_or_none() or 0
    return version_by_columns(connection) if found == COMPATIBLE_VERSION else found


def ddl(dialect: Dialect, since: int = 0) -> str:
    """Return the migrations as SQL, to apply them manually.

    Args:
        since: The current version of the schema; 0 if there is none.

    Raises:
        ApplicationError: `since` is not an earlier version.
    """
    if not 0 <= since < VERSION:
        raise ApplicationError(
            f"cannot migrate the schema from version {since} to {VERSION}, the version of this program: "
            f"use a version from 0 (no tables) to {VERSION - 1}"
        )
    parts = []
    for migration in MIGRATIONS[since:]:
        parts.append(f"-- version {migration.version}: {migration.description}")
        parts += [f"{step};" for step in migration.steps(dialect.name)]
    parts += _first_rows(dialect) if since == 0 else []
    return "\n".join(parts) + "\n"


def _first_rows(dialect: Dialect) -> list[str]:
    identity = dialect_of(dialect.name).identity_sql
    row = f"1, {COMPATIBLE_VERSION}, {identity}, 0"
    rows = ", ".join(f"({bucket}, {_EMPTY[dialect.name]}, 0)" for bucket in range(BUCKETS))
    return [
        f"INSERT INTO {store.name} (id, version, identity, seen_at) VALUES ({row});",  # noqa: S608  # contains no input
        f"INSERT INTO {buckets.name} (bucket, token, claimed_until) VALUES {rows};",  # noqa: S608  # contains no input
    ]
