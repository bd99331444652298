"""Create engines for SQLite files that several processes write to, with a fair queue of writers in each process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from integr8s_idem._util.context_vars import SIMULATED_PROCESS
from integr8s_idem.errors import ApplicationError, StoreConfigurationError
from integr8s_idem.stores.sql.begin_hook import call_at_begin

READ_ONLY: Final = "integr8s_idem_reads_only"
"""Execution option of a read-only transaction, which does not wait for writers."""

_WAL_TRIES: Final = 100

_TURN: Final = "integr8s_idem_turn"
"""Key of the lock that a connection holds, in its `info`."""

_Turns: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[tuple[str, object], "_Turn"]]

_turns: _Turns = WeakKeyDictionary()
"""The queue of writers for each SQLite file and process.

SQLite's own busy handler is unfair: writers of one process could starve each other and time out, although each of them
holds the lock only briefly.
"""

_handlers: _Turns = WeakKeyDictionary()
"""The queue of transactional handlers for each SQLite file and process."""

_lock_timeouts: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
"""Lock timeouts of the engines that `sqlite_engine` created, on which the driver does not begin transactions itself."""


def sqlite_engine(
    url: str | URL, pool_size: int, lock_timeout_seconds: float, *, as_it_is: bool = False
) -> AsyncEngine:
    """Create an engine; `as_it_is` does not switch the file to the write-ahead log."""
    _refuse_memory(make_url(url))
    arguments = {"timeout": lock_timeout_seconds, "factory": _Connection}
    engine = create_async_engine(url, pool_size=pool_size, connect_args=arguments)
    file = _file_of(make_url(url))
    _lock_timeouts[engine.sync_engine] = lock_timeout_seconds

    @event.listens_for(engine.sync_engine, "do_connect")
    def _keep_private(*_: object) -> None:
        if not as_it_is:
            _make_private(engine.url)

    @event.listens_for(engine.sync_engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        # With None, the driver does not begin transactions on its own.
        connection.isolation_level = None
        cursor = connection.cursor()
        if not as_it_is:
            _switch_to_wal(connection, cursor)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get(READ_ONLY, False):
            connection.exec_driver_sql("BEGIN")
            return
        driver: Any = connection.connection.dbapi_connection
        turn = _turn(_turns, file)
        driver.run_async(lambda _: turn.begin(lock_timeout_seconds))
        info = connection.info
        info[_TURN] = turn
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except BaseException:
            _end_turn(info)
            raise

    call_at_begin(engine, _begin)
    for ending in ("commit", "rollback"):
        # Just before the end of the transaction: SQLite itself makes the next writer wait for that moment.
        event.listen(engine.sync_engine, ending, _end_turn_of)
    event.listen(engine.sync_engine, "checkin", lambda _, record: _end_turn(record.info))
    event.listen(engine.sync_engine, "invalidate", lambda _, record, error: _end_turn(record.info))
    return engine


def _make_private(url: URL) -> None:
    """Create a missing file with access for this user only; SQLite creates its journals with the same permissions."""
    assert url.database is not None
    # If this fails, SQLite fails as well and reports the error.
    with suppress(OSError):
        os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def autocommits(engine: Engine) -> bool:
    """Whether a statement outside a transaction commits on its own on connections of `engine`."""
    return engine in _lock_timeouts


@asynccontextmanager
async def writer_turn(engine: AsyncEngine) -> AsyncIterator[None]:
    """Wait for other writers of this process, before a statement that commits on its own.

    Raises:
        ApplicationError: The calling task already is in a transaction of this file.
        OperationalError: The lock timeout expired.
    """
    turn = _turn(_turns, _file_of(engine.url))
    await turn.begin(_lock_timeouts[engine.sync_engine])
    try:
        yield
    finally:
        turn.end()


@asynccontextmanager
async def handler_turn(engine: AsyncEngine) -> AsyncIterator[None]:
    """Wait for other transactional handlers of this process, if the database is SQLite.

    Only one of them can write at a time; the others would wait while their leases run.  Background work, such as the
    purge, joins the same queue, because it would never find a gap between handlers that follow each other closely.
    """
    if engine.dialect.name != "sqlite":
        yield
        return
    turn = _turn(_handlers, _file_of(engine.url))
    await turn.begin(None)
    try:
        yield
    finally:
        turn.end()


class _Turn:
    """A fair lock for the writers of one process."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None

    async def begin(self, timeout: float | None) -> None:
        """Acquire the lock within `timeout` seconds.

        Raises:
            ApplicationError: The current task already holds it.
            OperationalError: The timeout expired; the error is the same as for a lock of another process.
        """
        if self._lock.locked() and self._owner is asyncio.current_task():
            raise ApplicationError(
                "this code already is in a transaction of the SQLite file, and would wait for itself: end that one "
                "first, or write with the same session"
            )
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            busy = sqlite3.OperationalError("database is locked by another transaction of this process")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("BEGIN IMMEDIATE", {}, busy) from None
        self._owner = asyncio.current_task()

    def end(self) -> None:
        self._owner = None
        self._lock.release()


def _turn(turns: _Turns, file: str) -> _Turn:
    return turns.setdefault(asyncio.get_running_loop(), defaultdict(_Turn))[file, SIMULATED_PROCESS.get()]


def _file_of(url: URL) -> str:
    return os.path.realpath(str(url.database))


def _refuse_memory(url: URL) -> None:
    if url.database in {None, "", ":memory:"} or "mode=memory" in str(url):
        raise StoreConfigurationError(
            "start",
            "each connection would have its own in-memory SQLite database: use a file, or MemoryIdempotencyRepository",
        )


def _switch_to_wal(connection: Any, cursor: Any) -> None:
    # The mode is stored in the file.  If two processes switch at the same time, one of them fails without waiting.
    for attempt in range(1, _WAL_TRIES + 1):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == _WAL_TRIES:
                raise
            connection.run_async(lambda _: asyncio.sleep(0.05))
        else:
            return


def _end_turn_of(connection: Connection) -> None:
    # An invalidated connection has already ended its turn, and accessing its `info` would raise, hiding the original
    # error.
    if not connection.invalidated:
        _end_turn(connection.info)


def _end_turn(info: MutableMapping[Any, Any]) -> None:
    """Release the lock of the connection with this `info`, if it holds one."""
    turn = info.pop(_TURN, None)
    if turn is not None:
        turn.end()


class _Connection(sqlite3.Connection):
    """A connection that holds no lock once it is closed."""

    _open = True

    def close(self) -> None:
        # SQLite keeps a transaction open until all its statements are finished.  An interrupted statement is finished
        # only when it is garbage-collected, so a reference to its exception would keep the file locked.
        try:
            if self._open:  # closing twice is allowed
                self._open = False
                self.rollback()
        finally:
            super().close()
