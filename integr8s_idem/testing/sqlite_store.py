"""A store in a SQLite file for `WorkerHarness`, which supports transactional handlers.

Each simulated process has its own connections.  Those of a crashed process are closed, so that they do not keep the
file locked.  While a running process uses a connection, time does not jump, because a thread executes the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Engine, event
from sqlalchemy.pool import ConnectionPoolEntry, Pool, PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.simulated_processes import Process, current_process


class Connections:
    """The database connections of simulated processes, of all engines."""

    def __init__(self) -> None:
        self._owners: dict[Any, Process] = {}
        self._in_use: dict[Any, PoolProxiedConnection | None] = {}
        """By pool entry; `None` while connecting."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all engines inside the block."""
        event.listen(Engine, "do_connect", self._connecting)
        event.listen(Pool, "checkout", self._taken)
        event.listen(Pool, "checkin", self._returned)
        try:
            yield
        finally:
            event.remove(Engine, "do_connect", self._connecting)
            event.remove(Pool, "checkout", self._taken)
            event.remove(Pool, "checkin", self._returned)

    def is_in_use(self) -> bool:
        """Whether a running process waits for a database or has an open transaction."""
        return any(self._owners[entry].running for entry in self._in_use)

    async def close_of(self, process: Process) -> None:
        """Close the connections of a crashed process, which rolls back its transactions."""
        for entry in [entry for entry, owner in self._owners.items() if owner is process]:
            del self._owners[entry]
            proxy = self._in_use.pop(entry, None)
            await greenlet_spawn((proxy or entry).invalidate)

    def _connecting(self, _dialect: object, entry: ConnectionPoolEntry, _positional: object, _named: object) -> None:
        process = current_process()
        if process is not None and process.dead:
            raise ConnectionAbortedError(f"{process.name} has died")  # a dead process must not connect
        self._note(entry, None)

    def _taken(self, _connection: object, entry: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
        self._note(entry, proxy)

    def _note(self, entry: ConnectionPoolEntry, proxy: PoolProxiedConnection | None) -> None:
        process = current_process()
        if process is not None:
            self._owners[entry] = process
            self._in_use[entry] = proxy

    def _returned(self, _connection: object, entry: ConnectionPoolEntry) -> None:
        self._in_use.pop(entry, None)


class SqliteStore:
    """The configured store: a repository for each simulated process, and their connections."""

    def __init__(self) -> None:
        self.connections = Connections()
        self.repository = cast(IdempotencyRepository, _ProcessRepository())
        """Delegates to the repository of the calling process; for the test itself to that of the newest process."""

    async def close(self) -> None:
        """Close the connections that the test has used after its workers had ended, for example to read records."""
        await cast(_ProcessRepository, self.repository).dispose()

    def wrapping(self, flaky: FlakyStore, plan: CrashPlan) -> Callable[[IdempotencyRepository], IdempotencyRepository]:
        """Return a function that wraps the repository of a container.  `flaky` wraps `repository`."""

        def wrap(made: IdempotencyRepository) -> IdempotencyRepository:
            if not isinstance(made, SqlIdempotencyRepository):
                return made  # a fake of the test
            cast(_ProcessRepository, self.repository).add(made)
            return SqlStore(made, flaky, plan)

        return wrap


class _ProcessRepository:
    def __init__(self) -> None:
        self._of: dict[Process | None, SqlIdempotencyRepository] = {}

    async def dispose(self) -> None:
        """Close the idle connections of the newest process."""
        if None in self._of:
            await self._of[None].engine.dispose()

    def add(self, repository: SqlIdempotencyRepository) -> None:
        """Set the repository of the current process."""
        self._of[current_process()] = self._of[None] = repository

    def __getattr__(self, verb: str) -> Any:
        process = current_process()
        return getattr(self._of[process if process in self._of else None], verb)


class SqlStore(CrashingStore, SqlIdempotencyRepository):
    """A store that handlers' transactions can join, with crash points, and with the failures of `flaky`."""

    def __init__(self, inner: SqlIdempotencyRepository, flaky: FlakyStore, plan: CrashPlan) -> None:
        SqlIdempotencyRepository.__init__(self, inner.engine)
        CrashingStore.__init__(self, flaky, plan)
