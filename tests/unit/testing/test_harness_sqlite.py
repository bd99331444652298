"""`WorkerHarness` with a SQLite file: transactional handlers, crashes and background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from dishka import AsyncContainer, FromDishka, Provider, Scope, provide
from dishka.provider import BaseProvider
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from examples import bookings
from integr8s_idem import Attempt, BaseEvent, EventRouter, Outgoing, Platform, Service, Settings
from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing import Fault, WorkerHarness
from integr8s_idem.testing.faults import FAULTS

pytestmark = pytest.mark.slow


class Booked(BaseEvent):
    event_type: Literal["booked"] = "booked"
    account: str


class Mailed(BaseEvent):
    event_type: Literal["mailed"] = "mailed"
    account: str


class Postbox:
    """Pauses the handler of a test at a point, and collects received mails."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.harness: WorkerHarness | None = None

    async def reached(self, point: str) -> None:
        assert self.harness is not None
        await self.harness.reached(point)


books, mails = EventRouter(), EventRouter()


@books.on(Booked)
async def book(
    event: Booked,
    session: FromDishka[AsyncSession],
    outgoing: FromDishka[Outgoing],
    postbox: FromDishka[Postbox],
    attempt: FromDishka[Attempt],
) -> int:
    await session.execute(text("INSERT INTO bookings VALUES (:account)"), {"account": event.account})
    await postbox.reached("written")
    if event.account == "unlucky" and attempt.number == 1:
        raise OSError("the bank does not answer")
    outgoing.publish(Mailed(account=event.account))
    return attempt.number


@mails.on(Mailed)
async def mail(event: Mailed, postbox: FromDishka[Postbox]) -> None:
    postbox.mails.append(event.account)


class Database(Provider):
    @provide(scope=Scope.APP)
    def postbox(self) -> Postbox:
        raise AssertionError("a fake takes its place")

    @provide(scope=Scope.APP)
    async def engine(self, settings: Settings) -> AsyncGenerator[AsyncEngine, None]:
        assert isinstance(settings.store, SqliteStoreSettings)
        engine = sql_engine(f"sqlite+aiosqlite:///{settings.store.path}")
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS bookings (account TEXT)"))
        yield engine
        await engine.dispose()

    @provide(scope=Scope.REQUEST)
    async def session(self, engine: AsyncEngine) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()


books_providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(books, transaction=AsyncSession),
    Database(),
]


mails_providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(mails),
    Database(),
]


platform = Platform(Service("books", providers=books_providers), Service("mails", providers=mails_providers))


@pytest.fixture
def postbox() -> Postbox:
    return Postbox()


@pytest.fixture
def harness(postbox: Postbox, tmp_path: Path) -> WorkerHarness:
    made = WorkerHarness(
        platform,
        fakes={Postbox: postbox},
        sqlite_file=tmp_path / "books.db",
    )
    postbox.harness = made
    return made


async def booked(tmp_path: Path) -> list[str]:
    engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'books.db'}")
    async with engine.connect() as connection:
        found = list((await connection.execute(text("SELECT account FROM bookings"))).scalars())
    await engine.dispose()
    return found


async def test_a_redelivery_books_once_and_outbox_events_are_settled(
    harness: WorkerHarness, postbox: Postbox, tmp_path: Path
) -> None:
    async with harness:
        await harness.publish(Booked(account="1"))
        await harness.redeliver_all()

        assert harness.attempts == [1, 1]
        assert harness.duplicates == 2
        assert {record.status.value for record in await harness.records()} == {"completed"}
        assert [event.event_type for event in harness.published] == ["mailed"]
    assert await booked(tmp_path) == ["1"]
    assert postbox.mails == ["1"]


async def test_the_writes_of_a_failed_handler_are_rolled_back(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness:
        await harness.publish(Booked(account="unlucky"))

        assert [run.attempt for run in harness.runs if run.service == "books"] == [1, 2]
    assert await booked(tmp_path) == ["unlucky"]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_every_fault_books_once(harness: WorkerHarness, tmp_path: Path, fault: Fault) -> None:
    async with harness:
        harness.suffer(fault)
        await harness.publish(Booked(account="1"))
        if harness.unreached:
            pytest.fail(f"never reached: {harness.unreached}")
    assert await booked(tmp_path) == ["1"]


@pytest.mark.parametrize("occurrence", [1, 2])
async def test_a_crash_with_an_open_transaction_rolls_back_and_unlocks_the_file(
    harness: WorkerHarness, postbox: Postbox, tmp_path: Path, occurrence: int
) -> None:
    async with harness:
        harness.crash_at("written", occurrence)
        await harness.publish(Booked(account="1"), Booked(account="2"))

        crashed = [run for run in harness.runs if run.how == "crashed"]
        assert len(crashed) == 1
    assert sorted(await booked(tmp_path)) == ["1", "2"]
    assert sorted(set(postbox.mails)) == ["1", "2"]


async def test_the_error_without_a_file_names_the_option(postbox: Postbox) -> None:
    with pytest.raises(ApplicationError, match="pass a sqlite_file"):
        async with WorkerHarness(platform, "books", fakes={Postbox: postbox}):
            pass


async def test_the_example_of_the_documentation_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with WorkerHarness(bookings.platform, sqlite_file=tmp_path / "bookings.db") as harness:
        await harness.publish(bookings.PaymentReceived(account="1", amount=30))
        await harness.redeliver_all()

        assert [run.service for run in harness.runs] == ["bookings", "mails"]
    assert capsys.readouterr().out == "mail: account 1 has 30\n"


# Background tasks.


class Clock:
    def __init__(self) -> None:
        self.ticks = 0
        self.ended = 0


def service_with(background: object) -> Service:
    def providers(settings: Settings) -> Sequence[BaseProvider]:
        clocks = Provider(scope=Scope.APP)
        clocks.provide(Clock)
        return [
            IdempotencyProvider(),
            KafkaProvider(),
            DispatcherProvider(mails),
            Database(),
            clocks,
        ]

    return Service("clock", providers=providers, background=[background])  # type: ignore[list-item]


async def tick(container: AsyncContainer) -> None:
    clock = await container.get(Clock)
    try:
        while True:
            await asyncio.sleep(60)
            clock.ticks += 1
    finally:
        clock.ended += 1


async def test_background_tasks_run_in_simulated_time_and_end_with_their_service(postbox: Postbox) -> None:
    clock = Clock()

    async with WorkerHarness(service_with(tick), fakes={Clock: clock, Postbox: postbox}) as harness:
        await harness.advance(630)  # the task began some moments after the clock, while the database was opened
        ticks = clock.ticks
        await harness.publish(Mailed(account="1"))

    assert ticks == 10
    assert clock.ended == 1
    assert postbox.mails == ["1"]


async def test_a_background_task_that_fails_ends_its_service_with_its_error(postbox: Postbox) -> None:
    async def fail(_: AsyncContainer) -> None:
        await asyncio.sleep(1)
        raise RuntimeError("no clock")

    with pytest.raises(RuntimeError, match="no clock"):
        async with WorkerHarness(service_with(fail), fakes={Clock: Clock(), Postbox: postbox}) as harness:
            await harness.advance(10)
