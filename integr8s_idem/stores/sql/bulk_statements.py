"""Many rows, each with parameters of its own, in one statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

from sqlalchemy import Executable, Result
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler

from integr8s_idem.stores.sql import statements
from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.driver_cursors import Answer, Wording, heard
from integr8s_idem.stores.sql.schema import PROCESSING, records

Rows: TypeAlias = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Bulk:
    """A statement for any number of rows: in one of the two forms."""

    of_arrays: Wording | None = None
    """Told the rows as one array a column."""
    of_rows: Callable[[AsyncConnection, Rows], Awaitable[Answer]] | None = None
    of_one: Wording | None = None
    """The same for a single row, where there is a shorter form for that."""


def reserving(dialect: Dialect) -> Bulk:
    """`statements.reserving` for all rows at once; answers with what it left behind."""
    statement: Executable = statements.reserving(dialect)
    upsert = _Repeated(statement)

    async def returned(connection: AsyncConnection, rows: Rows) -> Answer:
        return heard(await connection.execute(statement, rows))

    async def read_again(connection: AsyncConnection, rows: Rows) -> Answer:
        await upsert(connection, rows)
        return heard(await connection.execute(statements.reserved(dialect, [row["key"] for row in rows])))

    if dialect.arrays:
        return Bulk(of_arrays=Wording(statement))
    if dialect.returns:
        return Bulk(of_rows=returned, of_one=Wording(statement))
    return Bulk(of_rows=read_again)


def settling(dialect: Dialect, status: int) -> Bulk:
    """`statements.settling` for all rows at once."""
    statement = statements.settling(dialect, status)

    async def many(connection: AsyncConnection, rows: Rows) -> Answer:
        return heard(await connection.execute(statement, rows))

    async def joined(connection: AsyncConnection, rows: Rows) -> Answer:
        outcomes = " UNION ALL ".join([f"SELECT {', '.join(['%s'] * len(_OUTCOME))}"] * len(rows))
        told = chain.from_iterable([row["of_key"].encode(), *(row[name] for name in _OUTCOME[1:])] for row in rows)
        return heard(await _sent(connection, _settling_joined(dialect, status, outcomes), told))

    if dialect.arrays:
        return Bulk(of_arrays=Wording(statement), of_one=Wording(statements.settling_one(dialect, status)))
    if dialect.returns:
        return Bulk(of_rows=many, of_one=Wording(statement.returning(records.c.key)))
    return Bulk(of_rows=joined)


_OUTCOME: Final = tuple(statements.OUTCOME)


def _settling_joined(dialect: Dialect, status: int, outcomes: str) -> str:
    """MySQL's: its driver would send a statement a row, and it has no VALUES that MariaDB has, too.

    The outcomes come first, in the order of their keys, and lead to the rows by the primary key: no other is locked.
    """
    # The type of a result is that of its column: without it, MariaDB 11.4 keeps the length of a result in two bytes and
    # cuts longer ones off without a word.
    names = ", ".join(f"{'result' if name == 'of_result' else 'NULL'} AS {name}" for name in _OUTCOME)
    return (  # our own words
        f"UPDATE (SELECT {names} FROM {records.name} WHERE FALSE UNION ALL {outcomes}) AS new "  # noqa: S608
        f"STRAIGHT_JOIN {records.name} AS old FORCE INDEX (PRIMARY) ON old.`key` = new.of_key "
        f"SET old.status = {status}, old.settled_at = {dialect.now}, old.expires_at = {dialect.now} + new.ttl, "
        "old.lease_until = NULL, old.owner = '', old.result = new.of_result, old.content_type = new.of_content_type, "
        "old.result_dropped = new.of_result_dropped, old.error = new.of_error "
        f"WHERE old.fence = new.of_fence AND old.token = new.of_token AND old.status = {PROCESSING} "
        f"AND old.expires_at > {dialect.now}"
    )


class _Repeated:
    """An INSERT of one row, compiled once, with its row repeated: SQLAlchemy does that only where rows are returned."""

    def __init__(self, statement: Any) -> None:
        self._statement = statement
        self._compiled: SQLCompiler | None = None

    async def __call__(self, connection: AsyncConnection, rows: Rows) -> Result[Any]:
        # By the dialect of a connection: what it may write depends on the server's version.
        compiled: SQLCompiler = self._compiled or self._statement.compile(dialect=connection.dialect)
        self._compiled = compiled
        head, values, rest = compiled.string.partition(" VALUES ")
        row, again, tail = rest.partition(_behind_the_row(rest))
        names, fixed = compiled.positiontup or [], compiled.construct_params(dict.fromkeys(rows[0]))
        of_the_row = names[: row.count("%s")]
        told = [{**fixed, **one, "key": one["key"].encode()}[name] for one in rows for name in of_the_row]
        told += [fixed[name] for name in names[len(of_the_row) :]]
        return await _sent(connection, f"{head}{values}{', '.join([row] * len(rows))}{again}{tail}", told)


def _behind_the_row(text: str) -> str:
    return " AS new ON DUPLICATE " if " AS new ON DUPLICATE " in text else " ON DUPLICATE "


async def _sent(connection: AsyncConnection, text: str, told: Iterable[Any]) -> Result[Any]:
    return await connection.exec_driver_sql(text, tuple(told))
