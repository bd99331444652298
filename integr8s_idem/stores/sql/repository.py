"""Store records in an SQL table, with one statement for a whole batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from sqlalchemy import Executable, select
from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import (
    ApplicationError,
    CorruptRecordError,
    StoreConfigurationError,
    StoreError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from integr8s_idem.records import (
    Completion,
    Corrupt,
    Database,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY, Surveyed
from integr8s_idem.stores.sql import bulk_statements, record_admin, reserve_statements, statements
from integr8s_idem.stores.sql.batches import size_limited_batches, unique_key_batches
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.driver_cursors import (
    CompiledStatement,
    StatementResult,
    execute_autocommit,
    execute_in_transaction,
)
from integr8s_idem.stores.sql.engine import autocommit, writing
from integr8s_idem.stores.sql.errors import RecordHeldError, guarded, guarded_in_transaction, translate_in_transaction
from integr8s_idem.stores.sql.health import check_health, check_tables
from integr8s_idem.stores.sql.rows import (
    in_progress_elsewhere,
    is_final,
    microseconds,
    newly_reserved,
    outcome_parameters,
    record_of,
    reservation_parameters,
    verdict_of,
)
from integr8s_idem.stores.sql.savepoints import ForbidCommit, Undo, UndoOnError, undo
from integr8s_idem.stores.sql.schema import COMPLETED, FAILED, store
from integr8s_idem.stores.sql.sqlite_engine import handler_turn
from integr8s_idem.stores.sql.transaction_state import ensure_begun

_Fence: TypeAlias = tuple[str, int]
"""Key and fence of a reservation."""

_STATEMENT_ERRORS: Final = (DBAPIError, PendingRollbackError)
"""Errors of a statement in a transaction; the second one if its connection was lost before."""

_OTHER_DATABASE: Final = "the transaction is in another database than the store: use the same address for both"

PAGE: Final = 500
"""Number of rows in a page of a scan and in a batch of a purge."""


class SqlIdempotencyRepository:
    """`IdempotencyRepository` in a PostgreSQL, MySQL, MariaDB or SQLite database.

    Each batch is one statement in its own transaction (one for every 500 rows and 4 MiB of results).  Time comes from
    the clock of the database, read once per statement.  Expired rows count as absent at once; `purge` deletes them.

    The repository never disposes of the engine.  `integr8s-idem store migrate` creates the tables.  Call `ping` before
    the first other call, as a worker does when it starts: only `ping` checks the version of the tables, and other
    methods would read and write tables of a newer version as if they had the current one.

    Args:
        engine: A SQLAlchemy engine, such as `sql_engine` creates.
        timeout: Maximum duration of one call, including the waits for a connection and for locks; then it raises
            `StoreUnavailableError`.
        purge_every: How often a worker deletes expired rows; zero for never.

    Raises:
        StoreConfigurationError: This kind of database is not supported.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        timeout: Duration = timedelta(seconds=5),
        purge_every: Duration = timedelta(minutes=1),
    ) -> None:
        self.engine = engine
        self.purge_every = duration(purge_every, "purge_every")
        self._timeout = duration(timeout, "timeout")
        self._dialect = dialect_of(engine.dialect.name)
        self._reserving = bulk_statements.reserve_rows(self._dialect)
        self._reserving_new = (
            CompiledStatement(reserve_statements.reserve_new_row(self._dialect))
            if self._dialect.supports_arrays
            else None
        )
        self._settling = {status: bulk_statements.settle_rows(self._dialect, status) for status in (COMPLETED, FAILED)}
        self._has_indexes = False
        # Engines of the application that are known to connect to the same database.
        self._known_engines: WeakSet[Engine] = WeakSet()

    @property
    def database(self) -> Database:
        """The database, for metrics; whether MySQL is MariaDB is known after the first connection."""
        url, dialect = self.engine.url, self.engine.dialect
        if dialect.name == "sqlite":
            return Database("sqlite")
        system = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
        # PostgreSQL's drivers take the folder of a socket as a parameter.
        socket = url.query.get("host", "")
        address = url.host or (socket if isinstance(socket, str) and socket.startswith("/") else "")
        return Database(system, url.database or "", address, url.port)

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if len(requests) == 1:
            return await self._reserve(requests)
        verdicts: dict[int, Verdict] = {}
        # A statement cannot write a row twice, so duplicate keys go into separate statements.
        for indexes in unique_key_batches([request.key for request in requests]):
            part = [requests[index] for index in indexes]
            verdicts |= zip(indexes, await self._reserve(part), strict=True)
        return [verdicts[index] for index in range(len(requests))]

    async def _reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        times = self._dialect.time_parameters()
        parameters = [reservation_parameters(request) | times for request in requests]
        try:
            if len(requests) == 1 and (verdict := await self._reserve_new(requests[0], parameters[0])) is not None:
                return [verdict]
            result = await self._execute_rows("reserve", self._reserving, parameters)
            rows = {row.key: row for row in result.rows}
        except RecordHeldError:
            if len(requests) == 1:
                return [in_progress_elsewhere(requests[0])]
            # An open transaction locks one of the rows; the other requests need not wait for it.
            return [verdict for request in requests for verdict in await self._reserve([request])]
        if len(rows) < len(requests):
            # The rows were read after the upsert, and one of them was deleted in between.
            return [verdict for request in requests for verdict in await self._reserve([request])]
        now = times.get("now")
        found = [(request, rows[request.key]) for request in requests]
        return [verdict_of(request, row, row.read_at if now is None else now) for request, row in found]

    async def _reserve_new(self, request: ReserveRequest, parameters: dict[str, Any]) -> Verdict | None:
        """Reserve a new key.  Return `None` if an existing row may have to be changed, which takes the full upsert."""
        if self._reserving_new is None:
            return None
        [row] = (await self._execute("reserve", self._reserving_new, parameters)).rows
        if (reserved := newly_reserved(request, row)) is not None:
            return reserved
        verdict = verdict_of(request, row, row.read_at)
        return verdict if is_final(verdict, row, row.read_at) else None

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        return await self._change(
            "renew", reservations, lambda part: statements.renew_leases(self._dialect, part, microseconds(lease))
        )

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        def change(part: Sequence[Reserved]) -> list[Executable]:
            if delay > NO_DELAY:
                return statements.schedule_work(self._dialect, part, microseconds(delay), microseconds(retention))
            return statements.release_leases(self._dialect, part)

        return await self._change("release", reservations, change)

    async def _change(
        self, operation: str, reservations: Sequence[Reserved], change: Callable[[Sequence[Reserved]], list[Executable]]
    ) -> list[bool]:
        changed: set[_Fence] = set()
        for indexes in unique_key_batches([one.key for one in reservations]):
            part = [reservations[index] for index in indexes]
            update, *selects = change(part)
            async with self._connect(operation) as connection:
                result = await connection.execute(update, self._dialect.time_parameters())
                changed |= await self._changed(connection, part, result, *selects)
        return [(one.key, one.fence) in changed for one in reservations]

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._settle("complete", COMPLETED, completions)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._settle("fail", FAILED, failures)

    async def _settle(self, operation: str, status: int, settled: Sequence[Completion | Failure]) -> list[bool]:
        if len(settled) == 1:
            return [bool(await self._settle_part(operation, status, settled))]
        done: set[_Fence] = set()
        for indexes in unique_key_batches([one.reservation.key for one in settled]):
            for part in size_limited_batches([settled[index] for index in indexes]):
                done |= await self._settle_part(operation, status, part)
        return [(one.reservation.key, one.reservation.fence) in done for one in settled]

    async def _settle_part(self, operation: str, status: int, part: Sequence[Completion | Failure]) -> set[_Fence]:
        """Settle different keys in one statement, and return which of them have this outcome."""
        times = self._dialect.time_parameters()
        outcomes = [outcome_parameters(one) | times for one in part]
        if (await self._execute_rows(operation, self._settling[status], outcomes)).written == len(part):
            return {(one.reservation.key, one.reservation.fence) for one in part}
        query = statements.select_settled(self._dialect, status, [one.reservation for one in part])
        async with self._connect(operation) as connection:
            found = await connection.execute(query, self._dialect.time_parameters())
            return {(row.key, row.fence) for row in found}

    async def _changed(
        self, connection: AsyncConnection, part: Sequence[Reserved], result: Any, query: Executable | None = None
    ) -> set[_Fence]:
        """Return which of `part` were changed, from the rows of `result` or, without RETURNING, those of `query`."""
        if query is not None and result.rowcount == len(part):
            return {(one.key, one.fence) for one in part}
        if query is not None:
            result = await connection.execute(query, self._dialect.time_parameters())
        return {(row.key, row.fence) for row in result}

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        found: dict[str, IdempotencyRecord | Corrupt] = {}
        for start in range(0, len(keys), PAGE):
            part = keys[start : start + PAGE]
            found |= {row.key: record_of(row) for row in await self._read("get", statements.select_records, part)}
        records: list[IdempotencyRecord | None] = []
        for key in keys:
            answer = found.get(key)
            if isinstance(answer, Corrupt):
                raise CorruptRecordError(key, answer.reason)
            records.append(answer)
        return records

    async def delete(self, keys: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(keys), PAGE):
            statement = statements.delete_records(self._dialect, sorted(keys[start : start + PAGE]))
            async with self._connect("delete") as connection:
                deleted += (await connection.execute(statement, self._dialect.time_parameters())).rowcount
        return deleted

    async def purge(self, most: int = PAGE) -> int:
        """Delete up to `most` expired rows, and return the number of deleted rows.

        Raises:
            StoreError: The store is unavailable or refuses the call.
        """
        found: Any = statements.select_expired(self._dialect, most)
        async with (
            handler_turn(self.engine),
            self._connect("purge", together=bool(self._dialect.primary_key_hint)) as connection,
        ):
            if self._dialect.primary_key_hint:
                # MySQL does not support LIMIT in a subquery.
                found = sorted((await connection.execute(found)).scalars())
            statement = statements.delete_expired(self._dialect, found)
            return int((await connection.execute(statement, self._dialect.time_parameters())).rowcount)

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Iterate over all readable records whose key starts with `prefix`, in key order, page by page.

        Corrupt records are omitted; `reserve` and `get` report them.  Concurrent writes may or may not be included.
        """
        last = ""
        while True:
            rows = await self._read("scan", statements.select_page, prefix, last, PAGE)
            for row in rows:
                record = record_of(row)
                if isinstance(record, IdempotencyRecord):
                    yield record
            if len(rows) < PAGE:
                return
            last = rows[-1].key

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """Iterate like `scan`, in key order, but include corrupt records."""
        return record_admin.survey(self._read, prefix, holding)

    async def size(self) -> int | None:
        """Return the approximate number of rows, including expired ones; `None` if the database does not know."""
        return await record_admin.size(self._read)

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await record_admin.end_leases(self._connect, self._dialect, seen)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await record_admin.forget(self._connect, self._dialect, seen)

    async def count_active(self, prefix: str) -> int:
        ((count,),) = await self._read("count_active", statements.count_active, prefix)
        return int(count)

    async def ping(self) -> StoreHealth:
        """Check writes, the version of the tables, and settings that could lose data.

        Raises:
            StoreConfigurationError: The tables are missing, older or newer.
            StoreError: The store is unavailable or refuses the call.
        """
        async with self._connect("ping") as connection:
            health = await check_health(connection, self._dialect)
            if self._has_indexes:
                return health
            # Only until the indexes were found once: they do not disappear, and workers ping often.
            missing = await check_tables(connection)
        self._has_indexes = not missing
        return replace(health, warnings=(*health.warnings, *missing))

    def joined(self, held: Any) -> JoinedSqlRepository:
        """Return a repository that reads and writes in the transaction of `held`, a session or connection.

        Raises:
            ApplicationError: `held` is neither, or is a connection that is not open.
        """
        if isinstance(held, async_scoped_session):
            held = held()
        if not isinstance(held, AsyncSession | AsyncConnection):
            raise ApplicationError(
                f"to join a transaction, pass SQLAlchemy's AsyncSession or AsyncConnection, not {type(held).__name__}"
            )
        if isinstance(held, AsyncConnection):
            _opened(held)
        return JoinedSqlRepository(self, held)

    async def _read(self, operation: str, query: Callable[..., Executable], *arguments: Any) -> Sequence[Any]:
        async with self._connect(operation, reads_only=True) as connection:
            return (await connection.execute(query(self._dialect, *arguments), self._dialect.time_parameters())).all()

    async def _execute_rows(
        self, operation: str, statement: bulk_statements.BulkStatement, rows: bulk_statements.Rows
    ) -> StatementResult:
        if len(rows) == 1 and statement.single_row is not None:
            return await self._execute(operation, statement.single_row, rows[0])
        if statement.with_arrays is not None:
            return await self._execute(
                operation, statement.with_arrays, {name: [row[name] for row in rows] for name in rows[0]}
            )
        assert statement.execute_rows is not None
        async with self._connect(operation) as connection:
            return await statement.execute_rows(connection, rows)

    async def _execute(
        self, operation: str, statement: CompiledStatement, parameters: Mapping[str, Any]
    ) -> StatementResult:
        async with guarded(operation, self._timeout, self._dialect.name):
            return await execute_autocommit(self.engine, statement, parameters)

    @asynccontextmanager
    async def _connect(
        self, operation: str, *, together: bool = False, reads_only: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """Open a connection; `together` runs all statements of the block in one transaction."""
        opened = writing(self.engine) if together else autocommit(self.engine, reads_only=reads_only)
        async with guarded(operation, self._timeout, self._dialect.name), opened as connection:
            yield connection


class JoinedSqlRepository(SqlIdempotencyRepository):
    """A repository that reads and writes records in a transaction of the application, and never commits.

    The timeouts of the application's connection apply: in PostgreSQL, `lock_timeout` limits how long a duplicate waits
    for the transaction that holds its key before it gets `InProgress`.
    """

    def __init__(
        self, records: SqlIdempotencyRepository, held: AsyncSession | AsyncConnection | async_scoped_session[Any]
    ) -> None:
        # An instance exists for each delivery, so it shares the compiled statements and known engines of its parent.
        vars(self).update(vars(records))
        self._held = held
        self._connection: AsyncConnection | None = None
        self._transaction: RootTransaction | None = None
        """The transaction in which `_connection` was last seen."""
        self._undo: Undo | None = None
        """An undo point without any statements since."""

    async def connection(self) -> AsyncConnection:
        """Return the connection of the transaction.

        Raises:
            ApplicationError: The connection is closed, or the database is not in a transaction.
            StoreConfigurationError: The connection uses another database than the store.
        """
        if self._connection is not None and self._is_same_transaction():
            if isinstance(self._held, AsyncSession) and self._held.in_nested_transaction():
                await self._held.connection()  # sets the savepoint of `begin_nested` unless it is set
            return self._connection
        connection = self._held if isinstance(self._held, AsyncConnection) else await self._held.connection()
        sync_connection = _opened(connection)
        if dialect_of(sync_connection.dialect.name) is not self._dialect:
            raise StoreConfigurationError("join", _OTHER_DATABASE)
        await ensure_begun(connection, sync_connection)
        engine = sync_connection.engine
        if engine not in self._known_engines:
            if engine.url != self.engine.url:
                # Different URLs may lead to the same database.  The check uses the pool of the store, which callers
                # that wait here do not exhaust.
                await self._check_same_database(connection)
            self._known_engines.add(engine)
        self._connection, self._transaction = connection, sync_connection.get_transaction()
        return connection

    def _is_same_transaction(self) -> bool:
        """Whether the connection still is in the transaction in which it was last seen."""
        transaction = self._transaction
        connection = self._connection.sync_connection if self._connection else None
        if connection is None or transaction is None or not transaction.is_active or connection.closed:
            return False
        return connection.get_transaction() is transaction

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Undo the changes of the block if it raises an exception; the transaction continues.

        Raises:
            ApplicationError: The block tried to commit, so the whole transaction is rolled back.
        """
        return _RunSavepoint(self)

    def begin_undo(self, undoable: Undo) -> None:
        """Use `undoable`, which has just been set, to undo the next statement if necessary."""
        self._undo = undoable

    async def _check_same_database(self, connection: AsyncConnection) -> None:
        query = select(store.c.identity)
        try:
            async with guarded_in_transaction("join", self.engine.dialect.name):
                found = (await connection.execute(query)).scalar_one_or_none()
        except StoreConfigurationError as error:
            if error.code == Code.SCHEMA_MISSING:
                raise StoreConfigurationError("join", _OTHER_DATABASE) from error
            raise
        async with autocommit(self.engine, reads_only=True) as own:
            expected = (await own.execute(query)).scalar_one_or_none()
        if found != expected:
            raise StoreConfigurationError("join", _OTHER_DATABASE)

    async def _execute(
        self, operation: str, statement: CompiledStatement, parameters: Mapping[str, Any]
    ) -> StatementResult:
        if self._needs_savepoint(operation):
            async with self._connect(operation) as connection:
                return await execute_in_transaction(connection, statement, parameters)
        connection = await self.connection()
        undoable, self._undo = self._undo, None
        try:
            return await execute_in_transaction(connection, statement, parameters)
        except _STATEMENT_ERRORS as error:
            raise await self._translated(operation, error, undoable) from error

    @asynccontextmanager
    async def _connect(
        self, operation: str, *, together: bool = False, reads_only: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        connection = await self.connection()
        if self._needs_savepoint(operation):
            kind = self._dialect.name
            async with UndoOnError(connection, operation), guarded_in_transaction(operation, kind):
                yield connection
            return
        undoable, self._undo = self._undo, None
        try:
            yield connection
        except _STATEMENT_ERRORS as error:
            raise await self._translated(operation, error, undoable) from error

    def _needs_savepoint(self, operation: str) -> bool:
        """Whether the statement needs a savepoint of its own, so that a lock timeout undoes nothing else."""
        return operation == "reserve" and self._undo is None

    async def _translated(
        self, operation: str, error: DBAPIError | PendingRollbackError, undoable: Undo | None
    ) -> StoreError | TransactionAbortedError:
        """Translate an error; after a lock timeout, undo the statement if nothing else was executed since `undoable`.

        Raises:
            StoreError: The statement could not be undone.
        """
        if isinstance(error, PendingRollbackError):
            return StoreUnavailableError(operation, "the connection was lost during the transaction")
        translated = translate_in_transaction(operation, error, self._dialect.name)
        if undoable is not None and isinstance(translated, RecordHeldError):
            await undo(undoable, operation, translated, self._dialect.name)
        return translated


class _RunSavepoint:
    """Undoes the changes of a run that fails, and refuses commits within it."""

    # A class, because every run enters it, and a generator takes several times as long.

    def __init__(self, records: JoinedSqlRepository) -> None:
        self._records = records

    async def __aenter__(self) -> None:
        connection = await self._records.connection()
        self._changes = UndoOnError(connection, "savepoint")
        self._records.begin_undo(await self._changes.__aenter__())
        self._commits = ForbidCommit(connection)
        self._commits.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._changes.__aexit__(kind, error, trace)
        except BaseException as failed:
            self._commits.stop(failed)
            raise
        self._commits.stop(error)


def _opened(connection: AsyncConnection) -> Connection:
    """Return the connection that `connection` wraps.

    Raises:
        ApplicationError: It is not open.
    """
    found = connection.sync_connection
    if found is None or found.closed:
        raise ApplicationError(
            "the connection whose transaction is to be joined is not open: open it before the transaction, and close "
            "it afterwards"
        )
    return found
