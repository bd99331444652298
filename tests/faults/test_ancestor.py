"""Bugs of the predecessor of this library: each test would fail with its behavior.

Broker and store are in memory; two tests use a real Redis.  Other tests in `tests/faults` and `tests/integration` cover
offsets and duplicates on real servers, and scrape /metrics of a running worker.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from dishka import STRICT_VALIDATION, make_async_container
from dishka.exceptions import ImplicitOverrideDetectedError

from integr8s_idem.config import IdempotencyConfig, OnFailure, Settings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Executed, Work
from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.records import Completed, Corrupt, IdempotencyStatus, Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.aging import age_records
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, Job, guarded
from tests.support.redis import RedisServer

TOPIC = Partition("order_placed", 0)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    tags: list[str] = []  # noqa: RUF012  # pydantic copies it


class OrderMoved(BaseEvent):
    event_type: Literal["order_moved"] = "order_moved"
    order_id: str = "1"


@pytest.mark.scenario(3)
@virtual_time
async def test_a_duplicate_is_not_acknowledged_during_the_first_run_and_is_handled_after_its_crash() -> None:
    owner, broker, handled = guarded(), FakeBroker(), list[str]()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        handled.append(event.order_id)

    event = OrderPlaced()
    keyed = KeyResolver().resolve("charge", event)
    assert isinstance(await owner.manager.reserve(keyed.key, fingerprint=event), Reserved)
    broker.publish(event)

    async with running(IdempotentEventDispatcher(router, guarded(owner.store).manager), broker) as worker:
        await worker.until(lambda: worker.worker.report().tally.waits == 1)
        await asyncio.sleep(LEASE / 2)
        assert broker.committed.get(TOPIC, 0) == 0
        await worker.until(lambda: broker.committed.get(TOPIC) == 1, LEASE / 2 + 3)

    assert handled == ["1"]


@virtual_time
async def test_a_failure_is_retried_by_default() -> None:
    """Work that was given up can be replayed with a generation: see tests/unit/worker/test_consumer.py."""
    assert IdempotencyConfig().on_failure is OnFailure.RETRY
    here, job = guarded(), Job(errors=[ConnectionError("for a moment")])
    with pytest.raises(ConnectionError):
        await here.manager.run("order:1", job)

    assert await here.manager.run("order:1", job) == "receipt-1"


@virtual_time
async def test_a_success_does_not_commit_past_a_failed_offset() -> None:
    broker, handled, recovered = FakeBroker(), list[str](), asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        if event.order_id == "1" and not recovered.is_set():
            raise ConnectionError("for a while")
        handled.append(event.order_id)

    broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(4)))
    manager = guarded(max_attempts=1_000).manager

    async with running(IdempotentEventDispatcher(router, manager), broker, ordering="none") as worker:
        await worker.until(lambda: len(handled) == 3)
        await asyncio.sleep(60)
        assert broker.committed[TOPIC] == 1
        recovered.set()
        await worker.until(lambda: broker.committed[TOPIC] == 4)

    assert sorted(handled) == ["0", "1", "2", "3"]


@virtual_time
async def test_a_shutdown_releases_running_work() -> None:
    here, job = guarded(), Job(seconds=1_000)
    work = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()

    work.cancel()
    await asyncio.wait({work})
    await here.manager.close()

    assert isinstance(await here.manager.reserve("order:1"), Reserved)


@pytest.mark.scenario(8)
@virtual_time
async def test_one_of_eight_workers_takes_over_an_expired_lease() -> None:
    dead = guarded()
    await dead.manager.reserve("order:1")
    await asyncio.sleep(LEASE)

    verdicts = await asyncio.gather(*(guarded(dead.store).manager.reserve("order:1") for _ in range(8)))

    assert sum(isinstance(verdict, Reserved) for verdict in verdicts) == 1


@pytest.mark.scenario(9, 36)
@virtual_time
async def test_a_stale_owner_does_not_turn_a_completed_record_into_failed() -> None:
    late = guarded()
    here = guarded(late.store)
    reserved = await late.manager.reserve("order:1")
    assert isinstance(reserved, Reserved)
    await asyncio.sleep(LEASE)
    await here.manager.run("order:1", Job())

    assert not await late.manager.fail(reserved, "too late")

    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_a_handler_longer_than_lease_and_ttl_runs_once() -> None:
    here, job = guarded(default_ttl_seconds=60), Job(seconds=4_000)
    there = guarded(here.store)

    first, second = await asyncio.gather(
        here.manager.run("order:1", job),
        there.manager.run("order:1", job, wait_timeout=timedelta(hours=2)),
    )

    assert first == second
    assert job.runs == 1


@virtual_time
async def test_every_record_expires_and_stale_writes_do_not_recreate_it() -> None:
    here, job = guarded(default_ttl_seconds=60), Job()
    reserved = await here.manager.reserve("order:1")
    assert isinstance(reserved, Reserved)
    assert (await here.record()).expires_at is not None
    await here.manager.delete("order:1")

    assert not await here.manager.complete(reserved)
    assert not await here.manager.fail(reserved, "no")
    assert await here.manager.renew(reserved) == [False]
    assert await here.manager.release(reserved) == [False]

    assert await here.manager.get("order:1") is None
    await here.manager.run("order:1", job)
    assert (await here.record()).expires_at is not None


async def test_records_use_the_clock_of_the_store() -> None:
    now = datetime(1999, 1, 1, tzinfo=UTC)
    store = MemoryIdempotencyRepository(clock=lambda: now)
    managers = [IdempotencyManager(repository=store, scope="billing") for _ in range(2)]

    await managers[0].run("order:1", Job())
    record = await managers[1].get("order:1")

    assert record is not None
    assert record.settled_at == now
    assert record.expires_at == now + timedelta(hours=1)


@pytest.mark.scenario(92)
async def test_an_unreadable_record_stops_the_work_and_is_not_treated_as_absent(redis_server: RedisServer) -> None:
    redis_server.flush()
    client, job = redis_server.client(), Job()
    manager = IdempotencyManager(repository=RedisIdempotencyRepository(client), scope="billing")
    await client.set(manager.space.full(Key.of("order:1")), b'{"status": "completed"}', ex=60)

    with pytest.raises(CorruptRecordError):
        await manager.run("order:1", job)

    outcome = await manager.execute(Work(Key.of("order:1")), job.with_attempt)
    assert isinstance(outcome, Corrupt)
    assert job.runs == 0
    await manager.close()
    await client.aclose()


@pytest.mark.scenario(8)
async def test_one_of_eight_concurrent_takeovers_wins_on_redis(redis_server: RedisServer) -> None:
    redis_server.flush()
    clients = [redis_server.client() for _ in range(8)]
    managers = [IdempotencyManager(repository=RedisIdempotencyRepository(c), scope="billing") for c in clients]
    first = await managers[0].reserve("order:1")
    assert isinstance(first, Reserved)
    await age_records(clients[0], timedelta(seconds=301))

    verdicts = await asyncio.gather(*(manager.reserve("order:1") for manager in managers))

    winners = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    assert [winner.attempt for winner in winners] == [2]
    assert not await managers[0].complete(first)
    for manager, client in zip(managers, clients, strict=True):
        await manager.close()
        await client.aclose()


@pytest.mark.scenario(6)
@virtual_time
async def test_two_services_with_one_strategy_both_handle_an_event() -> None:
    coordinator, runs = guarded(scope="coordinator"), list[str]()
    results = guarded(coordinator.store, scope="result-processor")
    router, event = EventRouter(), OrderPlaced()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    for service in (coordinator, results):
        (outcome,) = await IdempotentEventDispatcher(router, service.manager).dispatch(event)
        assert isinstance(outcome, Executed)

    assert len(runs) == 2


@pytest.mark.scenario(7)
def test_equal_fields_of_two_event_types_have_different_keys() -> None:
    resolver = KeyResolver(KeyStrategy.CONTENT_HASH, frozenset({"order_id"}))

    placed, moved = resolver.resolve("charge", OrderPlaced()), resolver.resolve("charge", OrderMoved())

    assert placed.key.text != moved.key.text


def test_a_custom_key_equal_to_an_event_id_is_a_different_key() -> None:
    event = OrderPlaced(event_id="42")

    by_id = KeyResolver().resolve("charge", event)
    custom = KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: event.event_id).resolve("charge", event)

    assert by_id.key.text != custom.key.text


@pytest.mark.scenario(14)
@virtual_time
async def test_a_handler_that_modifies_its_event_does_not_change_the_key() -> None:
    runs, router = list[str](), EventRouter()

    @router.on(OrderPlaced)
    async def modify(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        event.tags.append("seen")

    dispatcher = IdempotentEventDispatcher(router, guarded().manager, resolver=KeyResolver(KeyStrategy.CONTENT_HASH))

    (first,), (second,) = await dispatcher.dispatch(OrderPlaced()), await dispatcher.dispatch(OrderPlaced())

    assert isinstance(first, Executed)
    assert isinstance(second, Completed)
    assert len(runs) == 1


@virtual_time
async def test_work_is_completed_although_the_store_fails_after_it() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")
    asyncio.get_running_loop().call_later(10, here.store.down.clear)

    assert await here.manager.run("order:1", job) == "receipt-1"

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert here.store.calls["fail"] == 0


@pytest.mark.scenario(6)
@virtual_time
async def test_two_handlers_of_one_event_both_run() -> None:
    runs, router = list[str](), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs.append("charge")

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        runs.append("ship")

    await IdempotentEventDispatcher(router, guarded().manager).dispatch(OrderPlaced())

    assert sorted(runs) == ["charge", "ship"]


@virtual_time
async def test_a_record_is_completed_after_the_work_and_not_at_its_start() -> None:
    here, job = guarded(), Job(seconds=100)
    running_job = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(99)

    assert (await here.record()).status is IdempotencyStatus.PROCESSING

    await running_job
    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_the_number_of_active_keys_rises_and_falls() -> None:
    here, job = guarded(), Job(seconds=10)
    await here.manager.reserve("crashed")
    works = [asyncio.create_task(here.manager.run(f"order:{number}", job)) for number in range(3)]
    await asyncio.sleep(1)
    assert await here.manager.count_active() == 4

    await asyncio.gather(*works)
    await asyncio.sleep(LEASE)

    assert await here.manager.count_active() == 0


def test_two_providers_of_one_dispatcher_are_rejected() -> None:
    router = EventRouter()

    with pytest.raises(ImplicitOverrideDetectedError, match="DispatcherProvider"):
        make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            IdempotencyProvider(),
            KafkaProvider(),
            DispatcherProvider(router),
            IdempotentDispatcherProvider(router),
            context={Settings: Settings(), ServiceName: ServiceName("billing")},
            validation_settings=STRICT_VALIDATION,
        )


@virtual_time
async def test_a_batch_of_new_events_needs_two_store_calls() -> None:
    broker, runs, router = FakeBroker(), list[str](), EventRouter()
    here = guarded()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    for number in range(400):
        broker.put("order_placed", encode_event(OrderPlaced(order_id=str(number))))

    async with running(
        IdempotentEventDispatcher(router, here.manager), broker, ordering="none", concurrency=500
    ) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 400)

    assert len(runs) == 400
    calls = here.store.calls
    assert calls["reserve"] + calls["complete"] <= 10
    assert set(calls) == {"ping", "reserve", "complete"}
    assert isinstance(here.store, FlakyStore)
