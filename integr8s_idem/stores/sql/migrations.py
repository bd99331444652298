"""The schema's versions, in order: `migrate` brings a database to that of this code.

A migration that is out is never changed; the next version is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import MetaData, inspect, select, text, update
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.engine import reading, writing
from integr8s_idem.stores.sql.errors import guarded
from integr8s_idem.stores.sql.health import check_version, new_identity
from integr8s_idem.stores.sql.schema import BUCKETS, VERSION, buckets, metadata, store

_EMPTY: Final = {"mariadb": "x''", "mysql": "x''", "postgresql": "''::bytea", "sqlite": "x''"}
"""No bytes."""

_LOCK: Final = 0x1DE3_0001
"""Number of the advisory lock under which PostgreSQL is migrated."""


_UNCLAIMED: Final = {"token": b"", "claimed_until": 0}

_PATIENCE: Final = timedelta(minutes=5)
"""A migration may have to rewrite a large table."""


@dataclass(frozen=True)
class Migration:
    """From the version before to this one."""

    version: int
    says: str
    steps: Callable[[], Iterator[ExecutableDDLElement]]


def _tables(tables: MetaData) -> Iterator[ExecutableDDLElement]:
    for table in tables.sorted_tables:
        yield CreateTable(table)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield CreateIndex(index)


MIGRATIONS: Final = (Migration(1, "records, and events to be published", lambda: _tables(metadata)),)


async def migrate(engine: AsyncEngine) -> list[Migration]:
    """Bring the database to the version of this code; what was done.  Any number of processes may ask at once.

    Raises:
        StoreConfigurationError: It is of a newer version than this code.
    """
    if await _is_current(engine):
        return []
    if dialect_of(engine.dialect.name).ddl_commits:
        return await _migrate_by_turns(engine)
    async with guarded("migrate", _PATIENCE, engine.dialect.name), writing(engine) as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        return await connection.run_sync(_migrate)


async def _migrate_by_turns(engine: AsyncEngine) -> list[Migration]:
    """Under a lock of the connection's: one of the transaction's would end with the first table."""
    name = {"name": f"integr8s-idem.{_LOCK}", "wait": int(_PATIENCE.total_seconds())}
    async with guarded("migrate", _PATIENCE, engine.dialect.name), engine.connect() as connection:
        taken = await connection.scalar(text("SELECT GET_LOCK(CONCAT(:name, '.', SHA1(DATABASE())), :wait)"), name)
        if taken != 1:
            raise StoreUnavailableError("migrate", "another process migrates the database, and takes long")
        try:
            done = await connection.run_sync(_migrate)
            # Before the next one gets the lock: it must see what was done.
            await connection.commit()
        finally:
            await connection.rollback()
            await connection.execute(text("SELECT RELEASE_LOCK(CONCAT(:name, '.', SHA1(DATABASE())))"), name)
    return done


async def _is_current(engine: AsyncEngine) -> bool:
    # Each start of a worker asks for a file: those who only look must not wait for a writer, nor hold one up.
    async with guarded("migrate", _PATIENCE, engine.dialect.name), reading(engine) as connection:
        return await connection.run_sync(version_of) == VERSION


def _migrate(connection: Connection) -> list[Migration]:
    found = version_of(connection)
    if found > VERSION:
        check_version(found)
    dialect = dialect_of(connection.dialect.name)
    todo = [migration for migration in MIGRATIONS if migration.version > found]
    for migration in todo:
        for step in migration.steps():
            if not (dialect.ddl_commits and _is_done(connection, step)):
                connection.execute(step)
    if found == 0:
        row = {"id": 1, "version": VERSION, "identity": new_identity(), "seen_at": 0}
        connection.execute(store.insert(), row)
        _add_buckets(connection)
    elif todo:
        connection.execute(update(store).values(version=VERSION), dialect.times())
    return todo


def _add_buckets(connection: Connection) -> None:
    there = set(connection.scalars(select(buckets.c.bucket)))
    if missing := [{"bucket": bucket, **_UNCLAIMED} for bucket in range(BUCKETS) if bucket not in there]:
        connection.execute(buckets.insert(), missing)


def _is_done(connection: Connection, step: ExecutableDDLElement) -> bool:
    """Whether a migration that stopped half way has left this step behind."""
    found = inspect(connection)
    match step:
        case CreateTable():
            return found.has_table(step.element.name)
        case CreateIndex(element=index) if index.table is not None:
            return any(one["name"] == index.name for one in found.get_indexes(index.table.name))
    return False


def version_of(connection: Connection) -> int:
    """The version of the schema that is there; 0 for none."""
    if not inspect(connection).has_table(store.name):
        return 0
    return connection.execute(select(store.c.version).where(store.c.id == 1)).scalar_one_or_none() or 0


def ddl(dialect: Dialect) -> str:
    """All migrations as SQL, for those who apply it by hand."""
    parts = []
    for migration in MIGRATIONS:
        parts.append(f"-- version {migration.version}: {migration.says}")
        parts += [str(step.compile(dialect=dialect)).strip() + ";" for step in migration.steps()]
    identity = dialect_of(dialect.name).identity
    parts.append(f"INSERT INTO {store.name} (id, version, identity, seen_at) VALUES (1, {VERSION}, {identity}, 0);")  # noqa: S608  # our own words
    rows = ", ".join(f"({bucket}, {_EMPTY[dialect.name]}, 0)" for bucket in range(BUCKETS))
    parts.append(f"INSERT INTO {buckets.name} (bucket, token, claimed_until) VALUES {rows};")  # noqa: S608  # as above
    return "\n".join(parts) + "\n"
