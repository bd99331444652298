"""The schema's versions, in order: `migrate` brings a database to that of this code.

What a version adds is kept as SQL, in files that are never changed once they are out: the next version is a new
one.  The tables of schema.py are those of today.  The database names the oldest version of the code that can work with
it, and description by its columns how far it has been migrated: workers of the version before go on during a migration that
only adds columns with a default.
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
from integr8s_idem.stores.sql.errors import guarded
from integr8s_idem.stores.sql.health import NO_VERSION, check_version, new_identity
from integr8s_idem.stores.sql.schema import BUCKETS, COMPATIBLE_VERSION, VERSION, buckets, store
from integr8s_idem.stores.sql.schema_completeness import missing_columns, missing_indexes, missing_tables, missing_ddl

_EMPTY: Final = {"mariadb": "x''", "mysql": "x''", "postgresql": "''::bytea", "sqlite": "x''"}
"""No bytes."""

_LOCK: Final = 0x1DE3_0001
"""Number of the advisory lock under which PostgreSQL is migrated."""

_UNCLAIMED: Final = {"token": b"", "claimed_until": 0}

_MADE: Final = re.compile(r"^CREATE (TABLE|INDEX) (\w+)(?: ON (\w+))?", re.MULTILINE)
"""What a step makes: an index names its table besides."""

_ADDED: Final = re.compile(r"^ALTER TABLE (\w+) ADD COLUMN (\w+)", re.MULTILINE)
"""The table and the column of a step that adds one."""

_PATIENCE: Final = timedelta(minutes=5)
"""A migration may have to rewrite a large table."""


@dataclass(frozen=True)
class Migration:
    """What was done, or is to be, to come to this version."""

    version: int
    description: str

    def steps(self, kind: str) -> list[str]:
        """Statements in the SQL of a `kind` of database."""
        name = f"version_{self.version}.{dialect_of(kind).name}.sql"
        written = files(__package__).joinpath(name).read_text("utf-8")
        return [step.strip() for step in written.split(";\n") if step.strip()]


MIGRATIONS: Final = (
    Migration(1, "records, and events to be published"),
    Migration(2, "records count the attempts that lapsed"),
)


async def migrate(engine: AsyncEngine) -> list[Migration]:
    """Bring the database to the version of this code, and put back what of it is missing; what was done, in order.

    Any number of processes may ask at once.

    Raises:
        StoreConfigurationError: It is of a newer version than this code.
    """
    if await _is_current(engine):
        return []
    if dialect_of(engine.dialect.name).ddl_commits:
        return await _migrate_by_turns(engine)
    async with guarded("migrate", _PATIENCE, engine.dialect.name), writing(engine) as connection:
        return await connection.run_sync(migrate_in)


async def _migrate_by_turns(engine: AsyncEngine) -> list[Migration]:
    """Under a lock of the connection's: one of the transaction's would end with the first table."""
    name = {"name": f"integr8s-idem.{_LOCK}", "wait": int(_PATIENCE.total_seconds())}
    async with guarded("migrate", _PATIENCE, engine.dialect.name), engine.connect() as connection:
        taken = await connection.scalar(text("SELECT GET_LOCK(CONCAT(:name, '.', SHA1(DATABASE())), :wait)"), name)
        if taken != 1:
            raise StoreUnavailableError("migrate", "another process migrates the database, and takes long")
        try:
            done = await connection.run_sync(migrate_in)
            # Before the next one gets the lock: it must see what was done.
            await connection.commit()
        finally:
            await connection.rollback()
            await connection.execute(text("SELECT RELEASE_LOCK(CONCAT(:name, '.', SHA1(DATABASE())))"), name)
    return done


async def _is_current(engine: AsyncEngine) -> bool:
    # Each start of a worker asks for a file: those who only look must not wait for a writer, nor hold one up.
    async with guarded("migrate", _PATIENCE, engine.dialect.name), reading(engine) as connection:
        return await connection.run_sync(lambda one: version_of(one) == VERSION and not _missing(one))


async def check_schema(engine: AsyncEngine, operation: str, timeout: timedelta = _PATIENCE) -> None:
    """Refuse `operation` on a database that is not of this code's version.

    Raises:
        StoreConfigurationError: It is older or newer, or has no tables of ours that say so.
        StoreUnavailableError: It does not answer.
    """
    async with guarded(operation, timeout, engine.dialect.name), reading(engine) as connection:
        found = await connection.run_sync(version_of)
    if found == 0:
        raise StoreConfigurationError(operation, NO_VERSION, Code.SCHEMA_MISSING)
    check_version(found, operation)


def migrate_in(connection: Connection, up_to: int = VERSION) -> list[Migration]:
    """As `migrate`, in the same order, in a transaction of the caller's, such as that of a revision of Alembic.

    Args:
        connection: SQLAlchemy's own, as `op.get_bind()` gives it.
        up_to: The version to stop at, so that a revision does the same for ever.
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
        _put_back(connection)
        todo.append(Migration(VERSION, f"put back what was missing: {', '.join(missing)}"))
    return todo


def _write_version(connection: Connection, version: int) -> None:
    times = dialect_of(connection.dialect.name).time_parameters()
    if connection.execute(update(store).values(version=version), times).rowcount == 0:
        row = {"id": 1, "version": version, "identity": new_identity(), "seen_at": 0}
        connection.execute(store.insert(), row)


def _put_back(connection: Connection) -> None:
    for step in missing_ddl(connection):
        connection.execute(step)
    _add_buckets(connection)


def _missing(connection: Connection) -> list[str]:
    """What a database of our version lacks, by name."""
    tables, indexes = missing_tables(connection), missing_indexes(connection)
    rows = [f"rows of {buckets.name}"] if buckets.name not in tables and _absent_buckets(connection) else []
    return [*tables, *indexes, *rows]


def _absent_buckets(connection: Connection) -> list[int]:
    there = set(connection.scalars(select(buckets.c.bucket)))
    return [bucket for bucket in range(BUCKETS) if bucket not in there]


def _add_buckets(connection: Connection) -> None:
    if missing := [{"bucket": bucket, **_UNCLAIMED} for bucket in _absent_buckets(connection)]:
        connection.execute(buckets.insert(), missing)


def _is_done(connection: Connection, step: str) -> bool:
    """Whether its table, index or column is there: a migration stopped half way, or it was made by `metadata`."""
    made, added, found = _MADE.search(step), _ADDED.search(step), inspect(connection)
    if added is not None:
        return added[2] in {one["name"] for one in found.get_columns(added[1])}
    if made is None:
        return False
    what, name, table = made.groups()
    if what == "TABLE":
        return found.has_table(name)
    return any(one["name"] == name for one in found.get_indexes(table))


def version_of(connection: Connection) -> int:
    """The version of the schema that is there; 0 for none."""
    if not inspect(connection).has_table(store.name):
        return 0
    found: int = connection.execute(select(store.c.version).where(store.c.id == 1)).scalar_one_or_none() or 0
    if found == COMPATIBLE_VERSION and not missing_columns(connection):
        return VERSION
    return found


def ddl(dialect: Dialect, since: int = 0) -> str:
    """Migrations as SQL, for those who apply it by hand.

    Args:
        since: The version of the schema that is there; 0 for none.

    Raises:
        ApplicationError: There is nothing to migrate since that version.
    """
    if not 0 <= since < VERSION:
        raise ApplicationError(
            f"no SQL leads from version {since} of the schema to version {VERSION}, which is that of this program: "
            f"give a version from 0 (no tables) to {VERSION - 1}"
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
        f"INSERT INTO {store.name} (id, version, identity, seen_at) VALUES ({row});",  # noqa: S608  # our own words
        f"INSERT INTO {buckets.name} (bucket, token, claimed_until) VALUES {rows};",  # noqa: S608  # as above
    ]
