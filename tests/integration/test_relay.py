"""The relay and the outbox on real databases, publishing to an in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.events import Message
from integr8s_idem.stores.sql import SqlOutbox
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.schema import BUCKETS, buckets
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from integr8s_idem.worker.relay import Relay
from tests.support.conditions import eventually
from tests.support.databases import KINDS, emptied, url_of
from tests.support.outboxes import Broker, relays

MINUTE = timedelta(minutes=1)


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    async with emptied(url_of(request.param, request, tmp_path)) as engine:
        yield engine


def message(number: int, key: bytes | None = b"k") -> Message:
    headers = (("event_id", b"\xff\x00"),)
    return Message("orders", key, f"body {number}".encode(), headers, f"event-{number}", "order_placed")


async def add_to_outbox(engine: AsyncEngine, *messages: Message) -> None:
    async with writing(engine) as connection:
        await put(connection, messages)


async def test_messages_are_published_unchanged_in_the_order_of_their_rows(engine: AsyncEngine) -> None:
    broker, written = Broker(), [message(number) for number in range(20)]
    await add_to_outbox(engine, *written)

    async with relays(engine, broker) as [outbox]:
        await eventually(lambda: len(broker.published) == 20)

    assert [(one.topic, one.key, one.value, tuple(one.headers), one.event_id) for one in broker.published] == [
        (one.topic, one.key, one.value, tuple(one.headers), one.event_id) for one in written
    ]
    assert await outbox.count() == 0


async def test_messages_of_a_rolled_back_transaction_are_never_published(engine: AsyncEngine) -> None:
    broker = Broker()
    async with engine.connect() as connection:
        await put(connection, [message(1)])
        await connection.rollback()
    await add_to_outbox(engine, message(2))

    async with relays(engine, broker):
        await eventually(lambda: broker.published)

    assert broker.ids() == ["event-2"]


async def test_many_relays_share_the_work_and_keep_the_order_of_each_key(engine: AsyncEngine) -> None:
    brokers = [Broker() for _ in range(4)]
    brokers[1].published = brokers[2].published = brokers[3].published = brokers[0].published
    keys = [f"key-{number}".encode() for number in range(10)]
    async with relays(engine, *brokers):
        for number in range(0, 200, 20):
            await add_to_outbox(engine, *(message(number + more, keys[(number + more) % 10]) for more in range(20)))
        await eventually(lambda: len(brokers[0].published) >= 200)

    assert len(brokers[0].published) == 200
    for index, key in enumerate(keys):
        assert brokers[0].ids(key) == [f"event-{number}" for number in range(index, 200, 10)]


async def test_a_failing_message_blocks_only_its_own_key(engine: AsyncEngine) -> None:
    broker = Broker()
    broker.broken = {"event-1"}
    await add_to_outbox(
        engine, *(message(number, b"k") for number in range(4)), message(9, b"other"), message(10, None)
    )

    async with relays(engine, broker) as [outbox]:
        await eventually(lambda: len(broker.published) == 3)
        assert sorted(broker.ids()) == ["event-0", "event-10", "event-9"]
        broker.broken = set()
        outbox.notice()
        await eventually(lambda: len(broker.published) == 6)

    assert broker.ids(b"k") == ["event-0", "event-1", "event-2", "event-3"]


async def test_many_failing_messages_do_not_block_another_topic(engine: AsyncEngine) -> None:
    broker = Broker()
    broker.broken = {f"event-{number}" for number in range(600)}
    await add_to_outbox(engine, *(message(number, f"key-{number}".encode()) for number in range(600)))
    await add_to_outbox(engine, replace(message(1000), topic="payments"))

    async with relays(engine, broker):
        await eventually(lambda: broker.published)

    assert broker.ids() == ["event-1000"]


async def test_many_failing_messages_do_not_block_other_keys_of_their_topic(engine: AsyncEngine) -> None:
    broker = Broker()
    broker.broken = {f"event-{number}" for number in range(1200)}
    await add_to_outbox(engine, *(message(number, f"key-{number}".encode()) for number in range(1200)))
    await add_to_outbox(engine, message(2000, b"other"), message(2001, b"key-0"))

    async with relays(engine, broker) as [outbox]:
        await eventually(lambda: broker.published)
        assert broker.ids() == ["event-2000"]
        broker.broken = set()
        outbox.notice()
        await eventually(lambda: len(broker.published) == 1202)

    assert broker.ids(b"key-0") == ["event-0", "event-2001"]


class Answering(Broker):
    """Calls `then` before it accepts the first message."""

    def __init__(self, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.then = then
        self.answers = True

    async def send_message(self, message: Message) -> None:
        if self.answers:
            self.answers = False
            await self.then()
        await super().send_message(message)


@pytest.mark.parametrize("engine", ["postgresql", "mysql"], indirect=True)  # SQLite has one writer at a time
async def test_a_late_commit_is_published_before_messages_that_follow_from_it(engine: AsyncEngine) -> None:
    async with engine.connect() as late:
        await put(late, [message(1)])
        await add_to_outbox(engine, message(2, b"other"))

        async def commit_and_add() -> None:
            await late.commit()
            await add_to_outbox(engine, message(3))

        broker = Answering(commit_and_add)
        async with relays(engine, broker):
            await eventually(lambda: len(broker.published) == 3)

    assert broker.ids() == ["event-2", "event-1", "event-3"]


DAMAGED = {
    "headers_not_json": {"headers": b"\x00"},
    "headers_not_pairs": {"headers": b"[7]"},
    "id": {"event_id": "\\x"},
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_row_is_logged_and_blocks_only_its_own_key(
    engine: AsyncEngine, damage: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    await add_to_outbox(engine, message(1), message(2), message(3, b"other"))
    async with engine.begin() as connection:
        damaged = (await connection.execute(select(outbox_table.c.id).order_by(outbox_table.c.id))).scalars().first()
        await connection.execute(update(outbox_table).where(outbox_table.c.id == damaged).values(damage))

    async with relays(engine, broker) as [outbox]:
        await eventually(lambda: broker.published and "damaged" in caplog.text)
        assert broker.ids() == ["event-3"]
        assert f"row {damaged} of the outbox is damaged" in caplog.text
        async with engine.begin() as connection:
            await connection.execute(delete(outbox_table).where(outbox_table.c.id == damaged))
        outbox.notice()
        await eventually(lambda: len(broker.published) == 2)

    assert broker.ids() == ["event-3", "event-2"]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("column", ["message_key", "value", "headers"])
async def test_a_sqlite_row_with_text_instead_of_bytes_does_not_stop_the_relay(
    engine: AsyncEngine, column: str
) -> None:
    broker = Broker()
    await add_to_outbox(engine, message(1), message(2, b"other"))
    async with engine.begin() as connection:
        await connection.execute(text(f"UPDATE idempotency_outbox SET {column} = 'k' WHERE event_id = 'event-1'"))

    async with relays(engine, broker):
        await eventually(lambda: "event-2" in broker.ids())


async def test_the_next_relay_repeats_unconfirmed_messages_with_the_same_ids(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    await add_to_outbox(engine, *(message(number) for number in range(3)))
    claim = await outbox.claim(timedelta(seconds=0.5))
    assert claim is not None
    for waiting in (await outbox.read(claim))[:2]:
        await broker.send_message(waiting.message)  # and it dies here

    async with relays(engine, broker):
        await eventually(lambda: len(broker.published) == 5)

    assert broker.ids() == ["event-0", "event-1", "event-0", "event-1", "event-2"]


async def test_a_bucket_belongs_to_one_relay_until_its_claim_ends(engine: AsyncEngine) -> None:
    outbox = SqlOutbox(engine)
    await add_to_outbox(engine, message(1))
    first = await outbox.claim(MINUTE)
    assert first is not None

    assert await outbox.claim(MINUTE) is None
    await add_to_outbox(engine, message(2))
    assert await outbox.claim(MINUTE) is None
    assert await outbox.done(first, [], timedelta(0))
    second = await outbox.claim(MINUTE)

    assert second is not None
    assert not await outbox.done(first, [], MINUTE)
    assert len(await outbox.read(second)) == 2


@pytest.mark.scenario(144)
async def test_a_relay_that_stalled_beyond_its_claim_deletes_no_new_message(engine: AsyncEngine) -> None:
    """SQLite gives the ids of deleted rows to new ones."""
    outbox = SqlOutbox(engine)
    await add_to_outbox(engine, message(1))
    stalled = await outbox.claim(timedelta(0))
    assert stalled is not None
    [first] = await outbox.read(stalled)
    successor = await outbox.claim(MINUTE)
    assert successor is not None
    assert await outbox.done(successor, [first.id], timedelta(0))
    await add_to_outbox(engine, message(2))

    assert not await outbox.done(stalled, [first.id], timedelta(0))

    assert await outbox.count() == 1


@pytest.mark.parametrize("engine", ["postgresql", "mysql"], indirect=True)  # SQLite has one writer at a time
async def test_a_relay_claims_free_buckets_while_another_locks_the_rest(engine: AsyncEngine) -> None:
    await add_to_outbox(engine, *(message(number, f"key-{number}".encode()) for number in range(100)))
    first = select(buckets).where(buckets.c.bucket == 3).with_for_update()
    async with engine.connect() as another:
        await another.execute(first)

        claim = await SqlOutbox(engine).claim(MINUTE)

        await another.rollback()
    rest = await SqlOutbox(engine).claim(MINUTE)

    assert claim is not None
    assert sorted(claim.buckets) == [bucket for bucket in range(BUCKETS) if bucket != 3]
    assert rest is not None
    assert rest.buckets == (3,)


async def test_the_relay_waits_for_an_unavailable_broker(engine: AsyncEngine) -> None:
    broker = Broker()
    broker.is_down = True
    async with relays(engine, broker) as [outbox]:
        await add_to_outbox(engine, message(1))
        outbox.notice()
        await asyncio.sleep(0.3)
        assert await outbox.count() == 1
        broker.is_down = False
        await eventually(lambda: broker.published)

    assert await outbox.count() == 0


async def test_a_stopped_relay_publishes_pending_messages(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    relay = Relay(outbox, broker, claim_seconds=60)
    await add_to_outbox(engine, message(1))

    relay.stop()
    await relay.run()

    assert broker.ids() == ["event-1"]


async def test_draining_waits_for_the_messages_of_a_dead_relay(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    await add_to_outbox(engine, message(1))
    assert await outbox.claim(timedelta(seconds=0.5)) is not None  # and it dies here

    is_empty = await Relay(outbox, broker, claim_seconds=60).drain()

    assert is_empty
    assert broker.ids() == ["event-1"]


async def test_draining_ends_when_a_message_cannot_be_published(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    broker.broken = {"event-1"}
    await add_to_outbox(engine, message(1), message(2), message(3, b"other"))
    relay = Relay(outbox, broker, claim_seconds=60)

    is_empty = await relay.drain()

    assert not is_empty
    assert broker.ids() == ["event-3"]
    assert (relay.published, relay.failures) == (1, 1)


async def test_draining_can_be_stopped_while_another_relay_has_the_messages(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    await add_to_outbox(engine, message(1))
    assert await outbox.claim(MINUTE) is not None
    relay = Relay(outbox, broker, claim_seconds=60)
    draining = asyncio.create_task(relay.drain())

    relay.stop()
    outbox.notice()

    assert not await draining
    assert broker.ids() == []


async def test_messages_can_be_large_and_have_names_in_any_script(engine: AsyncEngine) -> None:
    broker = Broker()
    large = Message(
        "orders", b"k" * 70_000, b"\x00\xff" * 100_000, [("h", b"v" * 70_000)], "ид-\ud800", "заказ_размещён"
    )
    await add_to_outbox(engine, large)

    async with relays(engine, broker):
        await eventually(lambda: broker.published)

    assert broker.published == [large]


@pytest.mark.parametrize("engine", ["postgresql", "mysql"], indirect=True)  # SQLite has one writer at a time
async def test_a_long_transaction_does_not_block_messages_of_others(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), SqlOutbox(engine)
    async with engine.connect() as connection:
        await put(connection, [message(1)])
        await add_to_outbox(engine, *(message(number) for number in range(2, 32)))

        async with relays(engine, broker):
            await eventually(lambda: len(broker.published) == 30)
        assert await outbox.count() == 0

        await connection.commit()
    async with relays(engine, broker):
        await eventually(lambda: len(broker.published) > 30)

    assert broker.ids() == [f"event-{number}" for number in [*range(2, 32), 1]]
