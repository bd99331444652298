from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from services.database import Database, results
from services.events import ExecutionCompleted, ExecutionFailed, ExecutionTimeout, Outcome, ResourceUsage
from services.result_processor.results import Results, Status
from services.settings import PlatformSection

USAGE = ResourceUsage(wall_seconds=1.5, cpu_seconds=0.5, peak_memory_kib=9_000)
COMPLETED = ExecutionCompleted(execution_id="e1", stdout="out", stderr="err", resource_usage=USAGE)
FAILED = ExecutionFailed(execution_id="e1", exit_code=3, error_type="script_error", resource_usage=USAGE)
TIMEOUT = ExecutionTimeout(execution_id="e1", timeout_seconds=5, resource_usage=USAGE)


async def store(database: Database, key: str, outcome: Outcome) -> Status | None:
    """Store an outcome as the handler does, in its own transaction."""
    async with database.transaction() as connection:
        return await Results(connection).store(key, outcome)


async def rows(database: Database) -> list[tuple[object, ...]]:
    columns = (results.c.status, results.c.exit_code, results.c.error_type, results.c.stdout, results.c.wall_seconds)
    async with database.reading() as connection:
        return [tuple(row) for row in await connection.execute(select(*columns))]


@pytest.mark.parametrize(
    ("outcome", "row"),
    [
        (COMPLETED, ("completed", 0, None, "out", 1.5)),
        (FAILED, ("failed", 3, "script_error", "", 1.5)),
        (TIMEOUT, ("timeout", None, None, "", 1.5)),
    ],
    ids=["completed", "failed", "timeout"],
)
async def test_the_stored_result_matches_the_event(
    database: Database, outcome: Outcome, row: tuple[object, ...]
) -> None:
    assert await store(database, "k1", outcome) == row[0]
    assert await rows(database) == [row]


async def test_a_rerun_stores_nothing_and_returns_the_same_status(database: Database) -> None:
    """The worker died between the commit and publishing."""
    lost = await store(database, "k1", COMPLETED)

    assert await store(database, "k1", COMPLETED) == lost == "completed"
    assert len(await rows(database)) == 1


async def test_the_first_outcome_of_an_execution_counts(database: Database) -> None:
    await store(database, "k1", COMPLETED)

    assert await store(database, "k2", FAILED) is None
    assert [row[0] for row in await rows(database)] == ["completed"]


async def test_concurrent_workers_that_store_one_result_return_the_same_status(
    database: Database, settings: PlatformSection
) -> None:
    other = Database(settings.database_url)

    statuses = await asyncio.gather(*(store(one, "k1", COMPLETED) for one in [database, other] * 5))

    await other.close()
    assert set(statuses) == {"completed"}
    assert len(await rows(database)) == 1
