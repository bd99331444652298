"""Execute statements on the cursor of the driver, bypassing SQLAlchemy's execution layer.

SQLAlchemy compiles each statement once and provides the connection.  Its work for each execution (look up the compiled
form, bind by type, describe the result) takes longer than the driver and the database together, and these statements
do not need it.

In a transaction of the application, a statement on asyncpg also needs no greenlet: it awaits the coroutine of
SQLAlchemy's cursor for asyncpg.  That coroutine sends BEGIN if the transaction has not begun, prepares the statement as
the engine is configured, and converts errors.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, NoReturn

from sqlalchemy.engine import Connection, CursorResult, Engine, Result
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from integr8s_idem.stores.sql.engine import autocommit
from integr8s_idem.stores.sql.sqlite_engine import autocommits, writer_turn

_SCHEMA_MAP: Final = "schema_translate_map"
"""Execution option with which SQLAlchemy rewrites statements for tables in another schema."""


class StatementResult(NamedTuple):
    """Rows returned and number of rows written."""

    rows: Sequence[Any]
    written: int


class CompiledStatement:
    """A statement that is compiled once and executed with named parameters."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        row: Any = namedtuple("Row", statement.exported_columns.keys())  # type: ignore[misc]  # names of columns
        self.row: Callable[[Sequence[Any]], Any] = row._make
        """Converts a row of the driver."""
        self._text = ""
        self._order: Sequence[str] = ()
        self._defaults: Mapping[str, Any] = {}

    def text(self, dialect: Dialect) -> str:
        """Return the SQL text for the driver, compiled on first use."""
        if not self._text:
            compiled = self.statement.compile(dialect=dialect)
            self._order, self._defaults, self._text = compiled.positiontup, compiled.params, compiled.string
        return self._text

    def execute(
        self, dialect: Dialect, connection: PoolProxiedConnection, parameters: Mapping[str, Any]
    ) -> StatementResult:
        """Execute the statement on a cursor.  Call this within a greenlet."""
        text = self.text(dialect)
        cursor = connection.cursor()
        try:
            cursor.execute(text, self.positional(parameters))
            return StatementResult([self.row(row) for row in cursor.fetchall()], cursor.rowcount)
        finally:
            cursor.close()

    def positional(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return parameters in the order of the text."""
        values = {**self._defaults, **parameters}
        return tuple([values[name] for name in self._order])

    def returned(self, rows: Iterable[Sequence[Any]]) -> StatementResult:
        """Return the result of a statement that returns the rows it writes."""
        found = [self.row(row) for row in rows]
        return StatementResult(found, len(found))


async def execute_autocommit(
    engine: AsyncEngine, statement: CompiledStatement, parameters: Mapping[str, Any]
) -> StatementResult:
    """Execute a statement on a pooled connection, outside a transaction.

    Raises:
        sqlalchemy.exc.DBAPIError: The driver raised an error.
    """
    if _allows_driver_cursor(engine.sync_engine):
        return await greenlet_spawn(_execute_autocommit, engine.sync_engine, statement, parameters)
    if autocommits(engine.sync_engine) and _SCHEMA_MAP not in engine.get_execution_options():
        return await _execute_in_sqlite(engine, statement, parameters)
    async with autocommit(engine) as connection:
        return result_of(await connection.execute(statement.statement, parameters))


async def execute_in_transaction(
    connection: AsyncConnection, statement: CompiledStatement, parameters: Mapping[str, Any]
) -> StatementResult:
    """Execute a statement in the current transaction of `connection`.

    Raises:
        sqlalchemy.exc.DBAPIError: The driver raised an error.
    """
    sync_connection = connection.sync_connection
    if sync_connection is None or (found := _awaitable_cursor(sync_connection)) is None:
        return result_of(await connection.execute(statement.statement, parameters))
    pooled, cursor = found
    text = statement.text(sync_connection.dialect)
    try:
        await cursor._prepare_and_execute(text, statement.positional(parameters))  # noqa: SLF001  # see above
    except BaseException as error:  # noqa: BLE001  # raised by the function, which may have to close the connection
        await greenlet_spawn(_raise_translated, sync_connection, pooled, text, error)
    # The cursor has read all rows and needs no closing.
    return StatementResult([statement.row(row) for row in cursor.fetchall()], cursor.rowcount)


def _awaitable_cursor(connection: Connection) -> tuple[PoolProxiedConnection, Any] | None:
    """Return a pooled connection and its cursor, on which a statement can be awaited.

    It returns `None` if SQLAlchemy has to execute the statement.

    Only this function decides which connections are used directly.
    """
    if not _allows_driver_cursor(connection):
        return None
    pooled: Any = connection.connection
    cursor = pooled.dbapi_connection.cursor()
    return (pooled, cursor) if hasattr(cursor, "_prepare_and_execute") else None


def has_not_begun(connection: Connection) -> bool:
    """Whether SQLAlchemy is in a transaction that asyncpg has not yet begun in the database."""
    if connection.dialect.driver != "asyncpg" or connection.in_nested_transaction():
        return False
    pooled: Any = connection.connection
    return not pooled.driver_connection.is_in_transaction() and not pooled.dbapi_connection.autocommit


async def roll_back(connection: Connection) -> None:
    """Roll back in the database only; SQLAlchemy continues with its transaction.

    Raises:
        sqlalchemy.exc.DBAPIError: The driver raised an error.
    """
    await greenlet_spawn(_roll_back, connection)


def result_of(result: Result[Any]) -> StatementResult:
    """Convert the result of a statement that SQLAlchemy has executed."""
    assert isinstance(result, CursorResult)
    if not result.returns_rows:
        return StatementResult([], result.rowcount)
    rows = result.all()
    return StatementResult(rows, len(rows))


def _allows_driver_cursor(bind: Engine | Connection) -> bool:
    """Whether compiled statements can be executed directly on its cursor."""
    return bind.dialect.driver == "asyncpg" and _SCHEMA_MAP not in bind.get_execution_options()


async def _execute_in_sqlite(
    engine: AsyncEngine, statement: CompiledStatement, parameters: Mapping[str, Any]
) -> StatementResult:
    """Execute in one step: aiosqlite passes each of BEGIN, execute, fetch and COMMIT to a thread."""
    text, sqlite_error = statement.text(engine.dialect), engine.dialect.loaded_dbapi.Error
    try:
        pooled = await engine.raw_connection()
    except sqlite_error as error:
        raise _dbapi_error(error, text, disconnected=False) from error
    driver: Any = pooled.driver_connection
    try:
        async with writer_turn(engine):
            rows = await driver.execute_fetchall(text, statement.positional(parameters))
    except sqlite_error as error:
        raise _dbapi_error(error, text, disconnected=False) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            await greenlet_spawn(pooled.invalidate, error)
        raise
    finally:
        if pooled.is_valid:
            await greenlet_spawn(pooled.close)
    return statement.returned(rows)


def _execute_autocommit(engine: Engine, statement: CompiledStatement, parameters: Mapping[str, Any]) -> StatementResult:
    dialect, text = engine.dialect, statement.text(engine.dialect)
    try:
        pooled = engine.raw_connection()
    except dialect.loaded_dbapi.Error as error:
        raise _dbapi_error(error, text, disconnected=dialect.is_disconnect(error, None, None)) from error
    driver: Any = pooled.dbapi_connection
    driver.autocommit = True
    try:
        with _translating_errors(engine, pooled, text, pooled.invalidate):
            return statement.execute(dialect, pooled, parameters)
    finally:
        if pooled.is_valid:
            driver.autocommit = False
            pooled.close()


def _raise_translated(
    connection: Connection, pooled: PoolProxiedConnection, text: str, error: BaseException
) -> NoReturn:
    with _translating_errors(connection.engine, pooled, text, connection.invalidate):
        raise error


def _roll_back(connection: Connection) -> None:
    pooled = connection.connection
    with _translating_errors(connection.engine, pooled, "ROLLBACK", connection.invalidate):
        connection.dialect.do_rollback(pooled)


@contextmanager
def _translating_errors(
    engine: Engine, pooled: PoolProxiedConnection, text: str, invalidate: Callable[[BaseException], None]
) -> Iterator[None]:
    """Raise driver errors as `DBAPIError`, and invalidate connections that are broken or interrupted.

    SQLAlchemy's own execution does the same.
    """
    dialect = engine.dialect
    try:
        yield
    except dialect.loaded_dbapi.Error as error:
        disconnected = dialect.is_disconnect(error, pooled.dbapi_connection, None) or _is_stale_plan(error, dialect)
        if disconnected:
            # The idle connections of the pool are broken, too.
            engine.pool._invalidate(pooled, error, _checkin=False)  # noqa: SLF001  # the only API for this
            invalidate(error)
        raise _dbapi_error(error, text, disconnected=disconnected) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            invalidate(error)
        raise


def _is_stale_plan(error: Exception, dialect: Dialect) -> bool:
    """Whether the tables have changed since the connection prepared the statement, which would always fail again."""
    dbapi: Any = dialect.loaded_dbapi
    return isinstance(error, dbapi.InvalidCachedStatementError)


def _dbapi_error(error: Exception, text: str, *, disconnected: bool) -> DBAPIError:
    # Without the parameters, which contain payloads.
    return DBAPIError(text, None, error, connection_invalidated=disconnected)
