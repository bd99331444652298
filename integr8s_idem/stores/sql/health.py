"""What a database tells about itself, and what its settings would lose."""

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
from integr8s_idem.stores.sql.schema_completeness import missing_columns, missing_indexes

NO_VERSION: Final = f"no tables of the store are there that say of which version they are; {MIGRATE}"


async def check_health(connection: AsyncConnection, dialect: Dialect) -> StoreHealth:
    """Ask the database, with a write: one that takes none does not pass.

    Raises:
        StoreConfigurationError: Its schema is missing, older or newer.
    """
    start = time.perf_counter()
    looked = update(store).where(store.c.id == 1).values(seen_at=dialect.now)
    told = (store.c.version, store.c.identity)
    answer = await connection.execute(looked.returning(*told) if dialect.supports_returning else looked, dialect.time_parameters())
    if not dialect.supports_returning:
        answer = await connection.execute(select(*told).where(store.c.id == 1))
    row = answer.first()
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
    """Refuse a schema that is not ours.

    Raises:
        StoreConfigurationError: It is older, or newer.
    """
    if found < VERSION:
        raise StoreConfigurationError(
            operation, f"the schema is of version {found}, this code needs {VERSION}; {MIGRATE}", Code.SCHEMA_OLDER
        )
    if found > VERSION:
        raise StoreConfigurationError(
            operation,
            f"the schema is of version {found}, this code knows {VERSION}: it was migrated by a newer integr8s-idem; "
            "deploy that here, too",
            Code.SCHEMA_NEWER,
        )


def new_identity() -> str:
    """A name for what a store holds from now on."""
    return secrets.token_hex(16)


async def check_tables(connection: AsyncConnection) -> list[StoreWarning]:
    """Which indexes are missing; takes a few dozen round trips.

    Raises:
        StoreConfigurationError: Columns are missing: the schema is older.
    """
    if await connection.run_sync(missing_columns):
        check_version(COMPATIBLE_VERSION, "ping")
    missing = await connection.run_sync(missing_indexes)
    if not missing:
        return []
    what, cost = f"indexes are missing: {', '.join(missing)}", "whole tables are read, and it grows slower every day"
    return [StoreWarning(Code.SCHEMA_INCOMPLETE, what, cost, MIGRATE)]


async def _inspect_postgresql(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    asked = (
        "SELECT current_setting('server_version') AS version, current_setting('fsync') AS fsync, "
        "current_setting('synchronous_commit') AS commits, pg_is_in_recovery() AS standby, "
        "(SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass('idempotency_records')) AS kept"
    )
    found: Any = (await connection.execute(text(asked))).one()
    warnings = []
    if found.fsync == "off":
        cost = "a crash of the machine damages all data"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "fsync is off", cost, "set fsync = on"))
    if found.commits == "off":
        cost = "a crash loses what was committed last"
        remedy = "set it to on for this user"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "synchronous_commit is off", cost, remedy))
    if found.standby:
        remedy = "give the address of its primary"
        warnings.append(StoreWarning(Code.STORE_REPLICA, "this server is a standby", "it takes no records", remedy))
    if found.kept not in ("p", None):  # None: it is not there, and the first event says so
        told = "idempotency_records is no permanent table"
        remedy = "ALTER TABLE … SET LOGGED"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, told, "a crash empties it", remedy))
    return str(found.version), warnings


async def _inspect_sqlite(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    version = (await connection.execute(select(text("sqlite_version()")))).scalar_one()
    journal = (await connection.execute(text("PRAGMA journal_mode"))).scalar_one()
    synchronous = (await connection.execute(text("PRAGMA synchronous"))).scalar_one()
    warnings = []
    if journal == "memory":
        cost = "records are lost at the end of the process"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, "the database is in memory", cost, "give a file"))
    elif journal != "wal":
        cost = "readers and writers wait for each other"
        warnings.append(StoreWarning(Code.STORE_JOURNAL, f"journal_mode is {journal}", cost, "set WAL"))
    if int(synchronous) < 2 and journal != "memory":
        cost, remedy = "a power loss takes what was committed last", "set synchronous = FULL"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, "synchronous is below FULL", cost, remedy))
    return str(version), warnings


async def _inspect_mysql(connection: AsyncConnection) -> tuple[str, list[StoreWarning]]:
    asked = (
        "SELECT version() AS version, @@global.innodb_flush_log_at_trx_commit AS flushes, @@log_bin AS log, "
        "@@global.sync_binlog AS syncs, @@global.read_only AS reads_only, "
        "(SELECT engine FROM information_schema.tables "
        "WHERE table_schema = database() AND table_name = 'idempotency_records') AS engine"
    )
    found: Any = (await connection.execute(text(asked))).one()
    warnings = []
    if found.engine not in ("InnoDB", None):  # None: it is not there, or not to be seen by this user
        what, remedy = f"idempotency_records is a table of {found.engine}", "ALTER TABLE … ENGINE = InnoDB"
        cost = "nothing in it is atomic, and a crash damages or empties it"
        warnings.append(StoreWarning(Code.STORE_NOT_PERSISTENT, what, cost, remedy))
    if int(found.flushes) != 1:
        what = f"innodb_flush_log_at_trx_commit is {found.flushes}"
        cost = "a crash loses what was committed in the last second"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, what, cost, "set it to 1"))
    if int(found.log) and int(found.syncs) != 1:
        what, cost = f"sync_binlog is {found.syncs}", "a crash of the machine loses what replicas were to get"
        warnings.append(StoreWarning(Code.STORE_LATE_SYNC, what, cost, "set it to 1"))
    if str(found.reads_only) not in {"0", "OFF"}:
        what, cost = "this server is read-only, and lets us write by a privilege", "what is written here may be lost"
        warnings.append(StoreWarning(Code.STORE_REPLICA, what, cost, "give the address of its primary"))
    return str(found.version), warnings


_INSPECTORS = {"mysql": _inspect_mysql, "postgresql": _inspect_postgresql, "sqlite": _inspect_sqlite}
