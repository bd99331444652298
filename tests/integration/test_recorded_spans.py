"""The spans of a worker on real Kafka and real Redis, in each situation of the reference."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from integr8s_idem import (
    BaseEvent,
    EventRouter,
    IdempotencyManager,
    Outgoing,
    PermanentError,
    Settings,
)
from integr8s_idem.failures import discard
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.reconciliation import Answer, Done
from integr8s_idem.records import Reserved, ReserveRequest, TraceLink
from integr8s_idem.telemetry import conventions
from integr8s_idem.telemetry.span_help import SITUATIONS, SPANS
from integr8s_idem.testing.span_recorder import PRODUCER, RecordedSpan, RecordedSpans, SpanRecorder
from integr8s_idem.worker import ServiceWorker, replay_of
from integr8s_idem.worker.relay import Relay
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.ledger_shop import open_ledger_shop
from tests.support.postgres import PostgresServer
from tests.support.replays import SIGNED
from tests.support.workers import QUICK, OrderPlaced, Shop, WorkerInTest, open_shop

pytestmark = pytest.mark.kafka

LEASE = 2.0
DEAD_OFFSET = 999
"""Offset of the delivery whose worker died."""


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"
    order_id: str


@dataclass
class Traced:
    """A shop whose workers record all spans."""

    shop: Shop
    recorder: SpanRecorder
    errors: list[Exception] = field(default_factory=list)
    """Errors of the next runs."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = 0
    reconciles: bool = False

    def __post_init__(self) -> None:
        self.may_end.set()

    def router(self) -> EventRouter:
        router = EventRouter(failures=[discard(KeyError)])
        router.on(OrderPlaced, name="charge", reconcile=self.find if self.reconciles else None)(self.charge)
        return router

    async def find(self, event: OrderPlaced) -> Answer:
        return Done(f"receipt-{event.order_id}")

    async def charge(self, event: OrderPlaced) -> str:
        self.started += 1
        await self.may_end.wait()
        if self.errors:
            raise self.errors.pop(0)
        return f"receipt-{event.order_id}"

    async def worker(self, *, on_in_progress: str = "wait", **service: Any) -> WorkerInTest:
        settings = QUICK.model_copy(update={"ordering": "none", **service})
        return await self.shop.worker(self.router(), service=settings, max_attempts=3, on_in_progress=on_in_progress)

    def spans(self) -> RecordedSpans:
        return self.recorder.spans()

    def tree(self) -> str:
        """Return the tree of all spans, without the prefix of the topics, after checking them with the reference."""
        spans = self.spans()
        for span in spans:
            check_with_reference(span)
        return spans.tree().replace(self.shop.settings.topic_prefix, "")


def check_with_reference(span: RecordedSpan) -> None:
    """Check the kind and the attributes of `span`."""
    [described] = [each for each in SPANS if re.fullmatch(re.escape(each.name).replace("<topic>", ".+"), span.name)]
    died = conventions.OUTCOME not in span.attributes and span.attributes.get(conventions.OFFSET) == DEAD_OFFSET
    always = set(described.always) - ({conventions.OUTCOME} if died else set())
    assert span.kind in described.kind.split(" or ")
    assert always - span.attributes.keys() == set()
    assert span.attributes.keys() - always - set(described.sometimes) == set()


@asynccontextmanager
async def traced(kafka: Kafka, prefix: str, redis_url: str) -> AsyncIterator[Traced]:
    recorder = SpanRecorder()
    async with open_shop(kafka, prefix, redis_url, partitions=2) as shop:
        shop.observer = recorder.observer("billing", group=f"{prefix}billing")
        shop.lease = LEASE
        await kafka.create_topics({f"{prefix}order_paid": 1})
        yield Traced(shop, recorder)


@pytest.fixture
async def here(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Traced]:
    async with traced(kafka, topic_prefix, redis_url) as here:
        yield here


ORDER = OrderPlaced(order_id="7", event_id="order-7")


async def test_handled(here: Traced) -> None:
    worker = await here.worker()
    await worker.publisher.publish(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["handled"]
    assert here.spans().one(f"send {here.shop.topic}").kind == "producer"


async def test_duplicate(here: Traced) -> None:
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)
    await here.shop.deliver(ORDER)
    await worker.idle(settled=2)

    assert here.tree() == SITUATIONS["duplicate"]


async def test_concurrent_duplicate(here: Traced) -> None:
    here.may_end.clear()
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await eventually(lambda: here.started)
    await here.shop.deliver(ORDER, partition=1)
    await eventually(lambda: worker.tally.waits)
    here.may_end.set()
    await worker.idle(settled=2)

    assert here.tree() == SITUATIONS["concurrent duplicate"]


async def test_skipped_duplicate(here: Traced) -> None:
    here.may_end.clear()
    worker = await here.worker(on_in_progress="skip")
    await here.shop.deliver(ORDER)
    await eventually(lambda: here.started)
    await here.shop.deliver(ORDER, partition=1)
    await eventually(lambda: worker.tally.duplicates)
    here.may_end.set()
    await worker.idle(settled=2)

    assert here.tree() == SITUATIONS["concurrent duplicate that is skipped"]


async def test_takeover(here: Traced) -> None:
    manager = here.shop.manager()
    with here.shop.observer.processing(_Dead(here.shop.topic), "order_placed", "order-7") as span:
        trace = span.trace()
    await _reserve(manager, trace)
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["takeover"]
    wait = here.spans().one("idempotency.wait")
    assert int(wait.attributes["idempotency.looks"]) > 1
    assert wait.end - wait.start > 0.5e9


async def test_takeover_reconciled(here: Traced) -> None:
    manager = here.shop.manager()
    with here.shop.observer.processing(_Dead(here.shop.topic), "order_placed", "order-7") as span:
        trace = span.trace()
    await _reserve(manager, trace)
    here.reconciles = True
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["takeover, reconciled"]
    assert here.started == 0


async def test_lost_lease(here: Traced) -> None:
    here.may_end.clear()
    worker = await here.worker(retry_initial_seconds=60, retry_max_seconds=60)
    await here.shop.deliver(ORDER)
    await eventually(lambda: here.started)
    await worker.manager.repository.delete([_full_key(worker.manager)])
    await _reserve(worker.manager, None)
    await eventually(lambda: worker.tally.leases_lost)
    await worker.stop()

    assert here.tree() == SITUATIONS["lost lease"]


async def test_failure(here: Traced) -> None:
    here.errors = [OSError("the bank is down")]
    worker = await here.worker(retry_initial_seconds=60, retry_max_seconds=60)
    await here.shop.deliver(ORDER)
    await eventually(lambda: worker.tally.retries)
    await worker.stop()

    assert here.tree() == SITUATIONS["failure"]


async def test_retry_then_success(here: Traced) -> None:
    here.errors = [OSError("the bank is down")]
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["retry, then success"]


async def test_dead_letter(here: Traced) -> None:
    here.errors = [PermanentError("no such card")]
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["dead letter"]
    assert here.spans().one(f"send {here.shop.topic}.dlq").kind == "client"


async def test_discarded(here: Traced) -> None:
    here.errors = [KeyError("no such order")]
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["discarded"]


async def test_undecodable(here: Traced) -> None:
    worker = await here.worker()
    await here.shop.publisher.send(here.shop.topic, None, b"not json", [])
    await worker.idle(settled=1)

    assert here.tree() == SITUATIONS["undecodable"]


async def test_batch(here: Traced) -> None:
    router = EventRouter()

    @router.on_batch(OrderPlaced, max_size=2, max_wait=timedelta(seconds=30), name="index")
    async def index(events: Sequence[OrderPlaced]) -> None:
        assert len(events) == 2

    worker = await here.shop.worker(router, service=QUICK.model_copy(update={"ordering": "none"}))
    for number in range(2):
        await here.shop.deliver(OrderPlaced(order_id=str(number)))
    await worker.idle(settled=2)

    assert here.tree() == SITUATIONS["batch"]
    assert here.spans().one("idempotency.handle_batch").attributes["messaging.batch.message_count"] == 2


async def test_transaction(here: Traced, shared_postgres: PostgresServer) -> None:
    router = EventRouter()

    @router.on(OrderPlaced, name="charge")
    async def charge(event: OrderPlaced, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> None:
        outgoing.publish(OrderPaid(order_id=event.order_id))

    shop = here.shop
    settings = Settings(kafka=shop.settings)
    async with open_ledger_shop(shared_postgres.url, router, settings=settings, observer=shop.observer) as ledger:
        publisher = shop.publisher_of_workers()
        worker = ServiceWorker(
            "billing", ledger.dispatcher, publisher, shop.settings, QUICK, group=f"{shop.settings.topic_prefix}billing"
        )
        assert ledger.dispatcher.outbox is not None
        relay = Relay(ledger.dispatcher.outbox, publisher, claim_seconds=60)
        running = [asyncio.create_task(worker.run()), asyncio.create_task(relay.run())]
        await eventually(lambda: worker.health().ready, state=worker.health)
        await shop.deliver(ORDER)
        await eventually(lambda: here.spans().named(f"send {shop.settings.topic_prefix}order_paid"))
        await eventually(lambda: worker.report().lag == 0)
        worker.stop()
        relay.stop()
        await asyncio.gather(*running)
        await publisher.close()

    assert here.tree() == SITUATIONS["transaction"]
    sent = here.spans().one(f"send {here.shop.settings.topic_prefix}order_paid")
    assert (sent.kind, sent.links[PRODUCER]) == ("client", sent.parent)


async def test_replay(here: Traced) -> None:
    here.errors = [PermanentError("no such card")]
    worker = await here.worker()
    await here.shop.deliver(ORDER)
    await worker.idle(settled=1)
    [dead_letter] = await here.shop.messages(f"{here.shop.topic}.dlq", 1)
    await here.shop.publisher.send(*replay_of(dead_letter, SIGNED))
    await worker.idle(settled=2)

    assert here.tree() == SITUATIONS["replay"]
    first, second = here.spans().named(f"process {here.shop.topic}")
    assert first.trace_id != second.trace_id


@dataclass(frozen=True)
class _Dead:
    """A message whose worker died."""

    topic: str
    partition: int = 0
    offset: int = DEAD_OFFSET
    headers: tuple[tuple[str, bytes], ...] = ()


def _full_key(manager: IdempotencyManager) -> str:
    return manager.space.full(KeyResolver().resolve("charge", ORDER).key)


async def _reserve(manager: IdempotencyManager, trace: TraceLink | None) -> None:
    """Reserve the key of the order, like a worker that dies then."""
    fingerprint = KeyResolver().resolve("charge", ORDER).fingerprint
    request = ReserveRequest(
        key=_full_key(manager),
        token=b"t" * 16,
        lease=timedelta(seconds=LEASE),
        retention=timedelta(hours=1),
        fingerprint=fingerprint,
        owner="a worker that died",
        trace=trace,
    )
    [verdict] = await manager.repository.reserve([request])
    assert isinstance(verdict, Reserved)
