"""Findings of `doctor` for faults planted in a real PostgreSQL and in SQLite files."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path

import pytest
from dishka.provider import BaseProvider
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from examples.bookings import DatabaseProvider, bookings
from examples.bookings import platform as bookings_platform
from integr8s_idem import Platform, Service
from integr8s_idem.config import PostgresqlStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.application_checks import check_application
from integr8s_idem.doctor.permissions import access_of
from integr8s_idem.doctor.store_checks import check_repository
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.events import Message
from integr8s_idem.integrations.dishka import (
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.stores.factory import open_store
from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox, metadata, migrate, settings_engine, sql_engine
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.schema import VERSION
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.doctor import codes, found_in, found_in_store
from tests.support.postgres import PostgresServer

UNFIT_FOR_PRODUCTION = "fsync is off"
"""A finding that all tests have, because the test server runs with it for speed."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(keeps_commits=True) as server:
        yield server


@asynccontextmanager
async def engine_on(server: PostgresServer) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(server.url)
    yield engine
    await engine.dispose()


async def run(server: PostgresServer, *statements: str) -> None:
    async with engine_on(server) as engine, engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


@pytest.fixture
async def database(postgres: PostgresServer) -> PostgresServer:
    """A server with migrated tables, and without the user `worker`."""
    async with engine_on(postgres) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(engine)
    await run(postgres, "DROP ROLE IF EXISTS worker")
    return postgres


async def found_by(server: PostgresServer, user: str | None = None) -> list[Finding]:
    url = server.url.replace("postgresql+asyncpg", "postgresql").replace("postgres@", "")
    found = await found_in_store(PostgresqlStoreSettings(kind="postgresql", url=url, username=user or "postgres"))
    return [finding for finding in found if finding.what != UNFIT_FOR_PRODUCTION]


def granted() -> list[str]:
    lines = access_of(Settings(store=PostgresqlStoreSettings(kind="postgresql", username="worker"))).splitlines()
    return [line for line in lines if not line.startswith("--")]


async def test_a_correct_database_has_no_findings(database: PostgresServer) -> None:
    (seen,) = await found_by(database)

    assert (seen.code, seen.severity) == (Code.STORE_SEEN, Severity.INFO)


async def test_unsafe_server_settings_are_found(database: PostgresServer) -> None:
    await run(database, *granted(), "ALTER ROLE worker SET synchronous_commit = off")

    found = await found_by(database, "worker")

    assert codes(found) == ["store-late-sync"]
    assert found[1].what == "synchronous_commit is off"


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("DROP TABLE idempotency_records, idempotency_store", "schema-missing"),
        ("UPDATE idempotency_store SET version = version - 1", "schema-older"),
        (f"UPDATE idempotency_store SET version = {VERSION + 1}", "schema-newer"),
        ("DROP TABLE idempotency_records", "schema-missing"),
        ("ALTER TABLE idempotency_records DROP COLUMN trace", "schema-older"),
        ("ALTER TABLE idempotency_records SET UNLOGGED", "store-not-persistent"),
        ("DROP INDEX idempotency_records_expires_at", "schema-incomplete"),
        ("DROP INDEX idempotency_outbox_bucket", "schema-incomplete"),
    ],
)
async def test_a_foreign_schema_is_found(database: PostgresServer, statement: str, code: str) -> None:
    await run(database, statement)

    assert codes(await found_by(database)) == [code]


@pytest.mark.parametrize(
    "statement", ["DROP TABLE idempotency_outbox", "DELETE FROM idempotency_outbox_buckets WHERE bucket = 7"]
)
async def test_an_incomplete_outbox_is_found(database: PostgresServer, statement: str) -> None:
    await run(database, statement)

    (_, lost) = await found_by(database)

    assert (lost.code, lost.severity, lost.where) == (Code.SCHEMA_MISSING, Severity.ERROR, "outbox")
    assert "integr8s-idem store migrate" in str(lost)


async def test_a_user_without_transactional_handlers_needs_no_outbox(database: PostgresServer) -> None:
    await run(database, *(line for line in granted() if "outbox" not in line))

    assert codes(await found_by(database, "worker")) == []


async def test_an_unreachable_database_is_found(tmp_path: Path) -> None:
    url = f"postgresql:///postgres?host={tmp_path}"

    found = await found_in_store(PostgresqlStoreSettings(kind="postgresql", url=url))

    assert codes(found) == ["store-unavailable"]


async def test_an_unknown_user_is_found(database: PostgresServer) -> None:
    assert codes(await found_by(database, "unknown")) == ["store-credentials"]


async def test_the_printed_grants_are_enough(database: PostgresServer) -> None:
    await run(database, *granted())

    assert codes(await found_by(database, "worker")) == []


@pytest.mark.parametrize("permission", ["SELECT", "INSERT", "UPDATE", "DELETE"])
async def test_each_missing_grant_is_found(database: PostgresServer, permission: str) -> None:
    await run(database, *granted(), f"REVOKE {permission} ON idempotency_records FROM worker")

    found = await found_by(database, "worker")

    assert "store-permission" in codes(found)
    assert any("permission denied for table idempotency_records" in one.what for one in found)


@pytest.mark.parametrize("permission", ["SELECT", "UPDATE"])
async def test_checking_the_store_requires_the_documented_grants(database: PostgresServer, permission: str) -> None:
    await run(database, *granted(), f"REVOKE {permission} ON idempotency_store FROM worker")

    assert codes(await found_by(database, "worker")) == ["store-permission"]


OUTBOX = [
    ("SELECT", "TABLE idempotency_outbox"),
    ("INSERT", "TABLE idempotency_outbox"),
    ("DELETE", "TABLE idempotency_outbox"),
    ("USAGE", "SEQUENCE idempotency_outbox_id_seq"),
    ("SELECT", "TABLE idempotency_outbox_buckets"),
    ("UPDATE", "TABLE idempotency_outbox_buckets"),
]


async def relay_as_worker(server: PostgresServer) -> bool:
    """Use the outbox as transactional handlers and the relay do: write an event, claim it, read it, delete it."""
    engine = sql_engine(server.url.replace("postgres@", "worker@"))
    outbox, second = SqlOutbox(engine), timedelta(seconds=1)
    try:
        async with engine.begin() as connection:
            await put(connection, [Message("orders", b"k", b"{}", [], "1", "order_placed")])
        claim = await outbox.claim(second)
        assert claim is not None
        (waiting,) = await outbox.read(claim)
        return await outbox.done(claim, [waiting.id], second) and await outbox.count() == 0
    finally:
        await engine.dispose()


async def test_the_printed_grants_are_enough_for_the_outbox(database: PostgresServer) -> None:
    await run(database, *granted())

    assert await relay_as_worker(database)


@pytest.mark.parametrize(("permission", "what"), OUTBOX)
async def test_each_missing_grant_of_the_outbox_is_found(database: PostgresServer, permission: str, what: str) -> None:
    await run(database, *granted(), f"REVOKE {permission} ON {what} FROM worker")

    with pytest.raises((StoreConfigurationError, DBAPIError), match=r"lacks a permission|permission denied"):
        await relay_as_worker(database)


def booking_providers(settings: Settings) -> Sequence[BaseProvider]:
    """The providers of transactional handlers whose tables are in the same database as the records."""
    assert isinstance(settings.store, PostgresqlStoreSettings)
    return [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(bookings, transaction=AsyncSession),
        DatabaseProvider(settings.store.url.replace("postgresql", "postgresql+asyncpg")),
    ]


async def found_in_bookings(server: PostgresServer) -> list[Finding]:
    url = server.url.replace("postgresql+asyncpg", "postgresql").replace("postgres@", "")
    settings = Settings(store=PostgresqlStoreSettings(kind="postgresql", url=url, username="worker"))
    report = await check_application(Platform(Service("bookings", providers=booking_providers)), settings)
    assert [reading.topics for reading in report.readings] == [("payment_received",)]
    return report.findings


async def test_correct_transactional_handlers_have_no_findings(database: PostgresServer) -> None:
    await run(database, *granted())

    assert await found_in_bookings(database) == []
    async with engine_on(database) as engine:
        assert await SqlOutbox(engine).count() == 0


@pytest.mark.parametrize(("permission", "what"), OUTBOX)
async def test_a_missing_grant_of_the_outbox_is_found_for_transactional_handlers(
    database: PostgresServer, permission: str, what: str
) -> None:
    await run(database, *granted(), f"REVOKE {permission} ON {what} FROM worker")

    (only,) = await found_in_bookings(database)

    assert (only.code, only.severity, only.where) == (Code.STORE_PERMISSION, Severity.ERROR, "outbox")


async def test_checking_transactional_handlers_creates_no_sqlite_file(tmp_path: Path) -> None:
    file = tmp_path / "bookings.db"
    settings = Settings(store=SqliteStoreSettings(kind="sqlite", path=str(file)))

    report = await check_application(bookings_platform, settings)

    assert report.findings == []
    assert len(report.readings) == 2
    assert not file.exists()


async def test_transactional_handlers_on_sqlite_have_no_findings(tmp_path: Path) -> None:
    settings = Settings(store=SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "bookings.db")))
    async with open_store(settings.store, key_prefix="idempotency") as store:
        await store.ping()

    assert (await check_application(bookings_platform, settings)).findings == []


@pytest.mark.parametrize("age", [30, 90])
async def test_events_that_no_relay_publishes_are_found_after_a_minute(tmp_path: Path, age: int) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"))
    engine = settings_engine(settings)
    await migrate(engine)
    async with engine.begin() as connection:
        await put(connection, [Message("orders", b"k", b"{}", [], "1", "order")])
        earlier = outbox_table.c.created_at - age * 1_000_000
        await connection.execute(update(outbox_table).values(created_at=earlier))
    await engine.dispose()

    found = await found_in_store(settings)

    if age < 60:
        assert codes(found) == []
        return
    [waiting] = [finding for finding in found if finding.where == "outbox"]
    assert (waiting.code, waiting.severity) == (Code.OUTBOX_WAITING, Severity.WARNING)
    assert re.fullmatch(r"1 events wait, the oldest for (9\d|1\d\d) s", waiting.what)
    assert "integr8s-idem relay" in waiting.remedy


async def test_an_unavailable_store_is_reported_once_for_its_outbox(tmp_path: Path) -> None:
    text = f'[store]\nkind = "postgresql"\nurl = "postgresql:///postgres?host={tmp_path}"\n'
    platform = Platform(Service("bookings", providers=booking_providers))

    found = await found_in(text + '[kafka]\nbootstrap_servers = "127.0.0.1:1"\n', tmp_path, platform)

    assert codes(found).count("store-unavailable") == 1


async def test_a_missing_sqlite_file_is_not_an_error_and_is_not_created(tmp_path: Path) -> None:
    file = tmp_path / "idem.db"

    found = await found_in_store(SqliteStoreSettings(kind="sqlite", path=str(file)))

    assert codes(found) == []
    assert not file.exists()


@pytest.mark.parametrize("folder", ["nowhere", "file", "/proc"])
async def test_a_sqlite_file_that_workers_cannot_create_is_found(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / folder / "idem.db"))

    (only,) = await found_in_store(settings)

    assert (only.code, only.severity, only.where) == (Code.STORE_REFUSED, Severity.ERROR, "store.path")
    assert only.cost == "workers cannot start"


async def test_the_doctor_does_not_change_the_journal_mode_of_a_sqlite_file(tmp_path: Path) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"))
    async with open_store(settings, key_prefix="idempotency") as store:
        await store.ping()
    with closing(sqlite3.connect(settings.path)) as file:
        file.execute("PRAGMA journal_mode = DELETE")

    found = await found_in_store(settings)

    with closing(sqlite3.connect(settings.path)) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert codes(found) == []
    assert [one.remedy for one in found if one.code is Code.STORE_JOURNAL] == ["a worker enables WAL at start"]


async def test_a_locked_sqlite_file_is_found_with_a_remedy(tmp_path: Path) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"), lock_timeout_seconds=0.1)
    async with open_store(settings, key_prefix="idempotency") as store:
        await store.ping()
    with closing(sqlite3.connect(settings.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        (only,) = await found_in_store(settings)

    assert only.code is Code.STORE_UNAVAILABLE
    assert only.remedy == "wait until it ends, or increase store.lock_timeout_seconds"


async def test_a_correct_sqlite_file_has_no_findings(tmp_path: Path) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"))
    engine = settings_engine(settings)
    await migrate(engine)
    await engine.dispose()

    assert codes(await found_in_store(settings)) == []


@pytest.mark.parametrize("version", [0, 9])
async def test_an_outdated_sqlite_file_is_found_unless_workers_migrate_it(tmp_path: Path, version: int) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"))
    engine = settings_engine(settings)
    await migrate(engine)
    await engine.dispose()
    with sqlite3.connect(settings.path) as file:
        file.execute("UPDATE idempotency_store SET version = ?", [version])
    file.close()

    assert codes(await found_in_store(settings)) == (["schema-newer"] if version else [])


async def test_a_file_that_is_not_a_database_is_found(tmp_path: Path) -> None:
    file = tmp_path / "idem.db"
    await asyncio.to_thread(file.write_bytes, b"no database" * 1000)

    found = await found_in_store(SqliteStoreSettings(kind="sqlite", path=str(file)))

    assert codes(found) == ["store-refused"]


async def test_a_sqlite_file_without_a_write_ahead_log_is_found(tmp_path: Path) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"))
    async with open_store(settings, key_prefix="idempotency") as store:
        await store.ping()
    with sqlite3.connect(settings.path) as file:
        file.execute("PRAGMA journal_mode = DELETE")
    file.close()
    engine = create_async_engine(f"sqlite+aiosqlite:///{settings.path}")  # an engine of the application

    found = await check_repository(SqlIdempotencyRepository(engine), Settings(store=settings), time.time)
    await engine.dispose()

    assert "store-journal" in codes(found)


async def test_in_memory_sqlite_is_found(tmp_path: Path) -> None:
    (only,) = await found_in('[store]\nkind = "sqlite"\npath = ":memory:"\n', tmp_path)

    assert (only.code, only.severity, only.where) == (Code.SETTINGS_MISTAKE, Severity.ERROR, "store.path")
