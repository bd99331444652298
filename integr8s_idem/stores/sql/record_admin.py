"""What people do with the records of a table: go through all of them, end leases, forget."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from sqlalchemy import Executable
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus
from integr8s_idem.stores import Surveyed
from integr8s_idem.stores.sql import record_admin_statements, statements
from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.rows import seen_version, record_of

ROWS: Final = 500
"""Of one statement."""

_STRETCH_SEARCHED: Final = 20_000
"""Keys that one statement goes by where few of them are wanted."""

Read = Callable[..., Awaitable[Sequence[Any]]]
"""Executes what a function of `statements` makes of further arguments."""


class Connect(Protocol):
    """Gives a connection, for one transaction if `together`."""

    def __call__(self, operation: str, *, together: bool = False) -> AbstractAsyncContextManager[AsyncConnection]: ...


async def survey(read: Read, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
    """By key, in stretches.  Large results are read one by one."""
    after, most = "", _STRETCH_SEARCHED if holding else ROWS
    while True:
        ((last, passed),) = await read("survey", record_admin_statements.select_key_range, prefix, after, most)
        if not passed:
            return
        begin = after
        while begin < last:
            rows = await read("survey", record_admin_statements.select_survey, prefix, holding, begin, last, ROWS)
            yield Surveyed([record async for record in _whole(read, rows)], 0)
            if len(rows) < ROWS:
                break
            begin = rows[-1].key
        yield Surveyed((), passed)
        after = last


async def _whole(read: Read, rows: Sequence[Any]) -> AsyncIterator[IdempotencyRecord | Corrupt]:
    for row in rows:
        if not row.is_long:
            yield record_of(row)
            continue
        for again in await read("survey", statements.select_records, [row.key]):
            yield record_of(again)


async def size(read: Read) -> int | None:
    """About how many rows there are, those that have expired included, as far as the database has counted."""
    found = (await read("size", record_admin_statements.estimate_size))[0][0]
    return None if found is None or found < 0 else int(found)


async def end_leases(connect: Connect, dialect: Dialect, seen: Sequence[IdempotencyRecord]) -> list[bool]:
    held = [record for record in seen if record.status is IdempotencyStatus.PROCESSING]
    ended = await _change("end_leases", connect, dialect, held, record_admin_statements.end_leases)
    return [record.key in ended for record in seen]


async def forget(connect: Connect, dialect: Dialect, seen: Sequence[IdempotencyRecord]) -> list[bool]:
    gone = await _change("forget", connect, dialect, seen, statements.delete_records)
    return [record.key in gone for record in seen]


async def _change(
    operation: str,
    connect: Connect,
    dialect: Dialect,
    seen: Sequence[IdempotencyRecord],
    change: Callable[[Dialect, Sequence[str]], Executable],
) -> set[str]:
    """Change the rows that are still what was seen: they are locked, and then changed, in one transaction."""
    changed: set[str] = set()
    for start in range(0, len(seen), ROWS):
        marks = [seen_version(record) for record in seen[start : start + ROWS]]
        async with connect(operation, together=True) as connection:
            found = await connection.execute(record_admin_statements.select_unchanged(dialect, marks), dialect.time_parameters())
            keys = sorted(found.scalars())
            if keys:
                await connection.execute(change(dialect, keys), dialect.time_parameters())
                changed |= set(keys)
    return changed
