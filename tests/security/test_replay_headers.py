"""Forged replay headers of producers cannot make a service run again or skip anything.

Broker and store are in memory.
"""

from __future__ import annotations

import asyncio
import logging
from io import StringIO
from typing import Any, Literal

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from integr8s_idem.cli.top_table import fleet_table
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.operations.fleet import Figures, FleetSnapshot, ServiceRow, WorkerSnapshot
from integr8s_idem.operations.metrics_scraper import parse_metrics
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry import Signal
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.dead_letters import claim_of, replay_of
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import running
from tests.support.guarded import guarded

pytestmark = pytest.mark.scenario(123, 124)

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class Till:
    """A service with two handlers, which can be broken, and their runs."""

    def __init__(self, **config: Any) -> None:
        self.here = guarded(max_attempts=1, **config)
        self.runs: list[str] = []
        self.broken: set[str] = set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.router = EventRouter()
        for name in ("charge", "mail"):
            self.router.on(OrderPlaced, name=name)(self._handler(name))

    def _handler(self, name: str) -> Any:
        async def handle(event: OrderPlaced) -> None:
            self.runs.append(f"{name} {event.order_id}")
            await self.may_end.wait()
            if name in self.broken:
                raise ConnectionError("no answer from the bank")

        return handle

    @property
    def dispatcher(self) -> IdempotentEventDispatcher:
        return IdempotentEventDispatcher(self.router, self.here.manager)

    def refused(self, reason: str | None = None) -> int:
        """Return how many replay headers were refused, for a reason or in total."""
        if reason is None:
            return self.here.observer.counts[Signal("idempotency_replays_refused")]
        return self.here.observer.reasons[Signal("idempotency_replays_refused"), "", reason]

    async def history(self, event: BaseEvent, handler: str = "charge") -> dict[int, str]:
        """Return the status of each generation with a record."""
        key = KeyResolver().resolve(handler, event).key
        found = await self.here.manager.history(key)
        return {generation: record.status.value for generation, record in found.items()}


def put(broker: FakeBroker, event: BaseEvent, *headers: tuple[str, Any]) -> None:
    broker.put(event.event_type, encode_event(event), headers=list(headers))


async def consumed(till: Till, broker: FakeBroker, **more: Any) -> None:
    """Run a worker until everything in the topic is settled."""
    async with running(till.dispatcher, broker, **more) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == broker.end(TOPIC))


@pytest.mark.parametrize("group", [b"analytics", b"billing-2", b"", None, b"\xff", b"g" * 10_000])
@virtual_time
async def test_a_forged_group_header_does_not_skip_an_event(group: bytes | None) -> None:
    broker, till = FakeBroker(), Till()
    put(broker, OrderPlaced(), ("idempotency-replay-group", group))

    await consumed(till, broker)

    assert sorted(till.runs) == ["charge 1", "mail 1"]
    assert till.refused("unsigned") == (1 if group else 0)


@pytest.mark.parametrize("group", [b"analytics", b"", None])
@virtual_time
async def test_a_forged_group_header_does_not_skip_a_malformed_message(group: bytes | None) -> None:
    broker, till = FakeBroker(), Till()
    broker.put("order_placed", b"not an event", headers=[("idempotency-replay-group", group)])  # type: ignore[list-item]

    await consumed(till, broker)

    (dead_letter,) = broker.values(DEAD)
    assert dict(dead_letter.headers)["idempotency-dlq-reason"] == b"malformed"


@pytest.mark.parametrize("handler", [b"charge", b"nobody", b"", None, b"\xff"])
@virtual_time
async def test_a_forged_handler_header_does_not_skip_a_handler(handler: bytes | None) -> None:
    broker, till = FakeBroker(), Till()
    put(broker, OrderPlaced(), ("idempotency-replay-handler", handler), ("idempotency-replay-group", b"billing"))

    await consumed(till, broker)

    assert sorted(till.runs) == ["charge 1", "mail 1"]
    assert broker.values(DEAD) == []
    assert till.refused("unsigned") == 1


@virtual_time
async def test_a_forged_generation_header_does_not_repeat_completed_work() -> None:
    broker, till, event = FakeBroker(), Till(), OrderPlaced()
    put(broker, event)
    for generation in range(1, 1_000):
        put(broker, event, ("idempotency-generation", b"%d" % generation))

    await consumed(till, broker)

    assert sorted(till.runs) == ["charge 1", "mail 1"]
    assert till.refused("not_failed") == 999
    assert await till.history(event) == {0: "completed"}


@pytest.mark.parametrize("generation", [b"one", b"-1", b"1000", b"9" * 100_000, "²".encode(), b"\xff", b" 1"])
@virtual_time
async def test_an_invalid_generation_does_not_skip_an_event(generation: bytes) -> None:
    broker, till = FakeBroker(), Till()
    put(broker, OrderPlaced(), ("idempotency-generation", generation))

    await consumed(till, broker)

    assert sorted(till.runs) == ["charge 1", "mail 1"]
    assert till.refused("malformed") == 1


@virtual_time
async def test_a_generation_of_an_event_in_progress_does_not_start_a_second_run() -> None:
    broker, till, event = FakeBroker(), Till(), OrderPlaced()
    till.may_end.clear()
    put(broker, event)

    async with running(till.dispatcher, broker, ordering="none") as worker:
        await worker.until(lambda: len(till.runs) == 2)
        put(broker, event, ("idempotency-generation", b"1"))
        await worker.until(lambda: till.refused() == 1)
        till.may_end.set()
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert sorted(till.runs) == ["charge 1", "mail 1"]


class TestFailedOnly:
    """Without a secret, a generation only runs if the previous one has failed according to the store."""

    @virtual_time
    async def test_failed_work_is_repeated_and_completed_work_of_the_event_is_not(self) -> None:
        broker, till, event = FakeBroker(), Till(), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        till.broken = set()
        for _ in range(2):
            put(broker, event, ("idempotency-generation", b"1"))

        await consumed(till, broker)

        assert sorted(till.runs) == ["charge 1", "charge 1", "mail 1"]
        assert await till.history(event) == {0: "failed", 1: "completed"}
        assert await till.history(event, "mail") == {0: "completed"}
        assert till.refused() == 0

    @pytest.mark.parametrize("generation", [0, 2, 3, 999])
    @virtual_time
    async def test_generations_cannot_be_skipped(self, generation: int) -> None:
        broker, till, event = FakeBroker(), Till(), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        put(broker, event, ("idempotency-generation", b"%d" % generation))

        await consumed(till, broker)

        assert till.runs.count("charge 1") == 1
        assert till.refused() == 1

    @virtual_time
    async def test_failed_work_is_not_repeated_with_another_payload(self) -> None:
        broker, till, event = FakeBroker(), Till(), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        till.broken = set()
        put(broker, event.model_copy(update={"order_id": "forged"}), ("idempotency-generation", b"1"))

        await consumed(till, broker)

        assert till.runs.count("charge 1") == 1
        assert not any("forged" in run for run in till.runs)
        assert till.refused("not_failed") == 1

    @virtual_time
    async def test_only_the_failed_handler_can_be_repeated(self) -> None:
        broker, till, event = FakeBroker(), Till(), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        put(broker, event, ("idempotency-generation", b"1"), ("idempotency-replay-handler", b"mail"))

        await consumed(till, broker)

        assert sorted(till.runs) == ["charge 1", "mail 1"]
        assert till.refused("not_failed") == 1

    @virtual_time
    async def test_a_replay_redelivered_after_the_failure_expired_is_a_duplicate(self) -> None:
        broker, till, event = FakeBroker(), Till(default_ttl_seconds=600), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        till.broken = set()
        await asyncio.sleep(400)
        put(broker, event, ("idempotency-generation", b"1"), ("idempotency-replay-handler", b"charge"))
        await consumed(till, broker)
        await asyncio.sleep(400)
        assert await till.history(event) == {1: "completed"}
        put(broker, event, ("idempotency-generation", b"1"), ("idempotency-replay-handler", b"charge"))

        await consumed(till, broker)

        assert till.runs.count("charge 1") == 2

    @virtual_time
    async def test_a_replay_waits_while_the_store_does_not_answer(self) -> None:
        broker, till, event = FakeBroker(), Till(), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        till.broken = set()
        put(broker, event, ("idempotency-generation", b"1"))

        async with running(till.dispatcher, broker) as worker:
            till.here.store.fail_next("get", 3)
            await worker.until(lambda: broker.committed.get(TOPIC) == 2)

        assert await till.history(event) == {0: "failed", 1: "completed"}
        assert till.refused() == 0

    @virtual_time
    async def test_a_flood_of_high_generations_reads_two_records_each(self) -> None:
        broker, till, event, sizes = FakeBroker(), Till(), OrderPlaced(), list[int]()
        get = till.here.store.get

        async def noted(keys: Any) -> Any:
            sizes.append(len(keys))
            return await get(keys)

        till.here.store.get = noted  # type: ignore[method-assign]
        for _ in range(100):
            put(broker, event, ("idempotency-generation", b"999"))

        await consumed(till, broker)

        assert sizes == [2] * 200


@virtual_time
async def test_a_flood_of_refused_headers_is_counted_in_full_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, till = FakeBroker(), Till()
    caplog.set_level(logging.INFO)
    for number in range(1_000):
        put(broker, OrderPlaced(order_id=str(number)), ("idempotency-replay-group", b"analytics\x1b[2J\n"))

    async with running(till.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1_000)
        await asyncio.sleep(60)
        put(broker, OrderPlaced(), ("idempotency-replay-group", b"analytics"))
        await worker.until(lambda: broker.committed.get(TOPIC) == 1_001)

    lines = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert len(lines) == 2
    assert "order_placed[0]@0 its replay headers are refused (unsigned)" in lines[0]
    assert "999 similar messages were not logged" in lines[1]
    assert not any("analytics" in line for line in lines)
    assert till.refused() == 1_001
    assert len(till.runs) == 2_002


@virtual_time
async def test_a_dead_letter_ignores_a_forged_generation_of_its_message() -> None:
    broker, till, event = FakeBroker(), Till(), OrderPlaced()
    till.broken = {"charge"}
    put(broker, event, ("idempotency-generation", b"998"))

    await consumed(till, broker)

    (dead_letter,) = broker.values(DEAD)
    assert dict(replay_of(dead_letter).headers)["idempotency-generation"] == b"1"


@virtual_time
async def test_a_replay_without_a_secret_works_before_and_after_the_failure_expires() -> None:
    for pause in (0, 3_000):
        broker, till, event = FakeBroker(), Till(default_ttl_seconds=600), OrderPlaced()
        till.broken = {"charge"}
        put(broker, event)
        await consumed(till, broker)
        till.broken = set()
        await asyncio.sleep(pause)
        topic, key, value, headers = replay_of(broker.values(DEAD)[0])
        broker.put(topic, value, key=key, headers=headers)

        await consumed(till, broker)

        history = await till.history(event)
        assert IdempotencyStatus.COMPLETED.value in history.values(), pause
        assert till.runs.count("charge 1") == 2, pause


@virtual_time
async def test_refused_and_skipped_replays_are_in_the_metrics_and_in_top() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver("billing", registry)
    observer.count(Signal.REPLAY_REFUSED, reason="unsigned")
    observer.count(Signal.REPLAY_REFUSED, reason="malformed")
    observer.count(Signal.REPLAY_FOR_OTHERS)
    _, services = parse_metrics(generate_latest(registry).decode())
    figures = Figures({signal: int(count) for signal, count in services["billing"].counts.items()})
    snapshot = FleetSnapshot([WorkerSnapshot("w:1", [ServiceRow("billing", "w:1", "ready", figures=figures)])])

    page = StringIO()
    Console(file=page, width=100).print(fleet_table(snapshot, 100))

    assert "billing: 2 messages with refused replay headers, handled as ordinary deliveries" in page.getvalue()
    assert "billing: 1 replays for other consumer groups skipped" in page.getvalue()
    assert snapshot.as_json()["services"]["billing"]["replays_refused"] == 2
    assert snapshot.as_json()["services"]["billing"]["replays_for_other_groups"] == 1
    labels = {"service": "billing", "reason": "unsigned"}
    assert registry.get_sample_value("idempotency_replays_refused_total", labels) == 1


def test_similar_header_names_are_not_replay_headers() -> None:
    headers = [("idempotency-key", b"1"), ("idempotency-dlq-generation", b"7"), ("idempotency-generations", b"7")]

    assert claim_of(FakeRecord("orders", 0, 0, None, b"{}", headers)) is None
