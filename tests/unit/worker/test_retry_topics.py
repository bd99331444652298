"""A worker copies events to retry topics, and handles the copies when they are due."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem import EventRouter, IdempotencyStatus, IdempotentEventDispatcher
from integr8s_idem.config.sections import ReplaySettings
from integr8s_idem.errors import ApplicationError, PublishError, RetryAfter
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from integr8s_idem.worker.retry_topics import MOST_FETCHED
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher, RunningWorker, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import TOPIC, Depot, ParcelSent, dispatcher_of

TIERS = ("1m", "10m", "1h")
MINUTE = 60.0
SECRET = "s" * 32


def retry_topic(tier: str) -> Partition:
    return Partition(f"{TOPIC.topic}.billing.retry.{tier}", 0)


def broker_of(*numbers: int, tiers: Sequence[str] = TIERS) -> FakeBroker:
    """Return a broker with parcels, and with retry topics."""
    broker = FakeBroker(logs={retry_topic(tier): [] for tier in tiers})
    for number in numbers:
        broker.publish(parcel(number))
    return broker


def parcel(number: int) -> ParcelSent:
    return ParcelSent(number=number, event_id=f"parcel-{number}")


def overtaking(depot: Depot, here: Guarded) -> EventDispatcher:
    return dispatcher_of(depot.handle, here, delayed_retries="overtake")


def later(*delays: float) -> list[Exception]:
    return [RetryAfter(timedelta(seconds=delay)) for delay in delays]


def copies(broker: FakeBroker, tier: str) -> list[FakeRecord]:
    return broker.values(retry_topic(tier).topic)


def fields(record: FakeRecord) -> dict[str, str]:
    prefix = "idempotency-retry-"
    return {name.removeprefix(prefix): text.decode() for name, text in record.headers if name.startswith(prefix)}


def are_settled(broker: FakeBroker) -> bool:
    return all(broker.committed.get(at, 0) == broker.end(at) for at in broker.logs)


async def record_of(here: Guarded, number: int) -> Any:
    return await here.manager.get(KeyResolver().resolve("handle", parcel(number)).key)


@virtual_time
async def test_later_events_overtake_one_that_is_retried_later() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(30)}), broker_of(0, 1, 2)
    began = asyncio.get_running_loop().time()

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)
        overtaken_after = asyncio.get_running_loop().time() - began
        assert depot.done == [1, 2]
        await worker.until(lambda: depot.done == [1, 2, 0] and are_settled(broker))
        waited = asyncio.get_running_loop().time() - began
        tally = worker.worker.report().tally

    assert overtaken_after < 10
    assert 30 <= waited < 35
    (copy,) = copies(broker, "1m")
    assert fields(copy) | {"event": "", "timestamp": ""} == {
        "group": "billing", "handler": "handle", "event": "", "generation": "0", "attempt": "1", "aborted": "0",
        "topic": TOPIC.topic, "partition": "0", "offset": "0", "timestamp": "",
    }  # fmt: skip
    assert (copy.key, copy.value) == (broker.logs[TOPIC][0].key, broker.logs[TOPIC][0].value)
    assert (tally.deferred, tally.handled, tally.dead_letters) == (1, 3, 0)
    assert (await record_of(here, 0)).attempt == 2


@virtual_time
@pytest.mark.parametrize(("delay", "tier"), [(1, "1m"), (60, "1m"), (61, "10m"), (3_600, "1h")])
async def test_a_copy_waits_in_the_topic_with_the_smallest_sufficient_delay(delay: float, tier: str) -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(delay)}), broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and are_settled(broker), 3 * 3_600)

    assert [each for each in TIERS if copies(broker, each)] == [tier]
    assert len(copies(broker, tier)) == 1


@virtual_time
async def test_an_event_whose_delay_exceeds_all_topics_is_copied_again_until_it_is_due() -> None:
    here, broker = guarded(), broker_of(*range(30), tiers=["1m", "10m"])
    depot = Depot(errors={number: later(25 * MINUTE) for number in range(30)})
    began = asyncio.get_running_loop().time()

    async with running(overtaking(depot, here), broker, retry_topics=("1m", "10m"), ordering="key") as worker:
        await worker.until(lambda: len(depot.done) == 30 and are_settled(broker), 3 * 3_600)
        waited = asyncio.get_running_loop().time() - began

    assert 25 * MINUTE <= waited < 28 * MINUTE
    # Two waits of 10 minutes, and the rest of 5 minutes in the same topic.
    assert len(copies(broker, "10m")) <= 90
    assert len(copies(broker, "1m")) == 0


@virtual_time
async def test_each_attempt_counts_and_the_last_one_is_dead_lettered_from_the_source_topic() -> None:
    here, depot = guarded(max_attempts=3), Depot(errors={0: later(30, 30, 30)})
    broker = broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: bool(broker.values(f"{TOPIC.topic}.dlq")) and are_settled_of_retries(broker))

    (dead,) = broker.values(f"{TOPIC.topic}.dlq")
    headers = dict(dead.headers)
    assert depot.started == [0, 0, 0]
    assert [fields(copy)["attempt"] for copy in copies(broker, "1m")] == ["1", "2"]
    assert headers["idempotency-dlq-topic"] == TOPIC.topic.encode()
    assert headers["idempotency-dlq-offset"] == b"0"
    assert headers["idempotency-dlq-attempts"] == b"3"
    assert not any(name.startswith("idempotency-retry-") for name in headers)
    assert (await record_of(here, 0)).status is IdempotencyStatus.FAILED


def are_settled_of_retries(broker: FakeBroker) -> bool:
    return all(broker.committed.get(at, 0) == broker.end(at) for at in broker.logs if ".dlq" not in at.topic)


@pytest.mark.scenario(148)
@virtual_time
async def test_an_event_is_not_retried_for_ever_if_its_record_expires_each_time() -> None:
    here, depot = guarded(max_attempts=3), Depot(errors={0: later(*[30] * 20)})
    broker = broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        for number in (1, 2):
            await worker.until(lambda number=number: len(copies(broker, "1m")) == number)  # type: ignore[misc]
            await here.manager.delete(KeyResolver().resolve("handle", parcel(0)).key)
        await worker.until(lambda: bool(broker.values(f"{TOPIC.topic}.dlq")))

    assert depot.started == [0, 0, 0]
    assert [fields(copy)["attempt"] for copy in copies(broker, "1m")] == ["1", "2"]


@virtual_time
async def test_the_handler_sees_the_number_of_its_attempt_after_the_record_has_expired() -> None:
    here, numbers = guarded(max_attempts=5), list[int]()
    broker = broker_of(0)
    router = EventRouter()

    async def handle(event: ParcelSent) -> None:
        run = here.manager.executor.runs.of(here.manager.space.full(KeyResolver().resolve("handle", event).key))
        assert run is not None
        numbers.append(run.attempt.number)
        if len(numbers) == 1:
            raise RetryAfter(timedelta(seconds=30))

    router.on(ParcelSent, name="handle", delayed_retries="overtake")(handle)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "1m")) == 1)
        await here.manager.delete(KeyResolver().resolve("handle", parcel(0)).key)
        await worker.until(lambda: len(numbers) == 2 and are_settled(broker))

    assert numbers == [1, 2]


@virtual_time
async def test_only_the_handler_that_failed_runs_again() -> None:
    here, broker, runs = guarded(), broker_of(0), list[str]()
    router = EventRouter()

    async def flaky(event: ParcelSent) -> None:
        runs.append("flaky")
        if runs.count("flaky") == 1:
            raise RetryAfter(timedelta(seconds=30))

    async def steady(event: ParcelSent) -> None:
        runs.append("steady")

    router.on(ParcelSent, delayed_retries="overtake")(flaky)
    router.on(ParcelSent)(steady)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: runs.count("flaky") == 2 and are_settled(broker))
        tally = worker.worker.report().tally

    assert sorted(runs) == ["flaky", "flaky", "steady"]
    assert tally.duplicates == 0


@virtual_time
async def test_a_copy_is_accepted_although_the_handler_has_changed_its_event() -> None:
    here, broker, numbers = guarded(), broker_of(0), list[int]()
    router = EventRouter()

    async def handle(event: ParcelSent) -> None:
        numbers.append(event.number)
        if len(numbers) == 1:
            # As a handler can in a class of events that is not frozen.
            event.__dict__["event_id"] = "changed"
            raise RetryAfter(timedelta(seconds=30))

    router.on(ParcelSent, delayed_retries="overtake")(handle)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled_of_retries(broker) and len(copies(broker, "1m")) == 1)

    assert numbers == [0, 0]
    assert broker.values(f"{TOPIC.topic}.dlq") == []


@virtual_time
async def test_a_redelivery_of_a_scheduled_event_is_copied_without_another_attempt() -> None:
    """As after a crash between the schedule and the copy, or between the copy and the commit."""
    here, depot, broker = guarded(), Depot(errors={0: later(30)}), broker_of(0)
    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "1m")) == 1)
        await worker.crash()
    assert TOPIC not in broker.committed

    async with running(overtaking(depot, guarded(here.store)), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and are_settled(broker))

    assert depot.started == [0, 0]
    assert len(copies(broker, "1m")) == 2
    assert (await record_of(here, 0)).attempt == 2


class FailingPublisher(FakePublisher):
    """Fails to publish to some topics."""

    def __init__(self, broker: FakeBroker, limit: int = 1_000_000) -> None:
        super().__init__(broker, limit)
        self.missing = True
        self.tries = 0

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        if ".retry." in topic and self.missing:
            self.tries += 1
            raise PublishError(topic, "unknown topic")
        await super().send(topic, key, value, headers)


@virtual_time
async def test_without_its_retry_topic_an_event_is_not_settled_until_the_topic_exists() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    publisher = FailingPublisher(broker)

    async with running(overtaking(depot, here), broker, publisher, retry_topics=TIERS) as worker:
        await worker.until(lambda: publisher.tries > 5)
        assert TOPIC not in broker.committed
        publisher.missing = False
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)
        assert depot.done == []
        await worker.until(lambda: depot.done == [0] and are_settled(broker))

    assert len(copies(broker, "10m")) == 1


@virtual_time
async def test_without_its_retry_topic_an_event_is_retried_in_place_when_it_is_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    began = asyncio.get_running_loop().time()

    async with running(overtaking(depot, here), broker, FailingPublisher(broker), retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and broker.committed.get(TOPIC) == 1)
        waited = asyncio.get_running_loop().time() - began

    assert 600 <= waited < 610
    assert f"retry topic {retry_topic('10m').topic}" in caplog.text
    assert (await record_of(here, 0)).attempt == 2


@virtual_time
async def test_a_copy_that_is_too_large_waits_in_place() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    size = len(broker.logs[TOPIC][0].value or b"") + 100

    async with running(overtaking(depot, here), broker, FakePublisher(broker, size), retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and broker.committed.get(TOPIC) == 1)

    assert not copies(broker, "10m")


@virtual_time
async def test_a_worker_that_stops_leaves_waiting_copies_for_the_next_one() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: worker.worker.report().tally.waits == 1)
        stopped_at = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - stopped_at < 5
    assert retry_topic("10m") not in broker.committed

    async with running(overtaking(depot, guarded(here.store)), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and are_settled(broker))

    assert depot.started == [0, 0]


@virtual_time
async def test_copies_of_another_group_are_skipped() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(30)}), broker_of(0)
    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled(broker) and depot.done == [0])
    (copy,) = copies(broker, "1m")
    foreign = [(name, b"other" if name.endswith("retry-group") else text) for name, text in copy.headers]
    broker.put(retry_topic("1m").topic, copy.value, headers=foreign)

    async with running(overtaking(depot, guarded()), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled(broker))

    assert depot.started == [0, 0]
    assert not broker.values(f"{TOPIC.topic}.dlq")


@virtual_time
@pytest.mark.parametrize("change", ["attempt", "handler", "offset", "value", "unsigned"])
async def test_a_copy_that_was_changed_is_dead_lettered_and_not_handled(change: str) -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(30)}), broker_of(0)
    replay = ReplaySettings(secret=SECRET)
    async with running(overtaking(depot, here), broker, replay=replay, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled(broker) and depot.done == [0])
    (copy,) = copies(broker, "1m")
    forged = [
        (name, b"7" if name == f"idempotency-retry-{change}" else text)
        for name, text in copy.headers
        if change != "unsigned" or not name.endswith("signature")
    ]
    value = b" " + (copy.value or b"") if change == "value" else copy.value
    broker.put(retry_topic("1m").topic, value, key=copy.key, headers=forged)

    async with running(overtaking(depot, guarded()), broker, replay=replay, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled_of_retries(broker))

    assert depot.started == [0, 0]
    (dead,) = broker.values(f"{TOPIC.topic}.dlq")
    assert dict(dead.headers)["idempotency-dlq-reason"] == b"unverified_copy"


@virtual_time
async def test_a_message_of_another_program_in_a_retry_topic_is_dead_lettered() -> None:
    depot, broker = Depot(), broker_of()
    broker.put(retry_topic("1m").topic, b"{}")

    async with running(overtaking(depot, guarded()), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled_of_retries(broker))

    assert len(broker.values(f"{TOPIC.topic}.dlq")) == 1


@virtual_time
async def test_many_waiting_copies_do_not_stop_the_topics_of_events() -> None:
    here, broker = guarded(), broker_of(*range(200))
    depot = Depot(errors={number: later(3_000) for number in range(100)})

    async with running(
        overtaking(depot, here), broker, retry_topics=TIERS, max_in_flight=20, ordering="none"
    ) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 200, 600)
        assert sorted(depot.done) == list(range(100, 200))
        assert worker.worker.report().in_flight == 0
        waiting = worker.worker._partitions.assignments[retry_topic("1h")].progress.unfinished
        assert 0 < waiting <= MOST_FETCHED
        await worker.until(lambda: len(depot.done) == 200 and are_settled(broker), 4_000)


@virtual_time
@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_copies_are_handled_when_they_are_due_although_a_limit_is_reached(ordering: str) -> None:
    here, broker, gates = guarded(), broker_of(*range(200)), {number: asyncio.Event() for number in range(1, 200)}
    depot = Depot(errors={0: later(30)}, held=gates)

    options: dict[str, Any] = {"ordering": ordering, "max_in_flight": 20}
    async with running(overtaking(depot, here), broker, retry_topics=TIERS, **options) as worker:
        await worker.until(lambda: worker.worker._backpressure.full)
        await worker.until(lambda: depot.done == [0], 2 * MINUTE)
        assert worker.worker._backpressure.in_flight <= 20

        for gate in gates.values():
            gate.set()
        await worker.until(lambda: len(depot.done) == 200 and are_settled(broker))


@virtual_time
async def test_a_handler_that_blocks_waits_in_place_beside_retry_topics() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(30)}), broker_of(0, 1)

    async with running(dispatcher_of(depot.handle, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0, 1] and are_settled(broker))

    assert not copies(broker, "1m")


@virtual_time
async def test_a_retry_topic_that_was_removed_from_the_settings_is_read_until_it_is_empty() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "10m")) == 1 and broker.committed.get(TOPIC) == 1)

    async def list_topics(_: object, wanted: object) -> list[str]:
        return [at.topic for at in broker.logs]

    async with running(
        overtaking(depot, guarded(here.store)), broker, retry_topics=("1m", "1h"), list_topics=list_topics
    ) as worker:
        await worker.until(lambda: depot.done == [0] and are_settled(broker))


async def start(dispatcher: EventDispatcher, replay: ReplaySettings | None = None, **service: Any) -> RunningWorker:
    async with running(dispatcher, FakeBroker(), replay=replay, **service) as worker:
        return worker


@virtual_time
async def test_handlers_and_settings_must_agree_about_retry_topics() -> None:
    unguarded = dispatcher_of(Depot().handle, delayed_retries="overtake")

    with pytest.raises(ApplicationError, match="has no retry topics: set services"):
        await start(overtaking(Depot(), guarded()))
    with pytest.raises(ApplicationError, match="its handlers are not guarded"):
        await start(unguarded, retry_topics=TIERS)
    with pytest.raises(ApplicationError, match="it would refuse its own copies"):
        await start(overtaking(Depot(), guarded()), ReplaySettings(unsigned="refuse"), retry_topics=TIERS)
    with pytest.raises(ApplicationError, match="is not a valid name of a retry topic"):
        await start(overtaking(Depot(), guarded()), retry_topics=TIERS, group_id="the group")


def test_a_router_rejects_an_unknown_order_of_delayed_retries() -> None:
    with pytest.raises(ApplicationError, match="delayed_retries is 'skip'"):
        EventRouter().on(ParcelSent, delayed_retries="skip")  # type: ignore[call-overload]
