"""SQLite's engine: files that several processes write to, and writers that take turns."""

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

READ_ONLY: Final = "integr8s_idem_reads_only"
"""Execution option of a transaction that will not write: it waits for no writer."""

_WAL_TRIES: Final = 100

_TURN: Final = "integr8s_idem_turn"
"""Where a connection keeps the lock that it holds."""

_Turns: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[tuple[str, object], "_Turn"]]

_turns: _Turns = WeakKeyDictionary()
"""One for each SQLite file and process.  SQLite's own waiting is unfair: a writer of this process would starve among
its siblings, and time out although each of them takes a moment only."""

_handlers: _Turns = WeakKeyDictionary()
"""Another one for each file, among the handlers whose transactions hold their outcomes."""


_lock_timeouts: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
"""Of the engines of ours, whose connections leave transactions to us."""


def sqlite_engine(
    url: str | URL, pool_size: int, lock_timeout_seconds: float, *, as_it_is: bool = False
) -> AsyncEngine:
    """`as_it_is`: a file that has no write-ahead log gets none."""
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
        # The driver begins transactions late and behind our back; with None it leaves them to us.
        connection.isolation_level = None
        cursor = connection.cursor()
        if not as_it_is:
            _switch_to_wal(connection, cursor)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
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

    for ending in ("commit", "rollback"):
        # Just before it ends: SQLite itself holds the next one back for that moment.
        event.listen(engine.sync_engine, ending, _end_turn_of)
    event.listen(engine.sync_engine, "checkin", lambda _, record: _end_turn(record.info))
    event.listen(engine.sync_engine, "invalidate", lambda _, record, error: _end_turn(record.info))
    return engine


def _make_private(url: URL) -> None:
    """A file that is not there is made for this user alone; SQLite gives the files beside it the same rights."""
    assert url.database is not None
    # Whatever hinders it, SQLite is told as well, and reports it.
    with suppress(OSError):
        os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def autocommits(engine: Engine) -> bool:
    """Whether a statement without a BEGIN commits for itself on connections of `engine`."""
    return engine in _lock_timeouts


@asynccontextmanager
async def writer_turn(engine: AsyncEngine) -> AsyncIterator[None]:
    """Take turns with whoever else of this process writes, for a statement that commits for itself.

    Raises:
        ApplicationError: It is the turn of the very code that asks.
        OperationalError: The wait was too long.
    """
    turn = _turn(_turns, _file_of(engine.url))
    await turn.begin(_lock_timeouts[engine.sync_engine])
    try:
        yield
    finally:
        turn.end()


@asynccontextmanager
async def handler_turn(engine: AsyncEngine) -> AsyncIterator[None]:
    """Take turns with the handlers of this process whose transactions hold their outcomes, if they write to SQLite.

    One of them at a time: the others could write nothing, and would wait while their leases run.  What else is in
    no hurry waits in the same line: with handlers that follow each other closely it would never find a gap.
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
    """Who of this process may write."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None

    async def begin(self, longest: float | None) -> None:
        """Wait for it, for `longest` seconds.

        Raises:
            ApplicationError: It is the turn of the very code that asks.
            OperationalError: The wait was too long: told as that for another process is.
        """
        if self._lock.locked() and self._owner is asyncio.current_task():
            raise ApplicationError(
                "this code is in a transaction of the SQLite file already, and would wait for itself: end that one "
                "first, or write by the same session"
            )
        try:
            async with asyncio.timeout(longest):
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
            "each connection has a SQLite memory of its own: give a file, or use MemoryIdempotencyRepository",
        )


def _switch_to_wal(connection: Any, cursor: Any) -> None:
    # The mode stays in the file.  Of two processes that switch at once, one is refused without waiting.
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
    # One that was cut short has lost its driver's connection, and its turn with that.  To ask it for either would
    # raise, in place of what has cut it short.
    if not connection.invalidated:
        _end_turn(connection.info)


def _end_turn(info: MutableMapping[Any, Any]) -> None:
    """Let the next writer of this process begin, if it was the turn of the connection that this belongs to."""
    turn = info.pop(_TURN, None)
    if turn is not None:
        turn.end()


class _Connection(sqlite3.Connection):
    """Holds no lock once it is closed."""

    _open = True

    def close(self) -> None:
        # SQLite keeps a transaction for as long as one of its statements is under way, and so is one that was cut
        # short, until the garbage collector comes by: whoever keeps the exception keeps the file locked.
        try:
            if self._open:  # a second close is nobody's mistake
                self._open = False
                self.rollback()
        finally:
            super().close()
