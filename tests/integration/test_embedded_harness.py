"""The harness over real sockets, with the application's own store and transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from examples.bookings import PaymentReceived, platform
from integr8s_idem.embedded import EmbeddedKafka, EmbeddedServers
from integr8s_idem.errors import ApplicationError, StoreConfigurationError
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing import EmbeddedHarness


@pytest.fixture
def kafka() -> Iterator[EmbeddedServers]:
    server = EmbeddedKafka()
    server.start()
    yield EmbeddedServers(bootstrap_servers=server.bootstrap_servers, redis_url=None)
    server.stop()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "bookings.db"


@pytest.fixture
def harness(kafka: EmbeddedServers, database: Path) -> EmbeddedHarness:
    store = {"kind": "sqlite", "path": str(database)}
    return EmbeddedHarness(platform, servers=kafka, overrides={"store": store}, own_store=True)


async def test_a_transactional_handler_books_once_and_its_outbox_is_drained(
    harness: EmbeddedHarness, database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with harness:
        await harness.publish(PaymentReceived(account="1", amount=30))
        mailed = capsys.readouterr().out
        await harness.redeliver_all()

        assert (harness.handled, harness.duplicates) == (2, 1)
    engine = sql_engine(f"sqlite+aiosqlite:///{database}")
    async with engine.connect() as connection:
        balance = (await connection.execute(text("SELECT balance FROM accounts"))).scalar_one()
    await engine.dispose()

    assert balance == 30
    assert mailed == "mail: account 1 has 30\n"


async def test_the_error_of_a_failing_service_is_raised(kafka: EmbeddedServers, tmp_path: Path) -> None:
    store = {"kind": "sqlite", "path": str(tmp_path / "missing" / "bookings.db")}
    harness = EmbeddedHarness(platform, "mails", servers=kafka, overrides={"store": store}, own_store=True)

    with pytest.raises(StoreConfigurationError):
        await harness.__aenter__()


async def test_a_harness_that_cannot_begin_leaves_no_tasks_behind(kafka: EmbeddedServers, database: Path) -> None:
    store = {"kind": "sqlite", "path": str(database)}
    harness = EmbeddedHarness(platform, servers=kafka, fakes={int: 1}, overrides={"store": store}, own_store=True)
    before = asyncio.all_tasks()

    with pytest.raises(ApplicationError, match="no service provides the type of these fakes: int"):
        await harness.__aenter__()

    assert (asyncio.all_tasks(), harness.entered) == (before, False)


async def test_a_harness_that_has_ended_may_be_entered_again(harness: EmbeddedHarness) -> None:
    for _ in range(2):
        async with harness:
            await harness.publish(PaymentReceived(account="2", amount=1))
            await harness.redeliver_all()
            assert (harness.handled, harness.duplicates) == (2, 1)
    for use in (harness.publish(), harness.redeliver_all(), harness.settled()):
        with pytest.raises(RuntimeError, match="has ended"):
            await use
