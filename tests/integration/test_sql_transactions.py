"""Handlers whose writes, outgoing events and outcome commit together, on real databases."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from integr8s_idem import Attempt, EventRouter, IdempotencyConfig, Outgoing, Settings
from integr8s_idem.config import KafkaSettings, OnKeyReused, ServiceSettings
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import (
    ApplicationError,
    LeaseLostError,
    StoreConfigurationError,
    StoreError,
    TransactionAbortedError,
)
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.records import Completed, Failed, IdempotencyStatus
from integr8s_idem.stores.sql import migrate, sql_engine
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.consumer import ServiceWorker
from tests.support.databases import KINDS, url_of
from tests.support.ledger_shop import LedgerShop, OrderCharged, OrderPlaced, charge, open_ledger_shop
from tests.support.postgres import PostgresServer


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


router = EventRouter()


@router.on(OrderPlaced)
async def bill(event: OrderPlaced, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> str:
    if event.order_id != "free":
        await charge(session, event)
    outgoing.publish(OrderCharged(order_id=event.order_id))
    if event.order_id.startswith("bad"):
        raise ConnectionError("the bank is away")
    return f"receipt-{event.order_id}"


by_connection = EventRouter()


@by_connection.on(OrderPlaced)
async def bill_by_connection(
    event: OrderPlaced, connection: FromDishka[AsyncConnection], outgoing: FromDishka[Outgoing]
) -> str:
    await charge(connection, event)
    outgoing.publish(OrderCharged(order_id=event.order_id))
    return f"receipt-{event.order_id}"


@pytest.fixture
async def shop(url: str) -> AsyncIterator[LedgerShop]:
    async with open_ledger_shop(url, router) as shop:
        yield shop


async def test_writes_outcome_and_events_commit_together(shop: LedgerShop) -> None:
    event = OrderPlaced()

    first, second = await shop.attempt(event), await shop.attempt(event)

    assert first == Executed("receipt-1", 1)
    assert isinstance(second, Completed)
    assert second.result is not None
    assert second.result.body == b'"receipt-1"'
    assert await shop.charged() == ["1"]
    assert len(await shop.waiting()) == 1
    assert await shop.statuses() == {event.event_id: "completed"}


lazy = EventRouter()


@lazy.on(OrderPlaced)
async def bill_lazily(event: OrderPlaced, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> object:
    await charge(session, event)

    def receipts() -> Iterator[str]:
        outgoing.publish(OrderCharged(order_id=event.order_id))
        yield f"receipt-{event.order_id}"

    return {"receipts": receipts()} if event.order_id == "nested" else receipts()


@pytest.mark.parametrize("reads", [True, False], ids=["read by Dishka", "passed on by a custom invoke"])
async def test_a_lazy_iterator_runs_before_its_outcome_is_written(
    url: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads:
        monkeypatch.setattr("integr8s_idem.integrations.dishka.returned_by", lambda _, result: result)
    async with open_ledger_shop(url, lazy) as shop:
        event = OrderPlaced()

        first, second = await shop.attempt(event), await shop.attempt(event)

        assert first == Executed(["receipt-1"], 1)
        assert isinstance(second, Completed)
        assert second.result is not None
        assert second.result.body == b'["receipt-1"]'
        assert len(await shop.waiting()) == 1


async def test_a_result_that_can_be_read_only_once_is_not_committed(url: str) -> None:
    async with open_ledger_shop(url, lazy) as shop:
        failed = await shop.attempt(OrderPlaced(order_id="nested"))

        assert isinstance(failed, HandlerFailed)
        assert isinstance(failed.error, ApplicationError)
        assert (await shop.charged(), await shop.waiting()) == ([], [])


async def test_a_handler_can_use_a_connection_instead_of_a_session(url: str) -> None:
    async with open_ledger_shop(url, by_connection, held=AsyncConnection) as shop:
        event = OrderPlaced()
        await shop.attempt(event)
        await shop.attempt(event)

        assert await shop.charged() == ["1"]
        assert len(await shop.waiting()) == 1


@pytest.mark.parametrize(("held", "handlers"), [(AsyncSession, router), (AsyncConnection, by_connection)])
async def test_the_provider_can_begin_the_transaction(url: str, held: type, handlers: EventRouter) -> None:
    async with open_ledger_shop(url, handlers, held=held) as shop:
        shop.sessions.asks_first = True

        outcome = await shop.attempt(OrderPlaced())

        assert outcome == Executed("receipt-1", 1)
        assert await shop.charged() == ["1"]


async def test_a_failed_handler_leaves_only_its_attempt(shop: LedgerShop) -> None:
    event = OrderPlaced(order_id="bad")

    first, second = await shop.attempt(event), await shop.attempt(event)

    assert isinstance(first, HandlerFailed)
    assert isinstance(second, HandlerFailed)
    assert (first.attempt, second.attempt) == (1, 2)
    assert str(second.error) == "the bank is away"
    assert (await shop.charged(), await shop.waiting()) == ([], [])
    assert await shop.statuses() == {event.event_id: "processing"}


async def test_a_run_without_a_reservation_commits_its_writes(url: str) -> None:
    settings = Settings(idempotency=IdempotencyConfig(on_key_reused=OnKeyReused.RUN))
    async with open_ledger_shop(url, router, settings=settings) as shop:
        event = OrderPlaced()
        await shop.attempt(event)

        outcome = await shop.attempt(event.model_copy(update={"order_id": "2"}))

        assert outcome == Executed("receipt-2", 1)
        assert await shop.charged() == ["1", "2"]
        assert len(await shop.waiting()) == 2


@pytest.mark.parametrize("damage", ["DROP TABLE idempotency_outbox", "DELETE FROM idempotency_outbox_buckets"])
async def test_a_worker_with_an_incomplete_outbox_does_not_start(shop: LedgerShop, damage: str) -> None:
    async with shop.store.engine.begin() as connection:
        await connection.execute(text(damage))
    publisher = await shop.container.get(EventPublisher)
    service = ServiceSettings(topics=("orders",))
    worker = ServiceWorker("billing", shop.dispatcher, publisher, KafkaSettings(), service)

    with pytest.raises(StoreConfigurationError, match="run: integr8s-idem store migrate"):
        await worker.run()

    await migrate(shop.store.engine)


async def test_a_handler_that_lost_its_reservation_rolls_back_its_writes(url: str) -> None:
    handlers, opened = EventRouter(), list[LedgerShop]()

    @handlers.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession], attempt: FromDishka[Attempt]) -> None:
        if attempt.number == 1:
            await opened[0].store.delete(
                [attempt.key]
            )  # as if it had lapsed, and another worker had completed it long ago
        await charge(session, event)

    async with open_ledger_shop(url, handlers) as shop:
        opened.append(shop)
        with pytest.raises(LeaseLostError, match="another worker"):
            await shop.attempt(OrderPlaced())

        assert await shop.charged() == []


rolled_back, rolled_back_by_connection = EventRouter(), EventRouter()


@rolled_back.on(OrderPlaced)
async def roll_back(event: OrderPlaced, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> None:
    await charge(session, event)
    outgoing.publish(OrderCharged(order_id=event.order_id))
    await session.rollback()


@rolled_back_by_connection.on(OrderPlaced)
async def roll_back_by_connection(
    event: OrderPlaced, connection: FromDishka[AsyncConnection], outgoing: FromDishka[Outgoing]
) -> None:
    await charge(connection, event)
    outgoing.publish(OrderCharged(order_id=event.order_id))
    await connection.rollback()


@pytest.mark.parametrize(
    ("held", "handlers"), [(AsyncSession, rolled_back), (AsyncConnection, rolled_back_by_connection)]
)
async def test_a_handler_that_rolls_back_is_refused(url: str, held: type, handlers: EventRouter) -> None:
    async with open_ledger_shop(url, handlers, held=held) as shop:
        event = OrderPlaced()
        outcome = await shop.attempt(event)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert "rolled back the transaction of a handler" in str(outcome.error)
        assert "begin_nested()" in str(outcome.error)
        assert (await shop.charged(), await shop.waiting()) == ([], [])
        assert await shop.statuses() == {event.event_id: "processing"}


async def test_a_rollback_before_a_new_write_is_refused_as_well(url: str) -> None:
    handlers = EventRouter()

    @handlers.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        await session.rollback()
        await charge(session, event)

    async with open_ledger_shop(url, handlers) as shop:
        outcome = await shop.attempt(OrderPlaced())

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert await shop.charged() == []


async def test_a_handler_that_commits_is_refused(url: str) -> None:
    handlers = EventRouter()

    @handlers.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        await session.commit()

    async with open_ledger_shop(url, handlers) as shop:
        outcome = await shop.attempt(OrderPlaced())

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert "before its outcome was written" in str(outcome.error)
        assert await shop.charged() == []


async def test_a_provider_that_commits_after_an_error_is_refused_and_the_error_is_reported(
    shop: LedgerShop,
) -> None:
    shop.sessions.commits = lambda error: True

    outcome = await shop.attempt(OrderPlaced(order_id="bad"))

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, ConnectionError)
    assert await shop.charged() == []


async def test_a_provider_that_never_commits_is_reported(shop: LedgerShop) -> None:
    shop.sessions.commits = lambda error: False

    outcome = await shop.attempt(OrderPlaced())

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, ApplicationError)
    assert "without committing" in str(outcome.error)
    assert (await shop.charged(), await shop.waiting()) == ([], [])


async def test_an_error_during_the_commit_is_reported_unchanged_and_recorded(shared_postgres: PostgresServer) -> None:
    settings = Settings(idempotency=IdempotencyConfig(max_attempts=1))
    async with open_ledger_shop(shared_postgres.url, router, settings=settings) as shop:
        async with shop.store.engine.begin() as connection:
            unique = "ALTER TABLE charges ADD CONSTRAINT once UNIQUE (order_id) DEFERRABLE INITIALLY DEFERRED"
            await connection.execute(text(unique))
        await shop.attempt(OrderPlaced())
        event = OrderPlaced()

        outcome = await shop.attempt(event)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, IntegrityError)
        [failed] = [record async for record in shop.store.scan("") if record.status is IdempotencyStatus.FAILED]
        assert "duplicate key value" in failed.error
        assert await shop.charged() == ["1"]


async def test_a_session_of_another_database_is_refused(url: str, tmp_path: Path) -> None:
    other_engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
    await migrate(other_engine)
    async with open_ledger_shop(url, router) as shop:
        shop.sessions.engine = other_engine

        with pytest.raises(StoreConfigurationError, match="in another database"):
            await shop.attempt(OrderPlaced(order_id="free"))

        assert (await shop.charged(), await shop.waiting()) == ([], [])
    await other_engine.dispose()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_transaction_conflict_does_not_count_as_a_failure_of_the_handler(
    shared_postgres: PostgresServer, isolation: str
) -> None:
    conflicting, opened = EventRouter(), list[LedgerShop]()

    @conflicting.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession], attempt: FromDishka[Attempt]) -> int:
        await session.execute(text("SELECT * FROM balance"))
        if attempt.number == 1:
            async with opened[0].store.engine.begin() as other:
                await other.execute(text("UPDATE balance SET amount = amount + 1"))
        await session.execute(text("UPDATE balance SET amount = amount + 10"))
        return attempt.number

    settings = Settings(idempotency=IdempotencyConfig(max_attempts=1))
    async with open_ledger_shop(shared_postgres.url, conflicting, isolation=isolation, settings=settings) as shop:
        opened.append(shop)
        async with shop.store.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE balance (amount integer)"))
            await connection.execute(text("INSERT INTO balance VALUES (0)"))
        event = OrderPlaced()

        outcome, second = await shop.attempt(event), await shop.attempt(event)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, TransactionAbortedError)
        assert not outcome.given_up
        assert second == Executed(2, 2)
        async with shop.store.engine.begin() as connection:
            assert (await connection.execute(text("SELECT amount FROM balance"))).scalar_one() == 11
            await connection.execute(text("DROP TABLE balance"))


async def test_a_handler_can_use_savepoints(url: str) -> None:
    nesting = EventRouter()

    @nesting.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        async with session.begin_nested():
            await charge(session, event)
        undone = await session.begin_nested()
        await charge(session, event)
        await undone.rollback()

    async with open_ledger_shop(url, nesting) as shop:
        assert await shop.attempt(OrderPlaced()) == Executed(None, 1)
        assert await shop.charged() == ["1"]


async def test_a_handler_that_outlives_its_lease_fails_and_is_given_up_eventually(url: str) -> None:
    slow = EventRouter()

    @slow.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        await asyncio.Event().wait()

    settings = Settings(idempotency=IdempotencyConfig(max_attempts=2, processing_timeout_seconds=1))
    async with open_ledger_shop(url, slow, settings=settings) as shop:
        event = OrderPlaced()

        first, second, third = [await shop.attempt(event) for _ in range(3)]

        assert isinstance(first, HandlerFailed)
        assert isinstance(first.error, LeaseLostError)
        assert (first.attempt, first.given_up) == (1, False)
        assert isinstance(second, HandlerFailed)
        assert (second.attempt, second.given_up) == (2, True)
        assert isinstance(third, Failed)
        assert "its lease of 1 s ended before the work was finished" in third.error
        assert await shop.charged() == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


async def test_on_sqlite_a_handler_reserves_its_key_only_when_it_can_write(file: Path) -> None:
    """Otherwise its lease would expire while it waits for the other handler."""
    handlers, started, proceed = EventRouter(), asyncio.Event(), asyncio.Event()

    @handlers.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        started.set()
        await proceed.wait()
        await charge(session, event)

    async with open_ledger_shop(f"sqlite+aiosqlite:///{file}", handlers) as shop:
        first, second = OrderPlaced(order_id="1"), OrderPlaced(order_id="2")
        running = asyncio.create_task(shop.attempt(first))
        await started.wait()
        blocked = asyncio.create_task(shop.attempt(second))
        await asyncio.sleep(0.3)  # enough time for a reservation
        assert await shop.statuses() == {first.event_id: "processing"}

        proceed.set()
        assert await running == await blocked == Executed(None, 1)


async def test_on_sqlite_a_file_locked_by_another_process_does_not_count_as_a_failure(file: Path) -> None:
    held, other = EventRouter(), sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    @held.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession], attempt: FromDishka[Attempt]) -> int:
        if attempt.number == 1:
            other.execute("BEGIN IMMEDIATE")
            asyncio.get_running_loop().call_later(3, other.rollback)  # longer than the lock timeout of the session
        await charge(session, event)
        return attempt.number

    settings = Settings(idempotency=IdempotencyConfig(max_attempts=1))
    async with open_ledger_shop(f"sqlite+aiosqlite:///{file}", held, settings=settings) as shop:
        [execution] = shop.dispatcher.executions(OrderPlaced())

        async def wait_for_store(_: StoreError) -> None:
            await asyncio.sleep(0.1)

        outcome = await execution.attempt(wait_for_store=wait_for_store)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, TransactionAbortedError)
        assert not outcome.given_up
        assert await execution.attempt() == Executed(2, 2)
        assert await shop.charged() == ["1"]
    other.close()


async def test_on_sqlite_a_second_transaction_within_a_handler_is_refused_at_once(file: Path) -> None:
    second, opened = EventRouter(), list[LedgerShop]()

    @second.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        async with AsyncSession(opened[0].sessions.engine) as other:
            await charge(other, event)

    async with open_ledger_shop(f"sqlite+aiosqlite:///{file}", second) as shop:
        opened.append(shop)
        outcome = await shop.attempt(OrderPlaced())
        assert isinstance(outcome, HandlerFailed)
        with pytest.raises(ApplicationError, match="would wait for itself"):
            raise outcome.error


@pytest.mark.parametrize("isolation", [None, "REPEATABLE READ", "SERIALIZABLE"])
async def test_concurrent_deliveries_charge_each_order_once(url: str, isolation: str | None) -> None:
    if isolation == "REPEATABLE READ" and url.startswith("sqlite"):
        isolation = None  # its only level is SERIALIZABLE
    async with open_ledger_shop(url, router, isolation=isolation) as shop:
        events = [OrderPlaced(order_id=f"{number}") for number in range(20)]

        async def until_done(event: OrderPlaced) -> None:
            while not isinstance(await shop.attempt(event), Executed | Completed):  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0.01)

        async with asyncio.timeout(30):
            await asyncio.gather(*(until_done(event) for event in events * 3))

        assert sorted(await shop.charged(), key=int) == [f"{number}" for number in range(20)]
        assert len(set(await shop.waiting())) == len(await shop.waiting()) == 20
