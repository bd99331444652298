"""Statements that write many rows at once, each with its own parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

from sqlalchemy import Executable, Result
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler

from integr8s_idem.stores.sql import reserve_statements, statements
from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.driver_cursors import CompiledStatement, StatementResult, result_of
from integr8s_idem.stores.sql.schema import PROCESSING, records

Rows: TypeAlias = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class BulkStatement:
    """A statement for any number of rows: either `with_arrays` or `execute_rows` is set."""

    with_arrays: CompiledStatement | None = None
    """Takes the rows as one array per column."""
    execute_rows: Callable[[AsyncConnection, Rows], Awaitable[StatementResult]] | None = None
    single_row: CompiledStatement | None = None
    """A shorter form for a single row, if there is one."""


def reserve_rows(dialect: Dialect) -> BulkStatement:
    """Return `reserve_statements.reserve_rows` for many rows; its result contains the rows after the statement."""
    statement: Executable = reserve_statements.reserve_rows(dialect)
    upsert = _MultiRowInsert(statement)

    async def insert_returning(connection: AsyncConnection, rows: Rows) -> StatementResult:
        return result_of(await connection.execute(statement, rows))

    async def insert_and_select(connection: AsyncConnection, rows: Rows) -> StatementResult:
        await upsert(connection, rows)
        return result_of(
            await connection.execute(reserve_statements.select_reserved(dialect, [row["key"] for row in rows]))
        )

    if dialect.supports_arrays:
        return BulkStatement(with_arrays=CompiledStatement(statement))
    if dialect.supports_returning:
        return BulkStatement(execute_rows=insert_returning, single_row=CompiledStatement(statement))
    return BulkStatement(execute_rows=insert_and_select)


def settle_rows(dialect: Dialect, status: int) -> BulkStatement:
    """Return `statements.settle_rows` for many rows."""
    statement = statements.settle_rows(dialect, status)

    async def update_each(connection: AsyncConnection, rows: Rows) -> StatementResult:
        return result_of(await connection.execute(statement, rows))

    async def update_joined(connection: AsyncConnection, rows: Rows) -> StatementResult:
        outcomes = " UNION ALL ".join([f"SELECT {', '.join(['%s'] * len(_OUTCOME))}"] * len(rows))
        parameters = chain.from_iterable(
            [row["of_key"].encode(), *(row[name] for name in _OUTCOME[1:])] for row in rows
        )
        return result_of(await _execute_sql(connection, _settle_by_join(dialect, status, outcomes), parameters))

    if dialect.supports_arrays:
        single_row = CompiledStatement(statements.settle_one_row(dialect, status))
        return BulkStatement(with_arrays=CompiledStatement(statement), single_row=single_row)
    if dialect.supports_returning:
        single_row = CompiledStatement(statement.returning(records.c.key))
        return BulkStatement(execute_rows=update_each, single_row=single_row)
    return BulkStatement(execute_rows=update_joined)


_OUTCOME: Final = tuple(statements.OUTCOME_TYPES)


def _settle_by_join(dialect: Dialect, status: int, outcomes: str) -> str:
    """Return an UPDATE for MySQL and MariaDB: their driver sends one per row, and no VALUES syntax works in both.

    The join starts with the outcomes, sorted by key, and finds the records by primary key, so no other row is locked.
    """
    # The first SELECT gives each result the type of its column.  Without it, MariaDB 11.4 stores the length of a result
    # in two bytes and silently truncates longer ones.
    names = ", ".join(f"{'result' if name == 'of_result' else 'NULL'} AS {name}" for name in _OUTCOME)
    return (  # contains no input
        f"UPDATE (SELECT {names} FROM {records.name} WHERE FALSE UNION ALL {outcomes}) AS new "  # noqa: S608
        f"STRAIGHT_JOIN {records.name} AS old FORCE INDEX (PRIMARY) ON old.`key` = new.of_key "
        f"SET old.status = {status}, old.settled_at = {dialect.now}, old.expires_at = {dialect.now} + new.ttl, "
        "old.lease_until = NULL, old.owner = '', old.result = new.of_result, old.content_type = new.of_content_type, "
        "old.result_dropped = new.of_result_dropped, old.error = new.of_error "
        f"WHERE old.fence = new.of_fence AND old.token = new.of_token AND old.status = {PROCESSING} "
        f"AND old.expires_at > {dialect.now}"
    )


class _MultiRowInsert:
    """A compiled INSERT of one row whose VALUES are repeated; SQLAlchemy only does that with RETURNING."""

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._compiled: SQLCompiler | None = None

    async def __call__(self, connection: AsyncConnection, rows: Rows) -> Result[Any]:
        # Use the dialect of a connection: the syntax depends on the version of the server.
        compiled: SQLCompiler = self._compiled or self._statement.compile(dialect=connection.dialect)
        self._compiled = compiled
        head, values, rest = compiled.string.partition(" VALUES ")
        row, separator, tail = rest.partition(_text_after_row(rest))
        names, defaults = compiled.positiontup or [], compiled.construct_params(dict.fromkeys(rows[0]))
        row_names = names[: row.count("%s")]
        parameters = [{**defaults, **one, "key": one["key"].encode()}[name] for one in rows for name in row_names]
        parameters += [defaults[name] for name in names[len(row_names) :]]
        sql = f"{head}{values}{', '.join([row] * len(rows))}{separator}{tail}"
        return await _execute_sql(connection, sql, parameters)


def _text_after_row(text: str) -> str:
    return " AS new ON DUPLICATE " if " AS new ON DUPLICATE " in text else " ON DUPLICATE "


async def _execute_sql(connection: AsyncConnection, text: str, parameters: Iterable[Any]) -> Result[Any]:
    return await connection.exec_driver_sql(text, tuple(parameters))
