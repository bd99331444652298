"""Records in a table: one statement for a whole batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeAlias
from weakref import WeakSet

from sqlalchemy import Executable, select
from sqlalchemy.engine import Engine, RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import ApplicationError, CorruptRecordError, StoreConfigurationError
from integr8s_idem.records import (
    Completion,
    Corrupt,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import Surveyed
from integr8s_idem.stores.sql import bulk_statements, record_admin, statements
from integr8s_idem.stores.sql.batches import unique_key_batches, size_limited_batches
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.driver_cursors import StatementResult, CompiledStatement, execute_autocommit, execute_in_transaction
from integr8s_idem.stores.sql.engine import autocommit, writing
from integr8s_idem.stores.sql.errors import RecordHeldError, guarded, guarded_in_transaction, translate_in_transaction
from integr8s_idem.stores.sql.health import check_health, check_tables
from integr8s_idem.stores.sql.rows import (
    in_progress_elsewhere,
    microseconds,
    outcome_parameters,
    record_of,
    is_final,
    verdict_of,
    reservation_parameters,
)
from integr8s_idem.stores.sql.savepoints import Undo, forbid_commit, undo, undo_on_error
from integr8s_idem.stores.sql.schema import COMPLETED, FAILED, store
from integr8s_idem.stores.sql.sqlite_engine import handler_turn
from integr8s_idem.stores.sql.transaction_state import ensure_begun

_Mark: TypeAlias = tuple[str, int]
"""Key and fence of a reservation."""

_ELSEWHERE: Final = "the transaction is in another database than the store: give both the same address"

PAGE: Final = 500
"""Rows of one page of a scan, and of one batch of a purge."""


class SqlIdempotencyRepository:
    """`IdempotencyRepository` in a database of PostgreSQL, MySQL, MariaDB or SQLite.

    A batch is one statement in a transaction of its own (per 500 rows and 4 MiB of results); time is the
    database's, read once per statement.  Expired rows are as good as absent at once; `purge` takes them away.

    The engine is the caller's: the repository never disposes of it.  `sql_engine` makes one that is fit for it.
    The tables must be there: `integr8s-idem store migrate` makes them.  `ping` alone listeners of which version they are,
    as a worker does at its start: call it before the first of your own calls.  No other verb asks, and tables of a
    newer version would be read and written as if they were of this one.

    Args:
        engine: An engine of SQLAlchemy; `sql_engine` makes one from settings.
        timeout: Longest wait for one call before `StoreUnavailableError`, a connection and locks included.
        purge_every: How often a worker is to take expired rows away; zero for never.

    Raises:
        StoreConfigurationError: No store for this kind of database.
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
        self._reserving_new = CompiledStatement(statements.reserve_new_row(self._dialect)) if self._dialect.supports_arrays else None
        self._settling = {status: bulk_statements.settle_rows(self._dialect, status) for status in (COMPLETED, FAILED)}
        self._has_indexes = False
        # Engines of the application's that were found to lead to the database of this one.
        self._same: WeakSet[Engine] = WeakSet()

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        # A statement cannot write one row twice: the same key comes again in the next one.
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
            rows = {row.key: row for row in (await self._execute_rows("reserve", self._reserving, parameters)).rows}
        except RecordHeldError:
            if len(requests) == 1:
                return [in_progress_elsewhere(requests[0])]
            # One of them is in somebody's transaction: the others need not wait for that.
            return [verdict for request in requests for verdict in await self._reserve([request])]
        if len(rows) < len(requests):
            # They were read behind the decision, and somebody has deleted one of them just now.
            return [verdict for request in requests for verdict in await self._reserve([request])]
        now = times.get("now")
        found = [(request, rows[request.key]) for request in requests]
        return [verdict_of(request, row, row.asked_at if now is None else now) for request, row in found]

    async def _reserve_new(self, request: ReserveRequest, wish: dict[str, Any]) -> Verdict | None:
        """The verdict on a key that is not there, or that nobody may take; `None` if that is still to be asked."""
        if self._reserving_new is None:
            return None
        [row] = (await self._execute("reserve", self._reserving_new, wish)).rows
        verdict = verdict_of(request, row, row.asked_at)
        return verdict if is_final(verdict, row, row.asked_at) else None

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        length = microseconds(lease)
        return await self._change("renew", reservations, lambda part: statements.renew_leases(self._dialect, part, length))

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        return await self._change("release", reservations, lambda part: statements.release_leases(self._dialect, part))

    async def _change(
        self, operation: str, reservations: Sequence[Reserved], change: Callable[[Sequence[Reserved]], list[Executable]]
    ) -> list[bool]:
        changed: set[_Mark] = set()
        for indexes in unique_key_batches([one.key for one in reservations]):
            part = [reservations[index] for index in indexes]
            writes, *asks = change(part)
            async with self._connect(operation) as connection:
                written = await connection.execute(writes, self._dialect.time_parameters())
                changed |= await self._marks(connection, part, written, *asks)
        return [(one.key, one.fence) in changed for one in reservations]

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._settle("complete", COMPLETED, completions)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._settle("fail", FAILED, failures)

    async def _settle(self, operation: str, status: int, settled: Sequence[Completion | Failure]) -> list[bool]:
        done: set[_Mark] = set()
        for indexes in unique_key_batches([one.reservation.key for one in settled]):
            for part in size_limited_batches([settled[index] for index in indexes]):
                times = self._dialect.time_parameters()
                outcomes = [outcome_parameters(one) | times for one in part]
                reservations = [one.reservation for one in part]
                if (await self._execute_rows(operation, self._settling[status], outcomes)).written == len(part):
                    done |= {(one.key, one.fence) for one in reservations}
                    continue
                asks = statements.select_settled(self._dialect, status, reservations)
                async with self._connect(operation) as connection:
                    found = await connection.execute(asks, self._dialect.time_parameters())
                    done |= {(row.key, row.fence) for row in found}
        return [(one.reservation.key, one.reservation.fence) in done for one in settled]

    async def _marks(
        self, connection: AsyncConnection, part: Sequence[Reserved], written: Any, asks: Executable | None = None
    ) -> set[_Mark]:
        """Which of `part` were written: all, or those that `asks` answers with, or else `written` itself."""
        if asks is not None and written.rowcount == len(part):
            return {(one.key, one.fence) for one in part}
        if asks is not None:
            written = await connection.execute(asks, self._dialect.time_parameters())
        return {(row.key, row.fence) for row in written}

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
        """Take away up to `most` rows that have expired; the number of those that were.

        Raises:
            StoreError: As for every verb.
        """
        found: Any = statements.select_expired(self._dialect, most)
        async with (
            handler_turn(self.engine),
            self._connect("purge", together=bool(self._dialect.primary_key_hint)) as connection,
        ):
            if self._dialect.primary_key_hint:
                # MySQL takes no LIMIT in a subquery.
                found = sorted((await connection.execute(found)).scalars())
            statement = statements.delete_expired(self._dialect, found)
            return int((await connection.execute(statement, self._dialect.time_parameters())).rowcount)

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Every readable record whose key starts with `prefix`, in the order of their keys, page by page.

        Records that cannot be read are left out: `reserve` and `get` report them.  What is written meanwhile
        may or may not be seen.
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
        """As `scan`, in the order of keys, and with the records that cannot be read."""
        return record_admin.survey(self._read, prefix, holding)

    async def size(self) -> int | None:
        """About how many rows there are, those that have expired included; `None` until the database has counted."""
        return await record_admin.size(self._read)

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await record_admin.end_leases(self._connect, self._dialect, seen)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await record_admin.forget(self._connect, self._dialect, seen)

    async def count_active(self, prefix: str) -> int:
        ((count,),) = await self._read("count_active", statements.count_active, prefix)
        return int(count)

    async def ping(self) -> StoreHealth:
        """Whether the database takes writes and its tables are of our version, and what its settings would lose.

        Raises:
            StoreConfigurationError: They are not there, older or newer.
            StoreError: As for every verb.
        """
        async with self._connect("ping") as connection:
            health = await check_health(connection, self._dialect)
            if self._has_indexes:
                return health
            # Until they have been seen: an index does not get lost while workers run, and they ask often.
            missing = await check_tables(connection)
        self._has_indexes = not missing
        return replace(health, warnings=(*health.warnings, *missing))

    def joined(self, held: Any) -> JoinedSqlRepository:
        """The records as seen and written by the transaction that `held`, a session or connection, is in.

        Raises:
            ApplicationError: It is neither, or a connection that is not open.
        """
        if isinstance(held, async_scoped_session):
            held = held()
        if not isinstance(held, AsyncSession | AsyncConnection):
            raise ApplicationError(
                "a transaction is joined by SQLAlchemy's AsyncSession or AsyncConnection, "
                f"and not {type(held).__name__}"
            )
        if isinstance(held, AsyncConnection):
            _refuse_closed(held)
        return JoinedSqlRepository(self, held)

    async def _read(self, operation: str, ask: Callable[..., Executable], *arguments: Any) -> Sequence[Any]:
        async with self._connect(operation, reads_only=True) as connection:
            return (await connection.execute(ask(self._dialect, *arguments), self._dialect.time_parameters())).all()

    async def _execute_rows(self, operation: str, statement: bulk_statements.BulkStatement, rows: bulk_statements.Rows) -> StatementResult:
        if len(rows) == 1 and statement.single_row is not None:
            return await self._execute(operation, statement.single_row, rows[0])
        if statement.with_arrays is not None:
            return await self._execute(
                operation, statement.with_arrays, {name: [row[name] for row in rows] for name in rows[0]}
            )
        assert statement.execute_rows is not None
        async with self._connect(operation) as connection:
            return await statement.execute_rows(connection, rows)

    async def _execute(self, operation: str, statement: CompiledStatement, told: Mapping[str, Any]) -> StatementResult:
        async with guarded(operation, self._timeout, self._dialect.name):
            return await execute_autocommit(self.engine, statement, told)

    @asynccontextmanager
    async def _connect(
        self, operation: str, *, together: bool = False, reads_only: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """`together`: what is said in the block is one transaction."""
        said = writing(self.engine) if together else autocommit(self.engine, reads_only=reads_only)
        async with guarded(operation, self._timeout, self._dialect.name), said as connection:
            yield connection


class JoinedSqlRepository(SqlIdempotencyRepository):
    """The records of a store as a transaction of the application's sees and writes them.  It never commits.

    Its limits of time are those of the application's connection: in PostgreSQL, `lock_timeout` says how long a
    duplicate waits for the transaction of its twin before it is told `InProgress`.
    """

    def __init__(
        self, records: SqlIdempotencyRepository, held: AsyncSession | AsyncConnection | async_scoped_session[Any]
    ) -> None:
        # There is one for each delivery: statements that are compiled, and engines that are known, stay its parent's.
        vars(self).update(vars(records))
        self._held = held
        self._connection: AsyncConnection | None = None
        self._transaction: RootTransaction | None = None
        """That of the connection, when we looked at it last."""
        self._undo: Undo | None = None
        """Undoes what has happened since its making, as long as that is nothing."""

    async def connection(self) -> AsyncConnection:
        """The connection that the transaction is on.

        Raises:
            ApplicationError: It is closed, or there is no transaction in the database, although SQLAlchemy says so.
            StoreConfigurationError: It leads to another database than the store's.
        """
        if self._connection is not None and self._still_in_it():
            return self._connection
        connection = self._held if isinstance(self._held, AsyncConnection) else await self._held.connection()
        _refuse_closed(connection)
        if dialect_of(connection.dialect.name) is not self._dialect:
            raise StoreConfigurationError("join", _ELSEWHERE)
        await ensure_begun(connection)
        theirs = connection.engine.sync_engine
        if theirs.url != self.engine.url and theirs not in self._same:
            # By another name it may be the same.  The pools are two: ours is not used up by those who wait here.
            await self._compare(connection)
            self._same.add(theirs)
        self._connection = connection
        self._transaction = connection.sync_connection.get_transaction() if connection.sync_connection else None
        return connection

    def _still_in_it(self) -> bool:
        """Whether the connection is in the transaction that it was in when we looked at it."""
        ours, one = self._transaction, self._connection.sync_connection if self._connection else None
        return bool(one and ours and ours.is_active and not one.closed and one.get_transaction() is ours)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """What happens in the block is undone by an exception, and the transaction goes on.

        Raises:
            ApplicationError: The block tried to commit: all of the transaction is rolled back.
        """
        connection = await self.connection()
        async with forbid_commit(connection), undo_on_error(connection, "savepoint") as self._undo:
            yield

    async def _compare(self, connection: AsyncConnection) -> None:
        asked = select(store.c.identity)
        try:
            async with guarded_in_transaction("join", self.engine.dialect.name):
                there = (await connection.execute(asked)).scalar_one_or_none()
        except StoreConfigurationError as error:
            if error.code == Code.SCHEMA_MISSING:
                raise StoreConfigurationError("join", _ELSEWHERE) from error
            raise
        async with autocommit(self.engine, reads_only=True) as own:
            ours = (await own.execute(asked)).scalar_one_or_none()
        if there != ours:
            raise StoreConfigurationError("join", _ELSEWHERE)

    async def _execute(self, operation: str, statement: CompiledStatement, told: Mapping[str, Any]) -> StatementResult:
        async with self._connect(operation) as connection:
            return await execute_in_transaction(connection, statement, told)

    @asynccontextmanager
    async def _connect(
        self, operation: str, *, together: bool = False, reads_only: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        connection, kind = await self.connection(), self._dialect.name
        behind, self._undo = self._undo, None
        if operation == "reserve" and behind is None:
            # A row that somebody holds must cost us this statement only, not the transaction.
            async with undo_on_error(connection, operation), guarded_in_transaction(operation, kind):
                yield connection
            return
        try:
            yield connection
        except DBAPIError as error:
            ours = translate_in_transaction(operation, error, kind)
            if behind is not None and isinstance(ours, RecordHeldError):
                # Nothing else has happened since: it takes no second savepoint.
                await undo(behind, operation, ours, kind)
            raise ours from error


def _refuse_closed(connection: AsyncConnection) -> None:
    if connection.sync_connection is None or connection.closed:
        raise ApplicationError(
            "the connection whose transaction is to be joined is not open: enter its block first, and close it "
            "behind that of the transaction"
        )
