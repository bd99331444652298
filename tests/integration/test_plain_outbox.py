"""Events that plain code publishes in its own transactions, on real databases, with an in-memory broker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, Engine, QueuePool, create_engine, event, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from integr8s_idem import BaseEvent, IdempotencyManager, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import ApplicationError, EventTooLargeError, StoreConfigurationError
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox, metadata, outbox_hints
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.conditions import eventually
from tests.support.databases import KINDS, url_of
from tests.support.outboxes import Broker, database_with_orders, relays


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    number: int = 0


outbox = Outbox(Settings(kafka=KafkaSettings(topic_prefix="test.")), service="shop")


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    async with database_with_orders(url_of(request.param, request, tmp_path)) as engine:
        yield engine


async def waiting(engine: AsyncEngine) -> list[str]:
    """Return the ids of the events in the outbox."""
    async with engine.connect() as connection:
        return list(await connection.scalars(select(outbox_table.c.event_id).order_by(outbox_table.c.id)))


async def numbers_waiting(engine: AsyncEngine) -> list[int]:
    """Return the numbers of the orders whose events are in the outbox."""
    async with engine.connect() as connection:
        values = await connection.scalars(select(outbox_table.c.value).order_by(outbox_table.c.id))
        return [OrderPlaced.model_validate_json(bytes(value)).number for value in values]


# One transaction of an application: insert an order, publish events, fail or not; then commit or roll back.

ORDER = text("INSERT INTO orders VALUES (1)")
Transaction = Callable[[AsyncEngine, Sequence[BaseEvent], Exception | None, bool], Awaitable[None]]


def publish_all(out: Any, events: Sequence[BaseEvent], error: BaseException | None) -> None:
    for one in events:
        out.publish(one)
    if error is not None:
        raise error


async def by_async_session(
    engine: AsyncEngine, events: Sequence[BaseEvent], error: Exception | None, commits: bool
) -> None:
    async with AsyncSession(engine) as session:
        await session.execute(ORDER)
        try:
            async with outbox(session) as out:
                publish_all(out, events, error)
        except OSError:
            pass
        await (session.commit() if commits else session.rollback())


async def by_async_connection(
    engine: AsyncEngine, events: Sequence[BaseEvent], error: Exception | None, commits: bool
) -> None:
    async with engine.connect() as connection:
        await connection.execute(ORDER)
        try:
            async with outbox(connection) as out:
                publish_all(out, events, error)
        except OSError:
            pass
        await (connection.commit() if commits else connection.rollback())


def in_sync(held: Session | Connection, events: Sequence[BaseEvent], error: Exception | None, commits: bool) -> None:
    held.execute(ORDER)
    try:
        with outbox(held) as out:
            publish_all(out, events, error)
    except OSError:
        pass
    if commits:
        held.commit()
    else:
        held.rollback()


@contextmanager
def sync_engine(engine: AsyncEngine) -> Iterator[Engine]:
    """Yield an engine for the same database with a synchronous driver; none is installed for PostgreSQL."""
    sync = create_engine(make_url(engine.url).set(drivername=SYNC_DRIVERS[engine.dialect.name]))
    try:
        yield sync
    finally:
        sync.dispose()


async def by_sync_session(
    engine: AsyncEngine, events: Sequence[BaseEvent], error: Exception | None, commits: bool
) -> None:
    if engine.dialect.name == "postgresql":  # no synchronous driver is installed: use the session within an async one
        async with AsyncSession(engine) as session:
            await session.run_sync(in_sync, events, error, commits)
        return
    with sync_engine(engine) as sync, Session(sync) as session:
        in_sync(session, events, error, commits)


async def by_sync_connection(
    engine: AsyncEngine, events: Sequence[BaseEvent], error: Exception | None, commits: bool
) -> None:
    if engine.dialect.name == "postgresql":
        async with engine.connect() as connection:
            await connection.run_sync(in_sync, events, error, commits)
        return
    with sync_engine(engine) as sync, sync.connect() as connection:
        in_sync(connection, events, error, commits)


SYNC_DRIVERS = {"sqlite": "sqlite+pysqlite", "mysql": "mysql+pymysql"}
TRANSACTIONS = (by_async_session, by_async_connection, by_sync_session, by_sync_connection)


@pytest.mark.parametrize("transaction", TRANSACTIONS)
async def test_events_of_a_committed_transaction_are_published(engine: AsyncEngine, transaction: Transaction) -> None:
    events = [OrderPlaced(number=number, aggregate_id="order-1") for number in range(3)]
    broker = Broker()

    await transaction(engine, events, None, True)
    async with relays(engine, broker):
        await eventually(lambda: len(broker.published) == 3)

    assert [(one.topic, one.key, one.event_id) for one in broker.published] == [
        ("test.order_placed", b"order-1", one.event_id) for one in events
    ]
    sent = OrderPlaced.model_validate_json(broker.published[0].value)
    assert sent == events[0].model_copy(update={"metadata": sent.metadata})
    assert sent.metadata.service_name == "shop"


@pytest.mark.scenario(143)
@pytest.mark.parametrize("transaction", TRANSACTIONS)
async def test_a_transaction_that_is_rolled_back_publishes_nothing(
    engine: AsyncEngine, transaction: Transaction
) -> None:
    await transaction(engine, [OrderPlaced()], None, False)

    assert await waiting(engine) == []


@pytest.mark.scenario(143)
@pytest.mark.parametrize("transaction", TRANSACTIONS)
async def test_a_block_that_raises_an_error_writes_nothing_even_if_its_transaction_commits(
    engine: AsyncEngine, transaction: Transaction
) -> None:
    await transaction(engine, [OrderPlaced()], OSError("no"), True)

    assert await waiting(engine) == []
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM orders")) == 1


async def test_nothing_is_committed_for_the_caller(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session, outbox(session) as out:
        out.publish(OrderPlaced())

    assert await waiting(engine) == []


async def test_events_of_a_savepoint_are_rolled_back_with_it(engine: AsyncEngine) -> None:
    kept, undone = OrderPlaced(), OrderPlaced()
    async with AsyncSession(engine) as session, session.begin():
        async with outbox(session) as out:
            out.publish(kept)
        savepoint = await session.begin_nested()
        async with outbox(session) as out:
            out.publish(undone)
        await savepoint.rollback()

    assert await waiting(engine) == [kept.event_id]


async def test_a_block_that_is_cancelled_writes_nothing(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(asyncio.CancelledError):
            async with outbox(session) as out:
                publish_all(out, [OrderPlaced()], asyncio.CancelledError())
        await session.commit()

    assert await waiting(engine) == []


async def test_transactions_that_saw_each_other_commit_keep_the_order_of_their_key_with_two_relays(
    engine: AsyncEngine,
) -> None:
    """Each transaction of a key begins after it has read the commit of the one before; others commit in between."""
    brokers = [Broker(), Broker()]
    brokers[1].published = brokers[0].published
    keys, each = 6, 15

    async def write_in_order(key: int) -> None:
        for number in range(each):
            async with AsyncSession(engine) as session, session.begin():
                found = await session.scalar(text(f"SELECT count(*) FROM orders WHERE number = {key}"))
                assert found == number
                async with outbox(session) as out:
                    out.publish(OrderPlaced(number=number, aggregate_id=f"order-{key}"))
                await session.execute(text(f"INSERT INTO orders VALUES ({key})"))
                await asyncio.sleep(random.random() / 100)  # varies which transactions overlap

    async with relays(engine, *brokers):
        await asyncio.gather(*(write_in_order(key) for key in range(keys)))
        await eventually(lambda: len(brokers[0].published) >= keys * each)

    assert len(brokers[0].published) == keys * each
    for key in range(keys):
        of_key = [one for one in brokers[0].published if one.key == f"order-{key}".encode()]
        assert [OrderPlaced.model_validate_json(one.value).number for one in of_key] == list(range(each))


# Ids.


async def published_ids(engine: AsyncEngine, *events: BaseEvent, id_from: str | None = None) -> list[str]:
    async with AsyncSession(engine) as session, session.begin(), outbox(session) as out:
        return [out.publish(one, id_from=id_from) for one in events]


async def test_ids_are_random_without_a_key_or_a_run(engine: AsyncEngine) -> None:
    first, second = await published_ids(engine, OrderPlaced(), OrderPlaced())

    assert first != second
    assert await waiting(engine) == [first, second]


async def test_ids_are_derived_from_a_given_key_the_service_and_the_type(engine: AsyncEngine) -> None:
    class OrderPaid(BaseEvent):
        event_type: Literal["order_paid"] = "order_paid"

    [first], [again] = [await published_ids(engine, OrderPlaced(), id_from="order-7") for _ in range(2)]
    [other] = await published_ids(engine, OrderPlaced(), id_from="order-8")
    [other_type] = await published_ids(engine, OrderPaid(), id_from="order-7")
    async with AsyncSession(engine) as session, Outbox(Settings(), service="mail")(session) as out:
        other_service = out.publish(OrderPlaced(), id_from="order-7")

    assert first == again == "bc2f7981-e810-5a5b-a455-960b1719d654"
    assert len({first, other, other_type, other_service}) == 4


async def test_an_event_with_an_id_keeps_it_and_refuses_another_source(engine: AsyncEngine) -> None:
    own = OrderPlaced(event_id="mine")

    assert await published_ids(engine, own) == ["mine"]
    with pytest.raises(ApplicationError, match="has the event_id mine"):
        await published_ids(engine, own, id_from="order-7")


async def test_two_events_with_one_id_in_a_block_are_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ApplicationError, match=r"OrderPlaced .* the id .* of another event of this block"):
        await published_ids(engine, OrderPlaced(number=1), OrderPlaced(number=2), id_from="order-7")
    with pytest.raises(ApplicationError, match=r"OrderPlaced has the id mine of another event of this block"):
        await published_ids(
            engine, OrderPlaced(number=1, event_id="mine"), OrderPlaced(number=2, event_id="mine"), OrderPlaced()
        )

    assert await waiting(engine) == []


async def test_an_event_that_is_published_twice_in_a_block_is_written_once(engine: AsyncEngine) -> None:
    one = OrderPlaced(number=1)
    assert len(set(await published_ids(engine, OrderPlaced(number=2), OrderPlaced(number=2), id_from="order-7"))) == 1
    assert await published_ids(engine, *[one.model_copy(update={"event_id": "mine"})] * 2) == ["mine", "mine"]

    assert await numbers_waiting(engine) == [2, 1]


async def test_events_of_different_types_may_have_one_id(engine: AsyncEngine) -> None:
    class OrderPaid(BaseEvent):
        event_type: Literal["order_paid"] = "order_paid"

    assert await published_ids(engine, OrderPlaced(event_id="7"), OrderPaid(event_id="7")) == ["7", "7"]
    assert await waiting(engine) == ["7", "7"]


async def test_an_empty_source_of_ids_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ApplicationError, match="id_from= is empty"):
        await published_ids(engine, OrderPlaced(), id_from="")


async def test_another_run_of_the_same_work_publishes_the_same_ids(engine: AsyncEngine) -> None:
    manager = IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="shop")
    published: list[list[str]] = []

    async def place(*, fails: bool) -> None:
        first = await published_ids(engine, OrderPlaced(number=1))
        second = await published_ids(engine, OrderPlaced(number=2))
        published.append(first + second)
        if fails:
            raise OSError("after the commits")

    with pytest.raises(OSError, match="after the commits"):
        await manager.run("order-7", lambda: place(fails=True))
    await manager.run("order-7", lambda: place(fails=False))
    await manager.run("order-8", lambda: place(fails=False))
    await manager.close()

    assert published[0] == published[1]
    assert len({*published[0], *published[2]}) == 4


async def test_a_task_that_outlives_its_run_gets_random_ids(engine: AsyncEngine) -> None:
    manager = IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="shop")
    may_publish = asyncio.Event()
    tasks: list[asyncio.Task[list[str]]] = []

    async def later() -> list[str]:
        await may_publish.wait()
        return await published_ids(engine, OrderPlaced())

    async def work() -> list[str]:
        tasks.append(asyncio.create_task(later()))
        return await published_ids(engine, OrderPlaced())

    within = await manager.run("order-7", work)
    may_publish.set()
    [after] = await tasks[0]
    await manager.delete("order-7")
    again = await manager.run("order-7", lambda: published_ids(engine, OrderPlaced(), OrderPlaced()))
    await manager.close()

    assert within == again[:1]
    assert after != again[1]


async def test_the_outcome_of_a_run_and_its_events_commit_in_one_transaction(engine: AsyncEngine) -> None:
    manager = IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="shop")
    ids: list[str] = []
    for commits in (False, True):
        async with AsyncSession(engine) as session:

            async def place(session: AsyncSession = session) -> None:
                async with outbox(session) as out:
                    ids.append(out.publish(OrderPlaced()))

            async with manager.in_transaction(session):
                await manager.run("order-7", place)
            await (session.commit() if commits else session.rollback())
    await manager.close()

    assert ids[0] == ids[1]
    assert await waiting(engine) == [ids[1]]


# Mistakes.


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_an_engine_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ApplicationError, match="not with AsyncEngine, whose transaction is unknown"):
        outbox(engine)  # type: ignore[call-overload]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_events_after_the_end_of_the_block_and_a_second_block_are_refused(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        block = outbox(session)
        async with block as out:
            pass
        with pytest.raises(ApplicationError, match="has ended"):
            out.publish(OrderPlaced())
        with pytest.raises(ApplicationError, match="used once"):
            await block.__aenter__()


async def by_inner_begin(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out, held.begin():
        await held.execute(ORDER)
        out.publish(OrderPlaced(number=1))


async def by_commit(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced(number=1))
        await held.commit()


async def by_early_event(held: AsyncSession | AsyncConnection) -> None:
    """A bare connection has no transaction yet: its first statement begins one."""
    async with outbox(held) as out:
        out.publish(OrderPlaced(number=1))
        await held.execute(ORDER)
        await held.commit()


async def by_commit_and_more_statements(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced(number=1))
        await held.commit()
        await held.execute(ORDER)
        out.publish(OrderPlaced(number=2))
    await held.rollback()


async def by_an_error_after_the_commit(held: AsyncSession | AsyncConnection) -> None:
    with suppress(OSError):
        async with outbox(held) as out:
            await held.execute(ORDER)
            out.publish(OrderPlaced(number=1))
            await held.commit()
            out.publish(OrderPlaced(number=2))
            raise OSError
    await held.commit()


async def by_savepoint(held: AsyncSession | AsyncConnection) -> None:
    await held.execute(ORDER)
    async with held.begin_nested() as savepoint, outbox(held) as out:
        out.publish(OrderPlaced(number=1))
        await savepoint.commit()
    await held.commit()


async def by_open_savepoint(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced(number=1))
        await held.begin_nested()
        await held.execute(ORDER)
        await held.commit()


COMMITS = [
    by_inner_begin,
    by_commit,
    by_early_event,
    by_commit_and_more_statements,
    by_an_error_after_the_commit,
    by_savepoint,
    by_open_savepoint,
]


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
@pytest.mark.parametrize("way", COMMITS)
async def test_events_are_written_before_their_transaction_commits_within_the_block(
    engine: AsyncEngine, way: Callable[[Any], Awaitable[None]], held_type: Callable[[AsyncEngine], Any]
) -> None:
    """They share the outcome of the transaction in which they were published, and no other."""
    async with held_type(engine) as held:
        await way(held)

    assert await numbers_waiting(engine) == [1]


@pytest.mark.parametrize("engine", ["sqlite", "mysql"], indirect=True)
async def test_synchronous_code_may_commit_within_the_block(engine: AsyncEngine) -> None:
    def commit_within(held: Session | Connection, number: int) -> None:
        with outbox(held) as out:
            out.publish(OrderPlaced(number=number))
            held.execute(ORDER)
            held.commit()
            held.execute(ORDER)
        held.rollback()

    def run() -> None:
        with sync_engine(engine) as sync, Session(sync) as session, sync.connect() as connection:
            commit_within(session, 1)
            commit_within(connection, 2)

    await asyncio.to_thread(run)

    assert await numbers_waiting(engine) == [1, 2]


async def test_events_that_cannot_be_written_before_the_commit_prevent_it(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(outbox_table.drop)

    for held_type in (AsyncSession, AsyncEngine.connect):
        async with held_type(engine) as held:
            with pytest.raises(StoreConfigurationError, match="store migrate"):
                await by_early_event(held)
            await held.rollback()

    async with engine.connect() as connection:
        assert list(await connection.scalars(text("SELECT number FROM orders"))) == []


async def by_rollback(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced())
        await held.rollback()
        await held.execute(ORDER)


async def by_early_event_and_rollback(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        out.publish(OrderPlaced())
        await held.execute(ORDER)
        await held.rollback()


async def by_commit_after_a_rollback(held: AsyncSession | AsyncConnection) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced())
        await held.rollback()
        await held.execute(ORDER)
        await held.commit()


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
@pytest.mark.parametrize("mistake", [by_rollback, by_early_event_and_rollback, by_commit_after_a_rollback])
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_rollback_within_the_block_is_an_error_and_nothing_is_written(
    engine: AsyncEngine, mistake: Callable[[Any], Awaitable[None]], held_type: Callable[[AsyncEngine], Any]
) -> None:
    """The events would be written in another transaction, which has another outcome."""
    async with held_type(engine) as held:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await mistake(held)
        await held.rollback()

    assert await waiting(engine) == []


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_events_of_a_savepoint_that_was_rolled_back_prevent_a_commit_within_the_block(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    async def roll_back_the_savepoint_and_commit(held: AsyncSession | AsyncConnection) -> None:
        savepoint = await held.begin_nested()
        async with outbox(held) as out:
            out.publish(OrderPlaced())
            await savepoint.rollback()
            await held.commit()

    async with held_type(engine) as held:
        await held.execute(ORDER)
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await roll_back_the_savepoint_and_commit(held)
        await held.rollback()

    assert await waiting(engine) == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_connection_that_is_not_started_is_refused(engine: AsyncEngine) -> None:
    async with outbox(engine.connect()) as out:
        with pytest.raises(ApplicationError, match="has not been started"):
            out.publish(OrderPlaced())


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_commit_after_the_block_writes_nothing_again(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        for number in (1, 2):
            async with outbox(connection) as out:
                out.publish(OrderPlaced(number=number))
            await connection.commit()

    assert await numbers_waiting(engine) == [1, 2]


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_an_event_within_a_savepoint_needs_a_block_within_it(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    """Otherwise, a rollback to the savepoint would undo the order, and publish its event."""
    kept = OrderPlaced()
    async with held_type(engine) as held, outbox(held) as out:
        async with held.begin_nested() as savepoint:
            await held.execute(ORDER)
            with pytest.raises(ApplicationError, match="begin a block within the savepoint"):
                out.publish(OrderPlaced())
            await savepoint.rollback()
        async with held.begin_nested():
            await held.execute(ORDER)
        out.publish(kept)
    async with held_type(engine) as held:
        await held.execute(ORDER)
        async with held.begin_nested(), outbox(held) as out:
            out.publish(kept)
        await held.commit()

    assert await waiting(engine) == [kept.event_id]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_an_event_that_the_broker_would_refuse_is_refused_at_once(engine: AsyncEngine) -> None:
    class Note(BaseEvent):
        event_type: Literal["note"] = "note"
        text: str

    small = Outbox(Settings(kafka=KafkaSettings(max_event_bytes=2_000)), service="shop")
    async with AsyncSession(engine) as session, small(session) as out:
        out.publish(Note(text="x" * 1_000))
        with pytest.raises(EventTooLargeError, match="max_event_bytes = 2000"):
            out.publish(Note(text="x" * 2_000))


async def test_a_connection_that_commits_each_statement_is_refused(engine: AsyncEngine) -> None:
    kind = engine.dialect.name
    own = create_async_engine(engine.url, isolation_level="AUTOCOMMIT" if kind != "sqlite" else None)
    if kind == "sqlite":
        event.listen(own.sync_engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    options = {} if kind == "sqlite" else {"isolation_level": "AUTOCOMMIT"}

    async with own.connect() as connection:
        await connection.execution_options(**options)
        with pytest.raises(ApplicationError, match="commits each statement on its own"):
            async with outbox(connection) as out:
                out.publish(OrderPlaced())
    await own.dispose()

    assert await waiting(engine) == []


async def test_missing_tables_are_reported_with_the_command_that_creates_them(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)

    async with engine.connect() as connection:
        with pytest.raises(StoreConfigurationError, match="store migrate"):
            async with outbox(connection) as out:
                out.publish(OrderPlaced())


# What operators and relays see.


async def test_the_backlog_has_the_age_of_the_oldest_event(engine: AsyncEngine) -> None:
    store = SqlOutbox(engine)
    empty = await store.backlog()
    await published_ids(engine, OrderPlaced())
    await asyncio.sleep(0.2)
    await published_ids(engine, OrderPlaced())

    found = await store.backlog()

    assert (empty.count, empty.age) == (0, timedelta(0))
    assert found.count == 2
    assert timedelta(seconds=0.2) <= found.age < timedelta(minutes=1)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_postgresql_wakes_relays_of_other_processes_at_the_commit(engine: AsyncEngine) -> None:
    store = SqlOutbox(engine)
    hearing = asyncio.create_task(store.hear_hints())
    await store.arrived(30)  # it is listening
    async with AsyncSession(engine) as session:
        async with outbox(session) as out:
            out.publish(OrderPlaced())
        arriving = asyncio.create_task(store.arrived(60))
        await asyncio.sleep(0.1)
        assert not arriving.done(), "the transaction has not committed"
        await session.commit()

    await asyncio.wait_for(arriving, 30)

    assert isinstance(engine.pool, QueuePool)
    assert engine.pool.checkedout() == 0, "it has a connection of its own"
    hearing.cancel()
    await asyncio.wait({hearing})


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_a_relay_listens_again_after_its_connection_was_lost(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_hints, "_PAUSE_SECONDS", 0.05)
    store = SqlOutbox(engine)
    hearing = asyncio.create_task(store.hear_hints())
    await store.arrived(30)
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
            )
        )

    await asyncio.wait_for(store.arrived(60), 30)  # it notices what may have come meanwhile
    await published_ids(engine, OrderPlaced())
    await asyncio.wait_for(store.arrived(60), 30)

    hearing.cancel()
    await asyncio.wait({hearing})


@pytest.mark.parametrize("engine", ["mysql", "sqlite"], indirect=True)
async def test_other_databases_have_no_hints(engine: AsyncEngine) -> None:
    assert not SqlOutbox(engine).has_hints
