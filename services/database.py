"""The platform's database: tables and transactions, shared by four processes.

Engines are those of the library's stores in SQL: in SQLite, a writing transaction waits for its turn at its start
instead of failing in its middle; in PostgreSQL, the rows of a decision are locked.

Times are seconds since 1970 by the database's clock: the clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from integr8s_idem.stores.sql import reading, sql_engine

BUSY_TIMEOUT_SECONDS: Final = 30
"""Timeout for the lock of a SQLite file, or of a row in PostgreSQL."""

_SCHEMA_LOCK: Final = 0x1DE3_F1A7
"""Advisory lock for the creation of PostgreSQL tables."""

tables = MetaData()

turns = Table(
    "turns",
    tables,
    Column("name", String(40), primary_key=True),
    Column("number", BigInteger, nullable=False),
)
"""A row that is incremented at the start of a decision, as its number and as the lock."""

executions = Table(
    "executions",
    tables,
    Column("execution_id", String(200), primary_key=True),
    Column("state", String(20), nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("timeout_seconds", Double, nullable=False),
    Column("user_id", String(200), nullable=False),
    Column("correlation_id", String(200), nullable=False),
    Column("remind_at", Double),
    Index("executions_by_turn", "state", "priority", "position"),
    Index("executions_by_user", "user_id", "state"),
)

decisions = Table(
    "decisions",
    tables,
    Column("key", String(255), primary_key=True),
    Column("decision", JSON, nullable=False),
    Column("decided_at", Double, nullable=False, index=True),
)

sagas = Table(
    "sagas",
    tables,
    Column("saga_id", String(200), primary_key=True),
    Column("execution_id", String(200), nullable=False),
    Column("name", String(40), nullable=False),
    Column("state", String(20), nullable=False),
    Column("request", JSON(none_as_null=True)),
    Column("reason", Text, nullable=False),
    Column("user_id", String(200)),
    Column("correlation_id", String(200), nullable=False),
    Column("deadline", Double),
    UniqueConstraint("execution_id", "name", name="sagas_of_execution"),
    Index("sagas_by_deadline", "state", "deadline"),
)

pods = Table(
    "pods",
    tables,
    Column("execution_id", String(200), primary_key=True),
    Column("pod_name", String(200), nullable=False),
    Column("state", String(20), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("delete_reason", Text),
    Column("outcome", JSON(none_as_null=True)),
    Column("user_id", String(200)),
    Column("correlation_id", String(200), nullable=False),
    Column("seen_at", Double, nullable=False),
    Index("pods_by_state", "state", "seen_at"),
)

results = Table(
    "results",
    tables,
    Column("execution_id", String(200), primary_key=True),
    Column("status", String(20), nullable=False),
    Column("exit_code", Integer),
    Column("error_type", String(40)),
    Column("stdout", Text, nullable=False),
    Column("stderr", Text, nullable=False),
    Column("wall_seconds", Double, nullable=False),
    Column("cpu_seconds", Double, nullable=False),
    Column("peak_memory_kib", BigInteger, nullable=False),
    Column("stored_by", String(255), nullable=False),
    Column("stored_at", Double, nullable=False),
)


class now(FunctionElement[float]):  # noqa: N801  # reads like the SQL function that it is
    """The database's clock: seconds since 1970."""

    type = Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_in_sqlite(element: now, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_in_postgresql(element: now, compiler: Any, **options: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def insert(connection: AsyncConnection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that supports ON CONFLICT."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


class Database:
    """The engine of one process and event loop.  Open it before use, and close it at the end."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self._engine = sql_engine(url, pool_size=pool_size, lock_timeout_seconds=BUSY_TIMEOUT_SECONDS)

    async def open(self) -> None:
        """Create missing tables.  Safe to call from several processes at once."""
        async with self.transaction() as connection:
            if connection.dialect.name == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
            await connection.run_sync(tables.create_all)

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Open a read-write transaction, committed at the end of the block and rolled back by an exception."""
        async with self._engine.connect() as connection:
            await connection.begin()
            yield connection
            await connection.commit()

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open a read-only snapshot, which does not wait for writers."""
        return reading(self._engine)
