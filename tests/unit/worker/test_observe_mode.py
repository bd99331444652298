"""A service in observe mode runs every delivery as without a guard, and counts the duplicates."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem import EventRouter, IdempotencyStatus, KeyResolver, KeyStrategy, PermanentError
from integr8s_idem.engine import observed_work
from integr8s_idem.engine.manager import replayed_value
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import discard, retry, retry_later
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.records import Completed
from integr8s_idem.telemetry import Gauge, Observation, Observed, Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    completed_parcels,
    dispatcher_of,
    key_of,
    leases_left,
    parcels,
    reserved_by_another,
    sent,
    unfinished,
)


def observing(depot: Depot, here: Guarded, *, resolver: KeyResolver | None = None, **options: Any) -> Any:
    """`options` are passed to `router.on`."""
    router = EventRouter()
    router.on(ParcelSent, name="handle", **options)(depot.handle)  # type: ignore[no-untyped-call]
    return ObservingEventDispatcher(router, here.manager, resolver=resolver)


def results(here: Guarded) -> Counter[Observed]:
    return Counter(each.result for each in here.observer.observations)


@pytest.mark.parametrize("policy", ["closed", "open"])
@virtual_time
async def test_an_outcome_is_written_again_under_each_policy_for_errors_of_the_store(policy: str) -> None:
    here, depot, broker = guarded(on_store_error=policy), Depot(), sent(1)
    here.store.fail_next("complete")
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        await asyncio.sleep(20)
        broker.publish(parcels(1)[0])
        await worker.until(lambda: all_committed(worker))

    assert results(here) == {Observed.FIRST: 1, Observed.REPUBLISHED: 1}


@virtual_time
async def test_duplicates_run_and_are_counted_with_the_time_since_the_first() -> None:
    here, depot, broker = guarded(), Depot(), sent(3)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        await asyncio.sleep(100)
        broker.publish(parcels(1)[0])
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    await here.manager.close()
    assert depot.done == [0, 1, 2, 0]
    assert results(here) == {Observed.FIRST: 3, Observed.REPUBLISHED: 1}
    gap = here.observer.observations[-1].gap
    assert gap is not None
    assert timedelta(seconds=100) <= gap <= timedelta(seconds=102)
    assert here.observer.counts[Signal.DUPLICATE_BLOCKED] == 0


@virtual_time
async def test_the_same_message_again_is_a_redelivery() -> None:
    here, depot, broker = guarded(), Depot(), sent(2)
    for _ in range(2):
        async with running(observing(depot, here), broker) as worker:
            await worker.until(lambda: all_committed(worker))
        await here.manager.close()
        broker.committed.clear()

    assert depot.done == [0, 1, 0, 1]
    assert results(here) == {Observed.FIRST: 2, Observed.REDELIVERED: 2}


@virtual_time
async def test_a_duplicate_runs_while_the_first_is_running() -> None:
    here, depot, broker = guarded(), Depot(seconds=10), FakeBroker()
    for partition in range(2):
        broker.publish(parcels(1)[0], partition=partition)

    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: depot.running_now == 2)
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.max_concurrency == 2
    assert results(here) == {Observed.FIRST: 1, Observed.CONCURRENT: 1}
    assert await leases_left(here) == []
    assert await completed_parcels(here) == {0}


@virtual_time
async def test_a_duplicate_with_another_payload_runs_and_is_counted() -> None:
    here, depot, broker = guarded(), Depot(), FakeBroker()
    first = parcels(1)[0]
    broker.publish(first, first.model_copy(update={"number": 7}))

    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.done == [0, 7]
    assert [(each.result, each.has_other_payload) for each in here.observer.observations] == [
        (Observed.FIRST, False),
        (Observed.REPUBLISHED, True),
    ]


@virtual_time
async def test_an_event_that_is_in_progress_elsewhere_does_not_wait() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    await reserved_by_another(here, 0, timedelta(seconds=LEASE))

    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: depot.done == [0], seconds=1)

    await here.manager.close()
    assert results(here) == {Observed.CONCURRENT: 1}


@pytest.mark.parametrize("verb", ["reserve", "complete", "get", "renew", "release", "ping"])
@virtual_time
async def test_handlers_run_without_a_pause_while_the_store_is_down(verb: str) -> None:
    here, depot, broker = guarded(), Depot(), sent(200)
    broker.publish(*parcels(10))
    here.store.down.add(verb)

    async with running(observing(depot, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker), seconds=2)
        assert worker.worker.report().state == "running"

    assert Counter(depot.done) == Counter([*range(200), *range(10)])
    await here.manager.close()


@virtual_time
async def test_handlers_run_without_a_pause_while_the_store_hangs() -> None:
    here, depot, broker = guarded(), Depot(), sent(200)
    here.store.held["reserve"] = asyncio.Event()

    async with running(observing(depot, here), broker, ordering="none", concurrency=4) as worker:
        await worker.until(lambda: all_committed(worker), seconds=2)
        here.store.held["reserve"].set()

    await here.manager.close()
    assert results(here) == {Observed.FIRST: 200}


@virtual_time
async def test_observations_beyond_the_limit_are_counted_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_work, "MOST_WAITING", 50)
    here, depot, broker = guarded(), Depot(), sent(200)
    here.store.held["reserve"] = asyncio.Event()

    async with running(observing(depot, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker), seconds=2)
        here.store.held["reserve"].set()

    await here.manager.close()
    assert results(here) == {Observed.FIRST: 50, Observed.FAILED: 150}


@virtual_time
async def test_failed_observations_are_counted_and_logged_once_for_each_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, depot, broker = guarded(), Depot(), FakeBroker()
    broker.logs[TOPIC] = []
    here.store.refusal = StoreConfigurationError("reserve", "no permission")

    with caplog.at_level(logging.INFO, observed_work.logger.name):
        async with running(observing(depot, here), broker) as worker:
            for outage in range(2):
                here.store.down.add("reserve")
                broker.publish(*[ParcelSent(number=outage) for _ in range(20)])
                await worker.until(lambda: all_committed(worker))
                await asyncio.sleep(observed_work.BLIND_SECONDS)
                here.store.down.clear()
                broker.publish(ParcelSent(number=outage))
                await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert results(here) == {Observed.FAILED: 40, Observed.FIRST: 2}
    assert here.store.calls["reserve"] < 20, "the store is not asked for every event while it does not answer"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


@virtual_time
async def test_a_handler_whose_lease_is_lost_is_not_canceled() -> None:
    here, depot, broker = guarded(), Depot(held={0: asyncio.Event()}), sent(1)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: depot.running_now == 1)
        here.store.down.add("renew")
        await asyncio.sleep(2 * LEASE)
        await reserved_by_another(here, 0, timedelta(seconds=LEASE))
        here.store.down.clear()
        await asyncio.sleep(LEASE / 2)
        depot.held[0].set()
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.done == [0]
    assert results(here) == {Observed.FIRST: 1, Observed.UNRECORDED: 1}


@virtual_time
async def test_the_lease_of_a_long_handler_is_renewed_so_that_duplicates_are_concurrent() -> None:
    here, depot, broker = guarded(), Depot(held={0: asyncio.Event()}), FakeBroker()
    for partition in range(2):
        broker.logs[TOPIC._replace(partition=partition)] = []
    broker.publish(parcels(1)[0])
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: depot.running_now == 1)
        await asyncio.sleep(5 * LEASE)
        broker.publish(parcels(1)[0], partition=1)
        await worker.until(lambda: depot.running_now == 2)
        depot.held[0].set()
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert results(here) == {Observed.FIRST: 1, Observed.CONCURRENT: 1}


@virtual_time
async def test_a_failed_handler_is_retried_as_without_a_guard_and_counted_once() -> None:
    here, depot, broker = guarded(), Depot(errors={0: [ValueError("a"), ValueError("b")]}), sent(1)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.started == [0, 0, 0]
    assert results(here) == {Observed.FIRST: 1}
    assert await completed_parcels(here) == {0}


@virtual_time
async def test_a_retry_of_a_duplicate_is_recorded_if_the_first_has_failed_meanwhile() -> None:
    here, depot, broker = guarded(), Depot(errors={0: [ValueError("late")]}), sent(1)
    [other] = await reserved_by_another(here, 0, timedelta(seconds=LEASE))
    rule = retry(ValueError, first_pause=timedelta(seconds=5), longest_pause=timedelta(seconds=5), jitter=False)
    async with running(observing(depot, here, failures=[rule]), broker) as worker:
        await worker.until(lambda: depot.started == [0])
        await here.store.release([other])
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert results(here) == {Observed.CONCURRENT: 1}
    assert await completed_parcels(here) == {0}


@virtual_time
async def test_an_event_that_was_given_up_is_released_and_never_failed() -> None:
    here, depot, broker = guarded(), Depot(errors={0: [PermanentError("no")]}), sent(1)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.dead_letters == 1
        [record] = [record async for record in here.store.scan("")]
        assert (record.status, record.lease_until) == (IdempotencyStatus.PROCESSING, None)
        broker.publish(parcels(1)[0])
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.started == [0, 0]
    assert results(here) == {Observed.FIRST: 1, Observed.RETRIED: 1}


@virtual_time
async def test_a_duplicate_of_a_discarded_event_is_a_duplicate() -> None:
    here, depot, broker = guarded(), Depot(errors={0: [ValueError("gone")]}), sent(1)
    broker.publish(parcels(1)[0])
    async with running(observing(depot, here, failures=[discard(ValueError)]), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert results(here) == {Observed.FIRST: 1, Observed.REPUBLISHED: 1}


@virtual_time
async def test_an_event_whose_worker_crashed_is_retried_and_not_a_duplicate() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    await reserved_by_another(here, 0, timedelta(seconds=LEASE))
    await asyncio.sleep(LEASE + 1)

    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert results(here) == {Observed.RETRIED: 1}
    assert await completed_parcels(here) == {0}


@virtual_time
async def test_a_handler_runs_although_no_key_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def broken_key(event: BaseEvent) -> str:
        raise LookupError("no customer")

    here, depot, broker = guarded(), Depot(), sent(2)
    resolver = KeyResolver(KeyStrategy.CUSTOM, None, broken_key)
    async with running(observing(depot, here, resolver=resolver), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.done == [0, 1]
    assert here.observer.observations == [Observation(Observed.FAILED)] * 2
    assert sum("no customer" in record.getMessage() for record in caplog.records) == 1


@virtual_time
async def test_an_enforcing_worker_does_not_repeat_what_an_observing_worker_has_done() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
    await here.manager.close()

    broker.publish(parcels(1)[0])
    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.duplicates == 1

    assert depot.done == [0]


@virtual_time
async def test_an_event_that_an_enforcing_worker_has_scheduled_is_retried_and_not_a_duplicate() -> None:
    here, depot, router = guarded(), Depot(), EventRouter()

    @router.on(ParcelSent, name="handle", failures=[retry_later(OSError, delay=3600)], delayed_retries="overtake")
    async def fail(event: ParcelSent) -> None:
        raise OSError("later")

    [execution] = IdempotentEventDispatcher(router, here.manager).executions(parcels(1)[0])
    await execution.attempt()
    async with running(observing(depot, here), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.done == [0]
    assert results(here) == {Observed.RETRIED: 1}


@virtual_time
async def test_a_duplicate_of_what_an_enforcing_worker_did_is_of_unknown_kind() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
    broker.publish(parcels(1)[0])
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    await here.manager.close()
    assert depot.done == [0, 0]
    [duplicate] = here.observer.observations
    assert (duplicate.result, duplicate.gap is None) == (Observed.UNKNOWN, False)


@virtual_time
async def test_a_result_that_was_only_observed_is_replayed_as_none() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    async with running(observing(depot, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
    await here.manager.close()

    [record] = [record async for record in here.store.scan("")]
    assert record.settled_at is not None
    completed = Completed(key=record.key, attempt=record.attempt, completed_at=record.settled_at, result=record.result)
    assert record.result is not None
    assert record.result.body == b"parcel_sent[0]@0"
    assert record.key == key_of(here, 0)
    assert replayed_value("parcel", completed, depot.handle) is None


@virtual_time
async def test_a_service_that_observes_reports_how_long_it_keeps_records() -> None:
    here = guarded(default_ttl_seconds=7_200)

    observing(Depot(), here)

    assert here.observer.gauges[Gauge.OBSERVE_TTL] == 7_200
