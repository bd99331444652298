"""Batch handlers in the worker on real Kafka and real Redis: each event is handled once, even if its batch fails."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from integr8s_idem import EventPublisher, EventRouter, IdempotencyStatus, PermanentError
from integr8s_idem.errors import PartialFailureError
from tests.support import batch_shop
from tests.support.batch_shop import SIZE, Line
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.processes import ServiceProcess
from tests.support.workers import QUICK, OrderPlaced, Shop, header, open_shop, orders

pytestmark = pytest.mark.kafka

WIDE = QUICK.model_copy(update={"ordering": "none", "concurrency": 200})


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        yield shop


@dataclass
class Index:
    """A batch handler that records its batches."""

    size: int = 10
    wait: float = 0.2
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    """Errors of the next runs, by order ID."""
    batches: list[list[str]] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_end.set()

    @property
    def router(self) -> EventRouter:
        router = EventRouter()
        router.on_batch(OrderPlaced, max_size=self.size, max_wait=timedelta(seconds=self.wait), name="index")(self.take)
        return router

    async def take(self, events: Sequence[OrderPlaced]) -> None:
        names = [event.order_id for event in events]
        self.batches.append(names)
        await self.may_end.wait()
        failed = {place: self.failures[name].pop() for place, name in enumerate(names) if self.failures.get(name)}
        if failed:
            raise PartialFailureError(failed)

    @property
    def times(self) -> Counter[str]:
        """Return how often the handler received each order."""
        return Counter(itertools.chain(*self.batches))


async def test_the_handler_gets_duplicates_of_an_event_once(shop: Shop) -> None:
    index, events = Index(), orders(60)
    for event in (*events, *events[::2]):
        await shop.deliver(event, partition=int(event.order_id) // 2 % 2)
    for event in events[::3]:
        await shop.deliver(event, partition=1 - int(event.order_id) // 2 % 2)
    worker = await shop.worker(index.router, service=WIDE)

    await worker.idle(settled=110)

    assert index.times == dict.fromkeys(map(str, range(60)), 1)
    assert (worker.tally.handled, worker.tally.duplicates) == (60, 50)


async def test_failed_events_are_retried_and_permanent_failures_dead_lettered(shop: Shop) -> None:
    index, events = Index(), orders(10)
    index.failures = {"3": [OSError("down"), OSError("down")], "7": [PermanentError("no such product")]}
    worker = await shop.worker(index.router, service=WIDE)
    await shop.publisher.publish(*events)

    await worker.idle(settled=10)

    assert index.times == {**dict.fromkeys(map(str, range(10)), 1), "3": 3}
    assert index.batches[-2:] == [["3"], ["3"]]
    assert (worker.tally.handled, worker.tally.retries, worker.tally.dead_letters) == (9, 2, 1)
    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)
    assert (header(dead_letter, "error-class"), header(dead_letter, "attempts")) == ("PermanentError", "1")
    assert b'"order_id":"7"' in dead_letter.value.replace(b" ", b"")


async def test_events_of_a_failed_batch_are_retried_one_by_one(shop: Shop) -> None:
    index = Index(size=4, wait=5)
    errors: list[Exception] = [OSError("the index is down")]
    take = index.take

    async def failing(events: Sequence[OrderPlaced]) -> None:
        await take(events)
        if errors:
            raise errors.pop()

    index.take = failing  # type: ignore[method-assign]
    worker = await shop.worker(index.router, service=WIDE)
    await shop.publisher.publish(*orders(4))

    await worker.idle(settled=4)

    assert list(map(len, index.batches)) == [4, 1, 1, 1, 1]
    assert index.times == dict.fromkeys("0123", 2)


@pytest.mark.parametrize("drain", [30.0, 0.5], ids=["within the drain timeout", "after the drain timeout"])
async def test_a_batch_is_handled_once_if_its_partitions_are_revoked_meanwhile(shop: Shop, drain: float) -> None:
    index = Index(size=4, wait=5)
    index.may_end.clear()
    service = WIDE.model_copy(update={"drain_timeout_seconds": drain})
    settings = shop.settings.model_copy(update={"rebalance_timeout_seconds": 60})
    first = await shop.worker(index.router, service=service, kafka=settings)
    for number, event in enumerate(orders(4)):
        await shop.deliver(event, partition=number % 2)
    await eventually(lambda: index.batches)
    joining = asyncio.create_task(shop.worker(index.router, service=service, kafka=settings))

    if drain < 1:  # the first worker has lost its partitions, and the second waits for the outcome of the batch
        await eventually(lambda: first.tally.stale == 0 and joining.done() and joining.result().tally.waits)
    else:
        await eventually(lambda: all(held.closed for held in first.worker._partitions.assignments.values()))
    index.may_end.set()
    second = await joining
    await eventually(lambda: first.worker.report().lag == second.worker.report().lag == 0)

    assert list(map(len, index.batches)) == [4]
    assert index.times == dict.fromkeys("0123", 1)
    assert first.tally.handled == 4
    assert bool(first.tally.stale) is bool(second.tally.duplicates) is (drain < 1)
    await eventually_committed(shop, 2)


async def eventually_committed(shop: Shop, offset: int) -> None:
    async with asyncio.timeout(30):
        while [await shop.committed(0), await shop.committed(1)] != [offset, offset]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_events_with_one_key_are_in_separate_batches_and_keep_their_order(shop: Shop) -> None:
    index = Index(size=3)
    keys = "abcdef"
    events = [
        OrderPlaced(order_id=f"{key}{number}", aggregate_id=key) for number, key in itertools.product(range(10), keys)
    ]
    await shop.publisher.publish(*events)
    worker = await shop.worker(index.router, service=WIDE.model_copy(update={"ordering": "key"}))

    await worker.idle(settled=60)

    assert all(len({name[0] for name in batch}) == len(batch) for batch in index.batches)
    for key in keys:
        assert [name for name in itertools.chain(*index.batches) if name[0] == key] == [f"{key}{n}" for n in range(10)]
    assert max(map(len, index.batches)) == 3


async def test_with_partition_ordering_a_batch_has_one_event_per_partition(shop: Shop) -> None:
    index = Index(size=10, wait=0.05)
    for number in range(10):
        for partition in (0, 1):
            await shop.deliver(OrderPlaced(order_id=f"{partition}-{number}"), partition=partition)
    worker = await shop.worker(index.router, service=WIDE.model_copy(update={"ordering": "partition"}))

    await worker.idle(settled=20)

    assert all(len({name[0] for name in batch}) == len(batch) for batch in index.batches)
    for place in "01":
        names = [name for name in itertools.chain(*index.batches) if name[0] == place]
        assert names == [f"{place}-{number}" for number in range(10)]


async def test_without_ordering_two_thousand_events_fill_their_batches(shop: Shop) -> None:
    index = Index(size=100, wait=60)  # no batch of a slow machine may begin because its time is up
    await shop.publisher.publish(*orders(2_000))
    worker = await shop.worker(index.router, service=WIDE)

    await worker.idle(settled=2_000)

    assert index.times == dict.fromkeys(map(str, range(2_000)), 1)
    assert [len(batch) for batch in index.batches] == [100] * 20


@dataclass
class Search:
    """The service of `tests.support.batch_shop`, in separate processes."""

    folder: Path
    publisher: EventPublisher
    shop: Shop

    def process(self, name: str) -> ServiceProcess:
        return ServiceProcess(
            "tests.support.batch_shop:platform",
            "--settings",
            str(self.folder / "settings.toml"),
            "--json",
            log=self.folder / f"{name}.log",
            env={"SHOP_JOURNAL": str(self.folder / "journal")},
        )

    def lines(self, what: str) -> list[Line]:
        return [line for line in batch_shop.journal_of(self.folder / "journal") if line.what == what]

    def runs(self, what: str) -> dict[str, list[int]]:
        """Return the recorded attempts by order ID."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for line in self.lines(what):
            found[line.order].append(line.attempt)
        return dict(found)

    async def completed(self, count: int) -> None:
        """Return once `count` events are completed."""
        store = self.shop.manager().repository
        async with asyncio.timeout(60):
            while True:
                records = [record async for record in store.scan("idempotency:search:")]
                if sum(record.status is IdempotencyStatus.COMPLETED for record in records) == count:
                    return
                await asyncio.sleep(0.1)


@pytest.fixture
def search(shop: Shop, redis_url: str, tmp_path: Path) -> Search:
    (tmp_path / "settings.toml").write_text(f"""
[kafka]
bootstrap_servers = "{shop.kafka.bootstrap}"
topic_prefix = "{shop.settings.topic_prefix}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 0.5
metadata_max_age_seconds = 1
[store]
url = "{redis_url}"
timeout_seconds = 0.6
[idempotency]
processing_timeout_seconds = 2
[services.search]
group_id = "{shop.settings.topic_prefix}search"
ordering = "none"
commit_interval_seconds = 0.2
[telemetry]
metrics_port = 0
""")
    return Search(tmp_path, shop.publisher, shop)


@pytest.mark.scenario(116)
async def test_after_a_crash_in_a_batch_only_uncompleted_events_are_handled_again_one_by_one(
    search: Search,
) -> None:
    before = [batch_shop.OrderPlaced(order_id=f"before-{number}") for number in range(SIZE)]
    within = [batch_shop.OrderPlaced(order_id=f"within-{number}", holds=number == 2) for number in range(SIZE)]
    with search.process("first") as first:
        await search.publisher.publish(*before)
        await search.completed(SIZE)
        await search.publisher.publish(*within)
        await eventually(lambda: "within-2" in search.runs("effect"), state=lambda: first.output)
        first.kill()
    batch = [line.order for line in search.lines("given") if line.order.startswith("within")]
    assert sorted(batch) == [event.order_id for event in within]
    reached = batch[: batch.index("within-2") + 1]

    await search.publisher.publish(*before, *within)
    with search.process("second"):
        await search.completed(2 * SIZE)

    again = {event.order_id: [1, 2] for event in within}
    assert search.runs("given") == {**{event.order_id: [1] for event in before}, **again}
    assert {line.size for line in search.lines("given") if line.attempt == 2} == {1}
    assert search.runs("effect") == {
        **{event.order_id: [1] for event in before},
        **{order: [1, 2] if order in reached else [2] for order in again},
    }
