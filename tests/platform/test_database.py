from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from services.database import Database, now, sagas, turns
from services.settings import PlatformSection

COUNT_UP = """
import asyncio, sys
from sqlalchemy import update
from services.database import Database, insert, turns

async def main(url, times):
    database = Database(url)
    await database.open()
    for _ in range(times):
        async with database.transaction() as connection:
            first = insert(connection, turns).values(name="test", number=1)
            await connection.execute(
                first.on_conflict_do_update(index_elements=["name"], set_={"number": turns.c.number + 1})
            )
    await database.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_four_processes_create_the_tables_and_write_concurrently(settings: PlatformSection) -> None:
    command = [sys.executable, "-W", "error", "-c", COUNT_UP, settings.database_url, "50"]
    here = Path(__file__).parents[2]

    processes = [await asyncio.create_subprocess_exec(*command, cwd=here) for _ in range(4)]
    statuses = [await process.wait() for process in processes]

    database = Database(settings.database_url)
    async with database.reading() as connection:
        number = (await connection.execute(select(turns.c.number).with_for_update())).scalar_one()
    await database.close()
    assert statuses == [0, 0, 0, 0]
    assert number == 200


async def test_writers_in_one_process_wait_for_each_other(database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute(turns.insert().values(name="test", number=0))

    async def count() -> None:
        async with database.transaction() as connection:
            number = (await connection.execute(select(turns.c.number).with_for_update())).scalar_one()
            await asyncio.sleep(0)
            await connection.execute(update(turns).values(number=number + 1))

    await asyncio.gather(*(count() for _ in range(40)))

    async with database.reading() as connection:
        assert (await connection.execute(select(turns.c.number))).scalar_one() == 40


async def test_an_exception_rolls_back_the_transaction(database: Database) -> None:
    async def write_and_die() -> None:
        async with database.transaction() as connection:
            await connection.execute(turns.insert().values(name="test", number=0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await write_and_die()

    async with database.reading() as connection:
        assert (await connection.execute(select(func.count()).select_from(turns))).scalar_one() == 0


async def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    async with database.transaction() as writing:
        await writing.execute(turns.insert().values(name="test", number=0))
        async with asyncio.timeout(5), database.reading() as connection:
            assert (await connection.execute(select(func.count()).select_from(turns))).scalar_one() == 0


async def test_a_cancelled_writer_releases_its_lock(database: Database) -> None:
    inside = asyncio.Event()

    async def write() -> None:
        async with database.transaction() as connection:
            await connection.execute(turns.insert().values(name="test", number=0))
            inside.set()
            await asyncio.Event().wait()

    writer = asyncio.create_task(write())
    await inside.wait()
    writer.cancel()
    await asyncio.wait([writer])

    async with asyncio.timeout(5), database.transaction() as connection:
        assert (await connection.execute(select(func.count()).select_from(turns))).scalar_one() == 0


async def test_an_execution_has_one_saga_for_each_name(database: Database) -> None:
    row = {"execution_id": "e1", "name": "execution", "state": "created", "reason": "", "correlation_id": ""}

    async def write(saga_id: str) -> None:
        async with database.transaction() as connection:
            await connection.execute(sagas.insert().values(saga_id=saga_id, **row))

    await write("s1")

    with pytest.raises(IntegrityError):
        await write("s2")


async def test_the_clock_is_that_of_the_database(database: Database) -> None:
    async with database.reading() as connection:
        seconds = (await connection.execute(select(now()))).scalar_one()

    assert 1_700_000_000 < seconds < 10_000_000_000


def test_an_unsupported_database_is_refused_without_showing_its_password() -> None:
    with pytest.raises(ValidationError) as refused:
        PlatformSection(database_url="mysql+aiomysql://user:secret@host/name")

    assert "mysql+aiomysql" in refused.value.errors()[0]["msg"]
    assert "secret" not in refused.value.errors()[0]["msg"]
