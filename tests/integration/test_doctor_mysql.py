"""Findings of `doctor` for faults planted in a real MariaDB."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.config import MysqlStoreSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.permissions import access_of
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.events import Message
from integr8s_idem.stores.sql import SqlOutbox, metadata, migrate, settings_engine, sql_engine
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.schema import VERSION
from tests.support.doctor import Typed, codes, found_in_store
from tests.support.mariadb import MariadbServer, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())

SECRET = "hunter2-hunter2"


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariadbServer]:
    # With a binary log, which cannot be enabled while the server runs.
    with MariadbServer(keeps_commits=True, settings={"log-bin": "log", "sync-binlog": "1"}) as server:
        yield server


@asynccontextmanager
async def engine_on(server: MariadbServer) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(server.url)
    yield engine
    await engine.dispose()


async def run(server: MariadbServer, *statements: str) -> None:
    async with engine_on(server) as engine, engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


@pytest.fixture
async def database(mariadb: MariadbServer) -> MariadbServer:
    """A server with migrated tables, and without the user `worker`."""
    async with engine_on(mariadb) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(engine)
    await run(mariadb, "DROP USER IF EXISTS worker")
    return mariadb


def settings_of(server: MariadbServer, user: str | None = None, password: str = SECRET) -> MysqlStoreSettings:
    url = server.url.replace("mysql+aiomysql", "mysql")
    if user is not None:
        url = url.replace("idem@", "")
    return MysqlStoreSettings(
        kind="mysql", url=url, username=user, password=SecretStr(password) if user else None, lock_timeout_seconds=1
    )


async def found_by(server: MariadbServer, user: str | None = None, password: str = SECRET) -> list[Finding]:
    return await found_in_store(settings_of(server, user, password))


def granted(server: MariadbServer) -> list[str]:
    lines = access_of(Settings(store=settings_of(server, "worker"))).replace("PASSWORD", SECRET).splitlines()
    return [line for line in lines if not line.startswith("--")]


async def test_a_correct_database_has_no_findings(database: MariadbServer) -> None:
    (seen,) = await found_by(database)

    assert (seen.code, seen.severity) == (Code.STORE_SEEN, Severity.INFO)
    assert "MariaDB" in seen.what


@pytest.mark.parametrize(
    ("planted", "fixed", "code", "message"),
    [
        ("innodb_flush_log_at_trx_commit = 2", "innodb_flush_log_at_trx_commit = 1", "store-late-sync", "is 2"),
        ("sync_binlog = 0", "sync_binlog = 1", "store-late-sync", "is 0"),
        ("read_only = ON", "read_only = OFF", "store-replica", "read-only"),
    ],
)
async def test_unsafe_server_settings_are_found(
    database: MariadbServer, planted: str, fixed: str, code: str, message: str
) -> None:
    await run(database, f"SET GLOBAL {planted}")
    found = await found_by(database)
    await run(database, f"SET GLOBAL {fixed}")

    assert codes(found) == [code]
    assert message in found[1].what


async def test_a_read_only_server_is_found(database: MariadbServer) -> None:
    await run(database, *granted(database), "SET GLOBAL read_only = ON")
    (only,) = await found_by(database, "worker")
    await run(database, "SET GLOBAL read_only = OFF")

    assert (only.code, only.severity) == (Code.STORE_REPLICA, Severity.ERROR)


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("DROP TABLE idempotency_records, idempotency_store", "schema-missing"),
        ("DROP TABLE idempotency_records", "schema-missing"),
        ("ALTER TABLE idempotency_records DROP COLUMN trace", "schema-older"),
        ("UPDATE idempotency_store SET version = version - 1", "schema-older"),
        (f"UPDATE idempotency_store SET version = {VERSION + 1}", "schema-newer"),
        ("ALTER TABLE idempotency_records ENGINE = Aria", "store-not-persistent"),
    ],
)
async def test_a_foreign_schema_is_found(database: MariadbServer, statement: str, code: str) -> None:
    await run(database, statement)

    assert codes(await found_by(database)) == [code]


async def test_an_unreachable_database_is_found(tmp_path: Path) -> None:
    url = f"mysql://localhost/test?unix_socket={tmp_path}/none"

    found = await found_in_store(MysqlStoreSettings(kind="mysql", url=url))

    assert codes(found) == ["store-unavailable"]


async def test_a_wrong_password_is_found_and_not_shown(database: MariadbServer) -> None:
    await run(database, *granted(database))

    (only,) = await found_by(database, "worker", "wr0ng-" + SECRET)

    assert (only.code, only.severity) == (Code.STORE_CREDENTIALS, Severity.ERROR)
    assert SECRET not in f"{only}{only!r}"


async def test_missing_permissions_for_a_database_are_found(database: MariadbServer) -> None:
    await run(database, granted(database)[0])

    assert codes(await found_by(database, "worker")) == ["store-permission"]


async def test_the_printed_grants_are_enough(database: MariadbServer) -> None:
    await run(database, *granted(database))

    assert codes(await found_by(database, "worker")) == []
    assert await relay_as_worker(database)


@pytest.mark.parametrize("permission", ["SELECT", "INSERT", "UPDATE", "DELETE"])
async def test_each_missing_grant_is_found(database: MariadbServer, permission: str) -> None:
    await run(database, *granted(database), f"REVOKE {permission} ON idempotency_records FROM worker")

    found = await found_by(database, "worker")

    assert set(codes(found)) == {"store-permission"}
    assert any(f"{permission} command denied" in one.what for one in found)


@pytest.mark.parametrize("permission", ["SELECT", "UPDATE"])
async def test_checking_the_store_requires_the_documented_grants(database: MariadbServer, permission: str) -> None:
    await run(database, *granted(database), f"REVOKE {permission} ON idempotency_store FROM worker")

    (only,) = await found_by(database, "worker")

    assert only.code is Code.STORE_PERMISSION
    assert f"{permission} command denied" in only.what


async def relay_as_worker(server: MariadbServer) -> bool:
    """Use the outbox as transactional handlers and the relay do: write an event, claim it, read it, delete it."""
    engine = settings_engine(settings_of(server, "worker"))
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


@pytest.mark.parametrize(
    ("permission", "table"),
    [
        ("SELECT", "idempotency_outbox"),
        ("INSERT", "idempotency_outbox"),
        ("DELETE", "idempotency_outbox"),
        ("SELECT", "idempotency_outbox_buckets"),
        ("UPDATE", "idempotency_outbox_buckets"),
    ],
)
async def test_each_missing_grant_of_the_outbox_is_found(database: MariadbServer, permission: str, table: str) -> None:
    await run(database, *granted(database), f"REVOKE {permission} ON {table} FROM worker")

    with pytest.raises((StoreConfigurationError, DBAPIError), match=f"{permission} command denied"):
        await relay_as_worker(database)


@pytest.mark.parametrize(("shift", "way"), [(-60.0, "ahead of"), (60.0, "behind")])
async def test_clock_skew_is_found(database: MariadbServer, shift: float, way: str) -> None:
    found = await found_in_store(settings_of(database), lambda: time.time() + shift)

    (skew,) = [one for one in found if one.code is Code.CLOCK_SKEW]
    assert way in skew.what


@pytest.mark.parametrize(
    ("planted", "fixed", "status", "code"),
    [
        ("SET GLOBAL sync_binlog = 0", "SET GLOBAL sync_binlog = 1", 1, "store-late-sync"),
        ("RENAME TABLE idempotency_store TO old", "RENAME TABLE old TO idempotency_store", 2, "schema-missing"),
        ("SELECT 1", "SELECT 1", 0, "store-seen"),
    ],
)
def test_the_command_exits_with_its_status(
    database: MariadbServer, typed: Typed, planted: str, fixed: str, status: int, code: str
) -> None:
    asyncio.run(run(database, planted))
    answer = typed(settings_of(database))
    asyncio.run(run(database, fixed))

    assert (answer.status, answer.codes[0]) == (status, code)
