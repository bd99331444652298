"""`ServiceWorker` on an in-memory broker: which outcomes of a handler allow its offset to be committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from integr8s_idem.config import OnFailure
from integr8s_idem.errors import PermanentError
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import consumer, poller
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.replays import TRUSTED

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


class HoldingPublisher(FakePublisher):
    """Blocks messages to one topic until `may_continue` is set."""

    def __init__(self, broker: FakeBroker, held: str) -> None:
        super().__init__(broker)
        self.held = held
        self.is_blocked = False
        self.may_continue = asyncio.Event()

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        if topic == self.held:
            self.is_blocked = True
            await self.may_continue.wait()
        await super().send(topic, key, value, headers)


async def do_nothing(event: BaseEvent) -> None: ...


def dispatcher_of(handle: Callable[[OrderPlaced], Any], here: Guarded | None = None) -> EventDispatcher:
    router = EventRouter()
    router.on(OrderPlaced, name="handle")(handle)
    return IdempotentEventDispatcher(router, here.manager) if here else EventDispatcher(router)


def fields_of(record: FakeRecord) -> dict[str, bytes]:
    return {name.removeprefix("idempotency-dlq-"): text for name, text in record.headers}


@pytest.mark.scenario(1, 13)
@virtual_time
async def test_a_duplicate_is_acknowledged_without_a_second_run() -> None:
    broker, runs, event = FakeBroker(), list[str](), OrderPlaced()
    broker.publish(event, event, event)

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)

    assert runs == ["1"]
    assert worker.worker.report().tally.duplicates == 2


@pytest.mark.parametrize(
    ("error", "config", "attempts"),
    [
        (ValueError("no"), {"max_attempts": 3}, b"3"),
        (PermanentError("no"), {}, b"1"),
        (ValueError("no"), {"on_failure": OnFailure.BLOCK}, b"1"),
    ],
)
@virtual_time
async def test_a_failed_event_is_dead_lettered_before_its_offset_is_committed(
    error: Exception, config: dict[str, Any], attempts: bytes
) -> None:
    broker = FakeBroker()
    broker.publish(OrderPlaced())

    async def handle(event: OrderPlaced) -> None:
        assert TOPIC not in broker.committed
        raise error

    async with running(dispatcher_of(handle, guarded(**config)), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values(DEAD)
    assert dead_letter.value == broker.values("order_placed")[0].value
    assert (fields_of(dead_letter)["reason"], fields_of(dead_letter)["attempts"]) == (b"handler_failed", attempts)


@pytest.mark.scenario(81)
@virtual_time
async def test_an_undecodable_message_is_dead_lettered_unchanged_and_does_not_block_others() -> None:
    broker, runs = FakeBroker(), list[str]()
    broker.put("order_placed", b"\xff not json", headers=[("x", b"\xfe")])
    broker.publish(OrderPlaced())

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    (dead_letter,) = broker.values(DEAD)
    assert (dead_letter.value, dead_letter.headers[0]) == (b"\xff not json", ("x", b"\xfe"))
    assert fields_of(dead_letter)["reason"] == b"malformed"
    assert runs == ["1"]


@virtual_time
async def test_an_unavailable_dead_letter_topic_does_not_block_other_dead_letter_topics() -> None:
    broker, other = FakeBroker(), Partition("order_paid", 0)
    publisher, router = HoldingPublisher(broker, held=DEAD), EventRouter()
    router.on(OrderPlaced, OrderPaid)(do_nothing)
    broker.logs[other] = []
    broker.put("order_placed", b"not json")

    async with running(IdempotentEventDispatcher(router, guarded().manager), broker, publisher) as worker:
        await worker.until(lambda: publisher.is_blocked)
        broker.put("order_paid", b"not json")
        await worker.until(lambda: broker.committed.get(other) == 1)
        assert TOPIC not in broker.committed
        publisher.may_continue.set()
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    assert (len(broker.values(DEAD)), len(broker.values("order_paid.dlq"))) == (1, 1)


@pytest.mark.scenario(73)
@virtual_time
async def test_a_message_too_large_for_the_dead_letter_topic_leaves_its_size_and_hash() -> None:
    broker = FakeBroker()
    broker.put("order_placed", b"x" * 5_000)
    publisher = FakePublisher(broker, limit=2_000)

    async with running(dispatcher_of(lambda event: asyncio.sleep(0), guarded()), broker, publisher) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values(DEAD)
    assert dead_letter.value is None
    assert (fields_of(dead_letter)["body-bytes"], fields_of(dead_letter)["dropped"]) == (b"5000", b"value")
    assert fields_of(dead_letter)["body-sha256"].decode() == sha256(b"x" * 5_000).hexdigest()


@pytest.mark.scenario(73)
@virtual_time
async def test_headers_too_large_for_the_dead_letter_topic_are_dropped() -> None:
    broker = FakeBroker()
    broker.put("order_placed", b"no json", headers=[("huge", b"h" * 5_000)])
    publisher = FakePublisher(broker, limit=2_000)

    async with running(dispatcher_of(lambda event: asyncio.sleep(0), guarded()), broker, publisher) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values(DEAD)
    assert [name for name, _ in dead_letter.headers if name == "huge"] == []
    assert [text for name, text in dead_letter.headers if name.endswith("-dropped")] == [b"value", b"headers"]
    assert fields_of(dead_letter)["reason"] == b"malformed"


@pytest.mark.scenario(73)
@virtual_time
async def test_messages_wait_for_an_unavailable_dead_letter_topic_and_the_service_goes_on() -> None:
    broker = FakeBroker()
    broker.put("order_placed", b"no json", key=b"k")
    broker.publish(OrderPlaced(), partition=1)
    publisher = FakePublisher(broker, limit=10)

    async with running(dispatcher_of(lambda event: asyncio.sleep(0), guarded()), broker, publisher) as worker:
        await worker.until(lambda: broker.committed.get(Partition("order_placed", 1)) == 1)
        await asyncio.sleep(60)
        assert broker.committed.get(TOPIC) is None
        publisher.limit = 2_000
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    assert [fields_of(dead_letter)["reason"] for dead_letter in broker.values(DEAD)] == [b"malformed"]


@pytest.mark.scenario(41)
@virtual_time
async def test_an_outage_of_the_store_causes_no_attempts_and_no_dead_letters() -> None:
    here, broker, attempts = guarded(max_attempts=1), FakeBroker(), list[str]()
    broker.put("order_placed", None)

    async def handle(event: OrderPlaced) -> None:
        attempts.append(event.order_id)

    async with running(dispatcher_of(handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: worker.worker.report().state == "running")
        here.store.down |= {"reserve", "renew", "complete", "fail", "release", "ping"}
        broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(20)))
        await asyncio.sleep(LEASE * 20)
        assert (attempts, broker.committed) == ([], {TOPIC: 1})
        assert worker.worker.report().state == "paused"
        here.store.down.clear()
        await worker.until(lambda: broker.committed.get(TOPIC) == 21, 10)

    assert sorted(map(int, attempts)) == list(range(20))
    assert [fields_of(dead_letter)["reason"] for dead_letter in broker.values(DEAD)] == [b"empty"]


@pytest.mark.scenario(41)
@virtual_time
async def test_an_outage_while_handlers_run_causes_no_second_run() -> None:
    here, broker, runs = guarded(), FakeBroker(), list[str]()
    broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(20)))

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        await asyncio.sleep(5)

    async with running(dispatcher_of(handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: len(runs) == 20)
        here.store.down |= {"reserve", "renew", "complete", "fail", "release", "ping"}
        await asyncio.sleep(LEASE * 20)
        here.store.down.clear()
        await worker.until(lambda: broker.committed.get(TOPIC) == 20, 10)

    assert len(runs) == 20


@pytest.mark.parametrize("guard", [True, False])
@virtual_time
async def test_a_handler_that_raises_cancelled_error_is_retried_and_its_partition_goes_on(guard: bool) -> None:
    broker, runs = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="1"), OrderPlaced(order_id="2"))

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        if len(runs) == 1:
            raise asyncio.CancelledError

    async with running(dispatcher_of(handle, guarded() if guard else None), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2, 60)

    assert runs == ["1", "1", "2"]


@virtual_time
async def test_a_worker_that_dies_loses_nothing_and_its_successor_sees_attempt_two() -> None:
    here, broker, attempts = guarded(), FakeBroker(), list[str]()
    broker.publish(OrderPlaced())

    async def handle(event: OrderPlaced) -> None:
        attempts.append(event.order_id)
        await asyncio.sleep(5)

    async with running(dispatcher_of(handle, here), broker) as first:
        await first.until(lambda: len(attempts) == 1)
        here.store.down |= {"complete", "release"}  # a dead process writes nothing
        await first.crash()
        assert TOPIC not in broker.committed
    here.store.down.clear()

    successor = guarded(here.store)
    async with running(dispatcher_of(handle, successor), broker) as second:
        await second.until(lambda: broker.committed.get(TOPIC) == 1, LEASE + 10)

    assert len(attempts) == 2
    assert second.worker.report().tally.reruns == 1


@pytest.mark.scenario(12, 38)
@virtual_time
async def test_a_completion_after_the_partition_was_revoked_commits_no_offset() -> None:
    here, broker, runs = guarded(), FakeBroker(), list[str]()
    broker.publish(OrderPlaced())

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        await asyncio.sleep(20)

    async with running(dispatcher_of(handle, here), broker, drain_timeout_seconds=5) as worker:
        await worker.until(lambda: len(runs) == 1)
        await worker.consumer.take({TOPIC})
        await worker.consumer.give({TOPIC})
        await worker.until(lambda: worker.worker.report().tally.stale == 1)
        assert TOPIC not in broker.committed
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    assert runs == ["1"]


@virtual_time
async def test_a_stopped_worker_waits_for_running_handlers_and_commits_them() -> None:
    broker, ends = FakeBroker(), list[str]()
    broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(5)))

    async def handle(event: OrderPlaced) -> None:
        await asyncio.sleep(3)
        ends.append(event.order_id)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: len(ends) == 1)
        await asyncio.sleep(1)

    assert ends == ["0", "1"]
    assert broker.committed[TOPIC] == 2


@pytest.mark.scenario(66, 67)
@virtual_time
async def test_a_failed_poll_loses_no_messages_of_other_partitions() -> None:
    """When `getmany` fails, aiokafka drops records that it has already read and whose positions it has advanced."""
    broker, runs = FakeBroker(), list[str]()
    for number in range(6):
        broker.publish(OrderPlaced(order_id=str(number)), partition=number % 2)
    broker.damaged[Partition("order_placed", 1)] = 0

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)
        broker.publish(OrderPlaced(order_id="later"))
        await worker.until(lambda: broker.committed.get(TOPIC) == 4)

        assert worker.consumer.paused == {Partition("order_placed", 1)}

    assert runs == ["0", "2", "4", "later"]
    assert set(broker.committed) == {TOPIC}


@virtual_time
async def test_a_cancelled_worker_cancels_its_handlers() -> None:
    broker, ends = FakeBroker(), list[str]()
    broker.publish(OrderPlaced())
    started = asyncio.Event()

    async def handle(event: OrderPlaced) -> None:
        started.set()
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await started.wait()
        worker.task.cancel()  # like a second signal
        await asyncio.wait({worker.task})

        assert ends == ["cancelled"]


@virtual_time
async def test_a_replayed_event_is_handled_and_its_failed_record_is_kept() -> None:
    """A FAILED record must not block a replay from the dead-letter topic."""
    broker, here, fixed, runs = FakeBroker(), guarded(max_attempts=1), list[bool](), list[str]()
    event = OrderPlaced()
    broker.publish(event)

    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        if not fixed:
            raise ValueError("not yet")

    async with running(dispatcher_of(handle, here), broker) as worker:
        await worker.until(lambda: len(broker.values(DEAD)) == 1)
        fixed.append(True)
        broker.publish(event)  # without a generation it stays blocked, and is dead-lettered again
        await worker.until(lambda: len(broker.values(DEAD)) == 2)
        broker.put("order_placed", encode_event(event), headers=[("idempotency-generation", b"1")])
        broker.put("order_placed", encode_event(event), headers=[("idempotency-generation", b"1")])
        await worker.until(lambda: broker.committed.get(TOPIC) == 4)

    key = Key.of_event("handle", "order_placed", "id", event.event_id)
    first, second = await here.manager.get(key), await here.manager.get(key.in_generation(1))
    assert runs == ["1", "1"]
    assert (first and first.status.value, second and second.status.value) == ("failed", "completed")
    assert worker.worker.report().tally.duplicates == 1


@virtual_time
async def test_a_trusted_generation_that_is_not_a_number_is_dead_lettered() -> None:
    broker = FakeBroker()
    broker.put("order_placed", encode_event(OrderPlaced()), headers=[("idempotency-generation", b"one")])

    async def handle(event: OrderPlaced) -> None: ...

    async with running(dispatcher_of(handle, guarded()), broker, replay=TRUSTED) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    assert fields_of(broker.values(DEAD)[0])["reason"] == b"invalid"


@virtual_time
async def test_an_event_with_a_key_of_two_megabytes_is_dead_lettered_unchanged() -> None:
    broker, here = FakeBroker(), guarded(max_attempts=1)
    router = EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        raise ValueError("no")

    resolver = KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: "\x00\n:{}*" + "k" * 2_000_000)
    broker.publish(OrderPlaced())
    broker.publish(OrderPlaced(order_id="2"))

    async with running(IdempotentEventDispatcher(router, here.manager, resolver=resolver), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert [dead_letter.value for dead_letter in broker.values(DEAD)] == [
        record.value for record in broker.values("order_placed")
    ]


@virtual_time
async def test_a_worker_stopped_while_joining_leaves_its_group() -> None:
    """A member that does not leave keeps its partitions until its session times out."""
    broker = FakeBroker()
    broker.publish(OrderPlaced())

    async def handle(event: OrderPlaced) -> None: ...

    async with running(dispatcher_of(handle), broker) as worker:
        start = worker.consumer.start

        async def start_and_stop() -> None:
            await start()
            worker.worker.stop()

        worker.consumer.start = start_and_stop  # type: ignore[method-assign]
        await asyncio.wait({worker.task})

    assert worker.consumer.assignment() == set()


@virtual_time
async def test_a_worker_stops_while_its_group_does_not_respond() -> None:
    broker = FakeBroker()

    async def handle(event: OrderPlaced) -> None: ...

    async with running(dispatcher_of(handle), broker) as worker:
        worker.consumer.start = asyncio.Event().wait  # type: ignore[assignment]  # an unavailable coordinator
        await asyncio.sleep(1)
        worker.worker.stop()
        stopped_at = asyncio.get_running_loop().time()
        await asyncio.wait({worker.task})

        assert asyncio.get_running_loop().time() - stopped_at < 1
    assert not worker.worker.health().ready


@virtual_time
async def test_a_worker_says_why_it_is_not_ready() -> None:
    broker, may_end, has_begun = FakeBroker(), asyncio.Event(), asyncio.Event()
    broker.publish(OrderPlaced(order_id="first"))

    async def handle(event: OrderPlaced) -> None:
        has_begun.set()
        await may_end.wait()

    async with running(dispatcher_of(handle), broker) as worker:
        starting = worker.worker.health()
        await has_begun.wait()
        running_health = worker.worker.health()
        worker.worker.stop()
        await asyncio.sleep(1)
        draining = worker.worker.health()
        may_end.set()

    found = [(health.live, health.ready, health.reason) for health in (starting, running_health, draining)]
    assert found == [
        (True, False, "waits until the group assigns partitions to its workers"),
        (True, True, ""),
        (True, False, "draining: waits for running handlers"),
    ]


@virtual_time
async def test_a_partition_assigned_while_draining_is_not_handled() -> None:
    broker, handled = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="first"))

    async def handle(event: OrderPlaced) -> None:
        handled.append(event.order_id)
        await asyncio.sleep(10)

    async with running(dispatcher_of(handle), broker) as worker:
        await worker.until(lambda: handled == ["first"])
        worker.worker.stop()
        await asyncio.sleep(1)
        broker.publish(OrderPlaced(order_id="second"), partition=1)
        await worker.consumer.give([Partition("order_placed", 1)])
        await asyncio.wait({worker.task})

    assert handled == ["first"]


@virtual_time
async def test_a_worker_that_waits_for_its_store_stays_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart of the process would not make the store available."""
    here, loop = guarded(), asyncio.get_running_loop()
    here.store.down.add("ping")
    for module in (consumer, poller):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))

    async def handle(event: OrderPlaced) -> None: ...

    async with running(dispatcher_of(handle, here), FakeBroker()) as worker:
        await asyncio.sleep(3_600)
        waiting = worker.worker.health()
        here.store.down.clear()
        await worker.until(lambda: worker.worker.health().ready)

    assert (waiting.live, waiting.ready) == (True, False)


@virtual_time
async def test_the_first_poll_is_reported_once_before_any_event_is_handled() -> None:
    """A supervisor must know that a worker was ready, even if the first event kills it."""
    broker, noted = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="1"))

    async def handle(event: OrderPlaced) -> None:
        noted.append(event.order_id)

    async with running(dispatcher_of(handle), broker, on_first_poll=lambda: noted.append("polled")) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)
        broker.publish(OrderPlaced(order_id="2"))
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert noted == ["polled", "1", "2"]
