"""Pages of the outbox, on real databases: limited by size, so that a backlog of large messages is published."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.events import Message
from integr8s_idem.stores.outbox import Claim, Waiting
from integr8s_idem.stores.sql import SqlOutbox
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.outbox_pages import MAX_BYTES, MAX_ROWS, PageRows
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.worker.relay import Relay
from tests.support.databases import KINDS, emptied, url_of
from tests.support.outboxes import Broker

MINUTE = timedelta(minutes=1)
MEGABYTE = 10**6
FULL = MAX_BYTES // MEGABYTE + 1
"""Messages of a megabyte in a page: the last one exceeds the limit."""


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    async with emptied(url_of(request.param, request, tmp_path)) as engine:
        yield engine


def message(number: int, size: int = MEGABYTE, topic: str = "orders") -> Message:
    return Message(topic, b"key-%d" % (number % 5), bytes([number % 256]) * size, (), f"event-{number}", "order_placed")


async def add_to_outbox(engine: AsyncEngine, *messages: Message) -> None:
    for one in messages:
        async with writing(engine) as connection:
            await put(connection, [one])


async def claimed(outbox: SqlOutbox) -> Claim:
    claim = await outbox.claim(MINUTE)
    assert claim is not None
    return claim


async def pages_of(outbox: SqlOutbox, claim: Claim, besides: Sequence[str] = ()) -> list[list[Waiting]]:
    pages: list[list[Waiting]] = []
    while page := await outbox.read(claim, after=pages[-1][-1].id if pages else 0, besides=besides):
        pages.append(page)
    return pages


def ids(page: Sequence[Waiting]) -> list[str]:
    return [row.message.event_id for row in page]


async def test_a_page_of_large_messages_is_limited_by_their_size(engine: AsyncEngine) -> None:
    outbox, written = SqlOutbox(engine), [message(number) for number in range(20)]
    await add_to_outbox(engine, *written)

    pages = await pages_of(outbox, await claimed(outbox))

    assert [len(page) for page in pages] == [FULL, FULL, 20 - 2 * FULL]
    assert [row.message.event_id for page in pages for row in page] == [one.event_id for one in written]


async def test_a_message_larger_than_a_page_is_read_alone(engine: AsyncEngine) -> None:
    outbox = SqlOutbox(engine)
    await add_to_outbox(engine, message(0, 10), message(1, MAX_BYTES), message(2, MAX_BYTES), message(3, 10))

    pages = await pages_of(outbox, await claimed(outbox))

    assert [ids(page) for page in pages] == [["event-0", "event-1"], ["event-2"], ["event-3"]]


async def test_headers_and_keys_count(engine: AsyncEngine) -> None:
    outbox, large = SqlOutbox(engine), MAX_BYTES // 2
    with_key = Message("orders", b"k" * large, b"", (), "event-0", "order_placed")
    with_header = Message("orders", None, b"", (("h", b"v" * large),), "event-1", "order_placed")
    await add_to_outbox(engine, with_key, with_header, message(2, 10))

    pages = await pages_of(outbox, await claimed(outbox))

    assert [ids(page) for page in pages] == [["event-0", "event-1"], ["event-2"]]


async def test_messages_of_excluded_topics_take_no_room(engine: AsyncEngine) -> None:
    outbox = SqlOutbox(engine)
    await add_to_outbox(engine, *(message(number, topic="others") for number in range(10)), message(10), message(11))

    pages = await pages_of(outbox, await claimed(outbox), besides=["others"])

    assert [ids(page) for page in pages] == [["event-10", "event-11"]]


class Sized(SqlOutbox):
    """Notes the size of each page."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.sizes: list[int] = []

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        page = await super().read(claim, after=after, besides=besides)
        self.sizes.append(sum(len(row.message.value) for row in page))
        return page


async def test_a_backlog_of_large_messages_is_published_in_order(engine: AsyncEngine) -> None:
    broker, outbox = Broker(), Sized(engine)
    await add_to_outbox(engine, *map(message, range(60)))

    assert await Relay(outbox, broker, claim_seconds=60).drain()

    for key in range(5):
        assert broker.ids(b"key-%d" % key) == [f"event-{number}" for number in range(key, 60, 5)]
    assert max(outbox.sizes) == FULL * MEGABYTE


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)  # a table can be locked against readers
async def test_after_a_page_that_was_not_read_in_time_the_next_ones_are_smaller(engine: AsyncEngine) -> None:
    outbox = SqlOutbox(engine, timeout=timedelta(seconds=1))
    await add_to_outbox(engine, *(message(number, 10) for number in range(100)))
    claim = await claimed(outbox)
    async with engine.connect() as another:
        await another.execute(text("LOCK TABLE idempotency_outbox"))
        with pytest.raises(StoreUnavailableError):
            await outbox.read(claim)

    pages = await pages_of(outbox, claim)

    assert [len(page) for page in pages] == [8, 16, 32, 44]


class _Row:
    def __init__(self, total: int) -> None:
        self.total = total


def test_pages_grow_to_their_maximum() -> None:
    rows = PageRows()
    for _ in range(10):
        rows.was_read([])

    assert rows.count == MAX_ROWS


def test_pages_of_large_messages_stay_near_the_number_that_fits() -> None:
    """MySQL reads the values of all candidates."""
    rows = PageRows()

    rows.was_read([_Row(MAX_BYTES - 1), _Row(MAX_BYTES + 1)])

    assert rows.count == 4


def test_a_page_has_at_least_one_row() -> None:
    rows = PageRows()
    for _ in range(10):
        rows.was_not_read()

    assert rows.count == 1
