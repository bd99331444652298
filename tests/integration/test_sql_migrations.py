"""Migrations of databases with missing, outdated or externally created tables."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, Table, insert, select, text, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable

from integr8s_idem.diagnostics import Code, StoreWarning
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.events import Message
from integr8s_idem.records import Previous, Reserved
from integr8s_idem.stores.sql import (
    SqlIdempotencyRepository,
    SqlOutbox,
    ddl,
    metadata,
    migrate,
    migrate_in,
    sql_engine,
    writing,
)
from integr8s_idem.stores.sql.migrations import MIGRATIONS
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.schema import VERSION
from integr8s_idem.stores.sql.schema import store as schema_store
from integr8s_idem.testing.store_under_test import wish
from tests.support.databases import KINDS, url_of

DIALECTS = {"mysql": mysql, "postgresql": postgresql, "sqlite": sqlite}


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """An engine for a database without the tables of the store."""
    engine = sql_engine(url_of(request.param, request, tmp_path))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
    yield engine
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
    await engine.dispose()


async def run(engine: AsyncEngine, statement: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(statement))


async def works(engine: AsyncEngine) -> bool:
    """Whether the store and the outbox work."""
    store, outbox = SqlIdempotencyRepository(engine), SqlOutbox(engine)
    await store.ping()
    [verdict] = await store.reserve([wish("a")])
    await outbox.check()
    async with writing(engine) as connection:
        await put(connection, [Message("orders", f"{n}".encode(), b"{}", [], f"{n}", "order") for n in range(40)])
    claim = await outbox.claim(timedelta(minutes=1))
    return claim is not None and len(await outbox.read(claim)) == 40 and isinstance(verdict, Reserved)


async def test_a_migration_completes_tables_that_were_created_from_the_metadata(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    done = await migrate(engine)

    assert done == list(MIGRATIONS)
    assert done[-1].version == VERSION
    assert await works(engine)
    assert await migrate(engine) == []


async def test_an_alembic_revision_can_migrate_in_its_own_transaction(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        first = await connection.run_sync(lambda one: migrate_in(one, up_to=1))
    async with engine.begin() as connection:
        second = await connection.run_sync(lambda one: migrate_in(one, up_to=2))
    async with engine.begin() as connection:
        rest = await connection.run_sync(lambda one: migrate_in(one, up_to=4))

    assert [*first, *second, *rest] == list(MIGRATIONS)
    assert await works(engine)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_database_of_an_earlier_version_is_refused_until_it_is_migrated(
    engine: AsyncEngine, version: int
) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(lambda one: migrate_in(one, up_to=version))

    with pytest.raises(StoreConfigurationError, match=f"has version {version}, .* store migrate") as refused:
        await SqlIdempotencyRepository(engine).ping()
    done = await migrate(engine)

    assert refused.value.code == Code.SCHEMA_OLDER
    assert done == list(MIGRATIONS[version:])
    assert await works(engine)


async def test_workers_of_version_1_continue_on_a_migrated_database(engine: AsyncEngine) -> None:
    await migrate(engine)
    async with engine.connect() as connection:
        version = await connection.scalar(select(schema_store.c.version))
    row = {"key": "old", "status": 1, "attempt": 1, "fence": 1, "token": b"t" * 16, "expires_at": 2**51}
    row |= {"lease_until": 1, "previous": 0, "owner": "old", "result_dropped": False, "error": ""}
    columns = [column for column in metadata.tables["idempotency_records"].c if column.name in row]
    of_version_1 = Table("idempotency_records", MetaData(), *(Column(one.name, one.type) for one in columns))
    async with writing(engine) as connection:
        await connection.execute(insert(of_version_1), row)

    [verdict] = await SqlIdempotencyRepository(engine).reserve([wish("old")])

    assert version == 1, "the version that workers of version 1 check"
    assert isinstance(verdict, Reserved)
    assert (verdict.attempt, verdict.lapsed, verdict.lapsed_alone) == (2, 1, 0)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_the_sql_since_a_version_migrates_a_database_of_that_version(engine: AsyncEngine, version: int) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(lambda one: migrate_in(one, up_to=version))

    for step in ddl(engine.dialect, since=version).split(";\n"):
        if step.strip():
            await run(engine, step)

    assert await migrate(engine) == []
    assert await works(engine)


async def test_relays_publish_what_workers_of_version_3_write(engine: AsyncEngine) -> None:
    await migrate(engine)
    of_version_3 = Table(
        "idempotency_outbox",
        MetaData(),
        *(Column(one.name, one.type) for one in metadata.tables["idempotency_outbox"].c if one.name != "created_at"),
    )
    row = {"bucket": 0, "event_id": "old", "event_type": "order", "topic": "orders", "message_key": b"k"}
    async with writing(engine) as connection:
        values = {**row, "value": b"{}", "headers": b"[]"}
        await connection.execute(insert(of_version_3).values(values).inline())

    outbox = SqlOutbox(engine)
    backlog, claim = await outbox.backlog(), await outbox.claim(timedelta(minutes=1))

    assert (backlog.count, backlog.age) == (1, timedelta(0)), "the age is unknown"
    assert claim is not None
    assert [waiting.message.event_id for waiting in await outbox.read(claim)] == ["old"]


TAKEN_OVER = {"attempt": 3, "previous": 2, "lease_until": 1}
"""Columns that a worker of version 1 writes when it takes a row over, before it crashes."""

RESERVED_ANEW = {"attempt": 1, "previous": 0, "lease_until": 1}
"""Columns that a worker of version 1 writes into an expired row, before it crashes."""


@pytest.mark.parametrize("written", [TAKEN_OVER, RESERVED_ANEW])
async def test_the_history_of_another_attempt_is_ignored(engine: AsyncEngine, written: dict[str, int]) -> None:
    await migrate(engine)
    store = SqlIdempotencyRepository(engine)
    await reserve_twice_alone(store, engine)
    await write_as_version_1(engine, fence=2**51, token=b"1" * 16, **written)

    [seen] = await store.get(["a"])
    [verdict] = await store.reserve([wish("a", alone=True)])
    [record] = await store.get(["a"])

    assert seen is not None
    assert record is not None
    assert (seen.lapsed, seen.lapsed_alone, seen.alone) == (0, 0, False)
    assert isinstance(verdict, Reserved)
    assert (verdict.attempt, verdict.lapsed, verdict.lapsed_alone) == (written["attempt"] + 1, 1, 0)
    assert (record.lapsed, record.lapsed_alone, record.alone) == (1, 0, True)


async def test_the_history_of_another_attempt_is_ignored_in_a_row_that_was_released(engine: AsyncEngine) -> None:
    await migrate(engine)
    store = SqlIdempotencyRepository(engine)
    await reserve_twice_alone(store, engine)
    await write_as_version_1(engine, fence=2**51, token=b"1" * 16, **TAKEN_OVER | {"lease_until": None})

    [verdict] = await store.reserve([wish("a")])

    assert isinstance(verdict, Reserved)
    assert (verdict.attempt, verdict.previous, verdict.lapsed) == (4, Previous.RELEASED, 0)


async def reserve_twice_alone(store: SqlIdempotencyRepository, engine: AsyncEngine) -> None:
    """Create a row with an attempt that lapsed while alone, and a current attempt that runs alone."""
    await store.reserve([wish("a", alone=True)])
    await write_as_version_1(engine, lease_until=1)
    [verdict] = await store.reserve([wish("a", alone=True)])
    assert isinstance(verdict, Reserved)
    assert (verdict.lapsed, verdict.lapsed_alone) == (1, 1)


async def write_as_version_1(engine: AsyncEngine, **columns: Any) -> None:
    async with writing(engine) as connection:
        await connection.execute(update(metadata.tables["idempotency_records"]).values(columns))


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        ("DROP TABLE idempotency_outbox", "idempotency_outbox"),
        ("DROP TABLE idempotency_outbox_buckets", "idempotency_outbox_buckets"),
        ("DELETE FROM idempotency_outbox_buckets WHERE bucket > 3", "rows of idempotency_outbox_buckets"),
        ("DELETE FROM idempotency_outbox_buckets", "rows of idempotency_outbox_buckets"),
    ],
)
async def test_a_migration_restores_an_incomplete_outbox(engine: AsyncEngine, damage: str, missing: str) -> None:
    await migrate(engine)
    await run(engine, damage)

    with pytest.raises(StoreConfigurationError, match="store migrate") as refused:
        await SqlOutbox(engine).check()
    done = await migrate(engine)

    assert refused.value.code == Code.SCHEMA_MISSING
    assert [migration.description for migration in done] == [f"recreate missing {missing}"]
    assert await works(engine)


@pytest.mark.parametrize("damage", ["DROP TABLE idempotency_records", "DELETE FROM idempotency_store"])
async def test_an_incomplete_store_is_refused_and_a_migration_restores_it(engine: AsyncEngine, damage: str) -> None:
    await migrate(engine)
    await run(engine, damage)

    with pytest.raises(StoreConfigurationError, match="store migrate"):
        await works(engine)
    await migrate(engine)

    assert await works(engine)


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
@pytest.mark.parametrize("index", ["idempotency_records_expires_at", "idempotency_outbox_bucket"])
async def test_a_ping_warns_about_a_missing_index_and_a_migration_restores_it(engine: AsyncEngine, index: str) -> None:
    await migrate(engine)
    await run(engine, f"DROP INDEX {index}")

    health = await SqlIdempotencyRepository(engine).ping()
    [warning] = [warning for warning in health.warnings if "index" in warning]
    done = await migrate(engine)

    assert isinstance(warning, StoreWarning)
    assert warning.code == Code.SCHEMA_INCOMPLETE
    assert index in warning.what
    assert [migration.description for migration in done] == [f"recreate missing {index}"]
    assert await migrate(engine) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_migrations_create_the_current_tables(kind: str) -> None:
    """If this fails, the schema needs a new version: add version_N.*.sql, and do not change released files."""
    dialect = DIALECTS[kind].dialect()
    expected: list[CreateTable | CreateIndex] = [CreateTable(table) for table in metadata.sorted_tables]
    expected += [CreateIndex(index) for table in metadata.sorted_tables for index in table.indexes]

    steps = [normalized(step) for migration in MIGRATIONS for step in migration.steps(kind)]
    created = with_columns_added(steps)

    assert sorted(created) == sorted(normalized(str(element.compile(dialect=dialect))) for element in expected)
    assert all(step in normalized(ddl(dialect)) for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sql_explains_its_columns_on_every_database(kind: str) -> None:
    sql = ddl(DIALECTS[kind].dialect())

    assert "lease_until is null once released or settled" in sql
    assert "headers: JSON, pairs of a name and Base64" in sql
    assert not any(column.comment for table in metadata.sorted_tables for column in table.columns)


def with_columns_added(steps: list[str]) -> list[str]:
    """Merge the steps that add a column into those that create the tables."""
    created = [step for step in steps if not step.startswith("ALTERTABLE")]
    for step in steps:
        if added := re.fullmatch(r"ALTERTABLE(\w+?)ADDCOLUMN(.+)", step):
            [at] = [at for at, other in enumerate(created) if other.startswith(f"CREATETABLE{added[1]}(")]
            head, key, tail = created[at].rpartition("PRIMARYKEY")
            created[at] = f"{head}{added[2]},{key}{tail}"
    return created


def normalized(sql: str) -> str:
    return re.sub(r"--.*", "", sql).translate({ord(space): None for space in " \t\n"})
