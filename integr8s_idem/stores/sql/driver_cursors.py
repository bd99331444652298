"""Statements of ours on the cursor of the driver, without SQLAlchemy's own way to execute one.

SQLAlchemy writes them, once, and lends the connection.  What it does around each execution (find the compiled form,
bind by type, describe the result) takes longer than driver and database together, and our statements need none of it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection, CursorResult, Engine, Result
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from integr8s_idem.stores.sql.engine import alone
from integr8s_idem.stores.sql.sqlite_engine import among_writers, commits_alone

_TRANSLATED: Final = "schema_translate_map"
"""Execution option by which SQLAlchemy writes a statement for tables in another schema each time."""


class Answer(NamedTuple):
    """What a statement has come to."""

    rows: Sequence[Any]
    written: int
    """Number of rows."""


class Wording:
    """A statement whose parameters are told each time, by their names."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        row: Any = namedtuple("Row", statement.exported_columns.keys())  # type: ignore[misc]  # names of columns
        self._row: Callable[[Sequence[Any]], Any] = row._make
        self._text = ""
        self._order: Sequence[str] = ()
        self._fixed: Mapping[str, Any] = {}

    def text(self, dialect: Dialect) -> str:
        """As the driver takes it; compiled at the first use."""
        if not self._text:
            compiled = self.statement.compile(dialect=dialect)
            self._order, self._fixed, self._text = compiled.positiontup, compiled.params, compiled.string
        return self._text

    def said(self, dialect: Dialect, lent: PoolProxiedConnection, told: Mapping[str, Any]) -> Answer:
        """Said to a cursor; within a greenlet."""
        text = self.text(dialect)
        cursor = lent.cursor()
        try:
            cursor.execute(text, self.parameters(told))
            return Answer([self._row(row) for row in cursor.fetchall()], cursor.rowcount)
        finally:
            cursor.close()

    def parameters(self, told: Mapping[str, Any]) -> tuple[Any, ...]:
        """In the order in which the text wants them."""
        every = {**self._fixed, **told}
        return tuple([every[name] for name in self._order])

    def heard(self, rows: Iterable[Sequence[Any]]) -> Answer:
        """The answer of a statement that returns what it writes."""
        found = [self._row(row) for row in rows]
        return Answer(found, len(found))


async def say_alone(engine: AsyncEngine, wording: Wording, told: Mapping[str, Any]) -> Answer:
    """On a connection of its own; the statement commits for itself.

    Raises:
        sqlalchemy.exc.DBAPIError: As SQLAlchemy itself raises it.
    """
    if _hears(engine.sync_engine):
        return await greenlet_spawn(_alone, engine.sync_engine, wording, told)
    if commits_alone(engine.sync_engine) and _as_written(engine.sync_engine):
        return await _in_one_step(engine, wording, told)
    async with alone(engine) as connection:
        return heard(await connection.execute(wording.statement, told))


async def say_within(connection: AsyncConnection, wording: Wording, told: Mapping[str, Any]) -> Answer:
    """In the transaction that `connection` is in.

    Raises:
        sqlalchemy.exc.DBAPIError: As SQLAlchemy itself raises it.
    """
    one = connection.sync_connection
    if one is not None and _hears(one):
        return await greenlet_spawn(_within, one, wording, told)
    return heard(await connection.execute(wording.statement, told))


def has_said_nothing(connection: AsyncConnection) -> bool:
    """Whether `connection` is in a transaction of which the database has not heard yet."""
    one = connection.sync_connection
    if one is None or one.dialect.driver != "asyncpg" or one.in_nested_transaction():
        return False
    lent: Any = one.connection
    return not lent.driver_connection.is_in_transaction() and not lent.dbapi_connection.autocommit


async def roll_back(connection: AsyncConnection) -> None:
    """Roll back what the database has of a transaction that SQLAlchemy goes on with.

    Raises:
        sqlalchemy.exc.DBAPIError: As SQLAlchemy itself raises it.
    """
    assert connection.sync_connection is not None
    await greenlet_spawn(_rolled_back, connection.sync_connection)


def heard(result: Result[Any]) -> Answer:
    """The answer to a statement that SQLAlchemy has executed."""
    assert isinstance(result, CursorResult)
    if not result.returns_rows:
        return Answer([], result.rowcount)
    rows = result.all()
    return Answer(rows, len(rows))


def _hears(one: Engine | Connection) -> bool:
    """Whether our statements can be said to its cursor as they were compiled."""
    return one.dialect.driver == "asyncpg" and _as_written(one)


def _as_written(one: Engine | Connection) -> bool:
    return _TRANSLATED not in one.get_execution_options()


async def _in_one_step(engine: AsyncEngine, wording: Wording, told: Mapping[str, Any]) -> Answer:
    """In SQLite: its driver asks a thread for each step, and BEGIN, cursor, answer and COMMIT are steps as well."""
    text, sqlite_error = wording.text(engine.dialect), engine.dialect.loaded_dbapi.Error
    try:
        lent = await engine.raw_connection()
    except sqlite_error as error:
        raise _as_sqlalchemy_does(error, text, cut=False) from error
    driver: Any = lent.driver_connection
    try:
        async with among_writers(engine):
            rows = await driver.execute_fetchall(text, wording.parameters(told))
    except sqlite_error as error:
        raise _as_sqlalchemy_does(error, text, cut=False) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            await greenlet_spawn(lent.invalidate, error)
        raise
    finally:
        if lent.is_valid:
            await greenlet_spawn(lent.close)
    return wording.heard(rows)


def _alone(engine: Engine, wording: Wording, told: Mapping[str, Any]) -> Answer:
    dialect, text = engine.dialect, wording.text(engine.dialect)
    try:
        lent = engine.raw_connection()
    except dialect.loaded_dbapi.Error as error:
        raise _as_sqlalchemy_does(error, text, cut=dialect.is_disconnect(error, None, None)) from error
    driver: Any = lent.dbapi_connection
    driver.autocommit = True
    try:
        with _errors_told(engine, lent, text, lent.invalidate):
            return wording.said(dialect, lent, told)
    finally:
        if lent.is_valid:
            driver.autocommit = False
            lent.close()


def _within(connection: Connection, wording: Wording, told: Mapping[str, Any]) -> Answer:
    lent = connection.connection
    with _errors_told(connection.engine, lent, wording.text(connection.dialect), connection.invalidate):
        return wording.said(connection.dialect, lent, told)


def _rolled_back(connection: Connection) -> None:
    lent = connection.connection
    with _errors_told(connection.engine, lent, "ROLLBACK", connection.invalidate):
        connection.dialect.do_rollback(lent)


@contextmanager
def _errors_told(
    engine: Engine, lent: PoolProxiedConnection, text: str, invalidate: Callable[[BaseException], None]
) -> Iterator[None]:
    """As SQLAlchemy does: what was cut, or left in the middle of an answer, is never used again."""
    dialect = engine.dialect
    try:
        yield
    except dialect.loaded_dbapi.Error as error:
        cut = dialect.is_disconnect(error, lent.dbapi_connection, None) or _outdated(error, dialect)
        if cut:
            # Those that lie in the pool were cut with it.
            engine.pool._invalidate(lent, error, _checkin=False)  # noqa: SLF001  # it has no other name for this
            invalidate(error)
        raise _as_sqlalchemy_does(error, text, cut=cut) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            invalidate(error)
        raise


def _outdated(error: Exception, dialect: Dialect) -> bool:
    """Whether the tables have changed since the connection prepared the statement; it would fail again and again."""
    kind: Any = dialect.loaded_dbapi
    return isinstance(error, kind.InvalidCachedStatementError)


def _as_sqlalchemy_does(error: Exception, text: str, *, cut: bool) -> DBAPIError:
    # Without the parameters, which hold payloads.
    return DBAPIError(text, None, error, connection_invalidated=cut)
