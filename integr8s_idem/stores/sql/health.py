"""Check that a database accepts writes, has the right schema, and is configured not to lose data."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.diagnostics import Code, StoreWarning
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.errors import MIGRATE
from integr8s_idem.stores.sql.schema import COMPATIBLE_VERSION, VERSION, store
from integr8s_idem.stores.sql.schema_completeness import missing_indexes, version_by_columns

NO_VERSION: Final = f"the tables of the store, or their version, are missing; {MIGRATE}"


async def check_health(connection: AsyncConnection, dialect: Dialect) -> StoreHealth:
    """Check a database with a write, so that a read-only one fails.

    Raises:
        StoreConfigurationError: The schema is missing, older or newer.
    """
    start = time.perf_counter()
    touch = update(store).where(store.c.id == 1).values(seen_at=dialect.now)
    columns = (store.c.version, store.c.identity)
    if dialect.supports_returning:
        result = await connection.execute(touch.returning(*columns), dialect.time_parameters())
    else:
        await connection.execute(touch, dialect.time_parameters())
        result = await connection.execute(select(*columns).where(store.c.id == 1))
    row = result.first()
    latency = timedelta(seconds=time.perf_counter() - start)
    if row is None:
        raise StoreConfigurationError("ping", NO_VERSION, Code.SCHEMA_MISSING)
    if row.version != COMPATIBLE_VERSION:
        check_version(row.version)
    version, warnings = await _INSPECTORS[dialect.name](connection)
    return StoreHealth(
        kind=dialect.name, version=version, latency=latency, warnings=tuple(warnings), identity=row.identity
    )


def check_version(found: int, operation: str = "start") -> None:
    """Check the version of the schema.

    Raises:
        StoreConfigurationError: The schema is older or newer than this code.
    """
    if found < VERSION:
        raise StoreConfigurationError(
            operation, f"the schema has version {found}, this code needs {VERSION}; {MIGRATE}", Code.SCHEMA_OLDER
        )
    if found > VERSION:
        raise StoreConfigurationError(
            operation,
            f"the schema has version {found}, this code supports {VERSION}: a newer integr8s-idem migrated it; "
            "deploy that version here as well",
            Code.SCHEMA_NEWER,
        )


def new_identity() -> str:
    """Generate a random identity for a store."""
    return secrets.token_hex(16)


async def check_tables(connection: AsyncConnection) -> list[StoreWarning]:
    """Return a warning about missing indexes.  Takes a few dozen round trips.

    Raises:
        StoreConfigurationError: Columns are missing, so the schema is older.
    """
    check_version(await connection.run_sync(version_by_columns), "ping")
    missing = await connection.run_sync(missing_indexes)
    if not missing:
        return []
    what, cost = f"indexes are missing: {', '.join(missing)}", "whole tables are scanned, slower every day"
    return [StoreWarning(Code.SCHEMA_INCOMPLETE, what, cost, MIGRATE)]


async def _inspect_postgresql(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    query = (
        "SELECT current_setting('server_version') AS version, current_setting('fsync') AS fsync, "
        "current_setting('synchronous_commit') AS commits, pg_is_in_recovery() AS standby, "
        "(SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass('idempotency_records')) AS persistence"
    )
    found: Any = (await connection.execute(text(query))).one()
    warnings = []
    if found.fsync == "off":
        cost = "a crash of the machine damages all data"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "fsync is off", cost, "set fsync = on"))
    if found.commits == "off":
        cost = "a crash loses the last commits"
        remedy = "set it to on for this user"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "synchronous_commit is off", cost, remedy))
    if found.standby:
        remedy = "use the address of its primary"
        warnings.append(StoreWarning(Code.STORE_REPLICA, "this server is a standby", "it rejects writes", remedy))
    if found.persistence not in ("p", None):  # None: the table is missing, which the first event reports
        what = "idempotency_records is not a permanent table"
        remedy = "ALTER TABLE … SET LOGGED"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, what, "a crash empties it", remedy))
    return str(found.version), warnings


async def _inspect_sqlite(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    version = (await connection.execute(select(text("sqlite_version()")))).scalar_one()
    journal = (await connection.execute(text("PRAGMA journal_mode"))).scalar_one()
    synchronous = (await connection.execute(text("PRAGMA synchronous"))).scalar_one()
    warnings = []
    if journal == "memory":
        cost = "records are lost when the process ends"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, "the database is in memory", cost, "use a file"))
    elif journal != "wal":
        cost = "readers and writers wait for each other"
        warnings.append(StoreWarning(Code.STORE_JOURNAL, f"journal_mode is {journal}", cost, "set WAL"))
    if int(synchronous) < 2 and journal != "memory":
        cost, remedy = "a power failure loses the last commits", "set synchronous = FULL"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "synchronous is below FULL", cost, remedy))
    return str(version), warnings


async def _inspect_mysql(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    query = (
        "SELECT version() AS version, @@global.innodb_flush_log_at_trx_commit AS flushes, @@log_bin AS log, "
        "@@global.sync_binlog AS syncs, @@global.read_only AS reads_only, "
        "(SELECT engine FROM information_schema.tables "
        "WHERE table_schema = database() AND table_name = 'idempotency_records') AS engine"
    )
    found: Any = (await connection.execute(text(query))).one()
    warnings = []
    if found.engine not in ("InnoDB", None):  # None: missing, or not visible to this user
        what, remedy = f"idempotency_records uses the engine {found.engine}", "ALTER TABLE … ENGINE = InnoDB"
        cost = "its writes are not atomic, and a crash damages or empties it"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, what, cost, remedy))
    if int(found.flushes) != 1:
        what = f"innodb_flush_log_at_trx_commit is {found.flushes}"
        cost = "a crash loses the commits of the last second"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, what, cost, "set it to 1"))
    if int(found.log) and int(found.syncs) != 1:
        what, cost = f"sync_binlog is {found.syncs}", "a crash of the machine loses writes not yet replicated"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, what, cost, "set it to 1"))
    if str(found.reads_only) not in {"0", "OFF"}:
        what = "this server is read-only, and this user may write only because of a privilege"
        cost, remedy = "writes to a replica may be lost", "use the address of its primary"
        warnings.append(StoreWarning(Code.STORE_REPLICA, what, cost, remedy))
    return str(found.version), warnings


_INSPECTORS = {"mysql": _inspect_mysql, "postgresql": _inspect_postgresql, "sqlite": _inspect_sqlite}
