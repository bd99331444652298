"""Administer the records of a table: survey them, end leases, and delete records."""

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
from integr8s_idem.stores.sql.rows import record_of, seen_version

ROWS: Final = 500
"""Maximum number of rows in one statement."""

_FILTERED_RANGE: Final = 20_000
"""Number of keys that one statement searches if a filter is set."""

Read = Callable[..., Awaitable[Sequence[Any]]]
"""Executes the query that a function creates from the remaining arguments."""


class Connect(Protocol):
    """Opens a connection; `together` runs all statements in one transaction."""

    def __call__(self, operation: str, *, together: bool = False) -> AbstractAsyncContextManager[AsyncConnection]: ...


async def survey(read: Read, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
    """Read records in ranges of keys.  Large results are read one by one."""
    after, limit = "", _FILTERED_RANGE if holding else ROWS
    while True:
        ((last, count),) = await read("survey", record_admin_statements.select_key_range, prefix, after, limit)
        if not count:
            return
        begin = after
        while begin < last:
            rows = await read("survey", record_admin_statements.select_survey, prefix, holding, begin, last, ROWS)
            yield Surveyed([record async for record in _with_long_results(read, rows)], 0)
            if len(rows) < ROWS:
                break
            begin = rows[-1].key
        yield Surveyed((), count)
        after = last


async def _with_long_results(read: Read, rows: Sequence[Any]) -> AsyncIterator[IdempotencyRecord | Corrupt]:
    for row in rows:
        if not row.is_long:
            yield record_of(row)
            continue
        for complete in await read("survey", statements.select_records, [row.key]):
            yield record_of(complete)


async def size(read: Read) -> int | None:
    """Return the approximate number of rows, including expired ones; `None` if the database does not know."""
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
    """Lock the rows that have not changed since they were seen, and change them in the same transaction."""
    changed: set[str] = set()
    for start in range(0, len(seen), ROWS):
        versions = [seen_version(record) for record in seen[start : start + ROWS]]
        async with connect(operation, together=True) as connection:
            found = await connection.execute(
                record_admin_statements.select_unchanged(dialect, versions), dialect.time_parameters()
            )
            keys = sorted(found.scalars())
            if keys:
                await connection.execute(change(dialect, keys), dialect.time_parameters())
                changed |= set(keys)
    return changed
