"""The pipeline during rebalances and replacements of clients: no event is lost or acknowledged early."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import run_virtual, virtual_now, virtual_time
from tests.support.fake_worker import RunningWorker, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    completed_parcels,
    dispatcher_of,
    leases_left,
    sent,
    turns,
    unfinished,
)
from tests.support.stalling import ManualClock, StallingStore

EVERY_ORDERING = pytest.mark.parametrize("ordering", ["partition", "key", "none"])


async def revoke_and_reassign(worker: RunningWorker) -> None:
    await worker.consumer.take([TOPIC])
    await worker.consumer.give([TOPIC])


def break_client(worker: RunningWorker) -> None:
    """Mark the client broken, so that it is replaced."""
    poller = worker.worker._poller
    if poller is not None and not poller.broken.done():
        poller.broken.set_result("broken by the test")


def acknowledged(worker: RunningWorker) -> set[int]:
    """Return the parcels whose offsets are committed."""
    return set(range(worker.broker.committed.get(TOPIC, 0)))


async def finish(worker: RunningWorker, here: Guarded, depot: Depot) -> None:
    """Wait until everything is committed, and check that nothing is left."""
    await worker.until(lambda: all_committed(worker))
    await worker.until(lambda: not unfinished(worker.worker))
    assert await leases_left(here) == []
    assert acknowledged(worker) == set(depot.done)


@EVERY_ORDERING
@pytest.mark.parametrize("seconds", [0.0, 0.1])
@virtual_time
async def test_a_partition_revoked_at_any_step_is_released_and_redelivered(ordering: str, seconds: float) -> None:
    for step in range(60):
        here, depot = guarded(), Depot(seconds=seconds)
        broker = sent(20, keys=3)
        async with running(dispatcher_of(depot.handle, here), broker, ordering=ordering, concurrency=4) as worker:
            await turns(step)
            await worker.until(lambda worker=worker: TOPIC in worker.consumer.assignment())  # type: ignore[misc]
            await revoke_and_reassign(worker)
            assert acknowledged(worker) <= set(depot.done)

            await finish(worker, here, depot)
            assert len(depot.done) == 20, "each was handled once"


@EVERY_ORDERING
@pytest.mark.parametrize("failures", [0, 1])
@virtual_time
async def test_a_key_whose_start_was_prevented_is_released_when_its_partition_is_revoked(
    ordering: str, failures: int
) -> None:
    released = 0
    for step in range(60):
        clock, store = ManualClock(), StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
        here, depot, broker = guarded(store, clock=clock), Depot(), sent(1)

        async def stall(clock: ManualClock = clock, store: StallingStore = store) -> None:
            clock.leap()
            store.fail_next("reserve", failures)

        store.stall = stall
        async with running(dispatcher_of(depot.handle, here), broker, None, ordering=ordering) as worker:
            await turns(step)
            await worker.until(lambda worker=worker: TOPIC in worker.consumer.assignment())  # type: ignore[misc]
            await worker.consumer.take([TOPIC])

            assert await leases_left(here) == []
            released += here.observer.counts[Signal.STALE_START_PREVENTED] > 0 and not depot.started

            await worker.consumer.give([TOPIC])
            await finish(worker, here, depot)
            assert depot.done == [0]
    assert released, "in some step, the start was prevented and the key not reserved again"


@pytest.mark.parametrize("verb", ["reserve", "complete"])
@virtual_time
async def test_revoking_a_partition_waits_for_the_store_up_to_the_drain_timeout(verb: str) -> None:
    here, depot, broker = guarded(), Depot(), sent(20)
    here.store.held[verb] = asyncio.Event()
    options = {"drain_timeout_seconds": 2}
    async with running(dispatcher_of(depot.handle, here), broker, None, ordering="none", **options) as worker:
        await worker.until(lambda: here.store.calls[verb] > 0)
        await revoke_and_reassign(worker)
        assert broker.committed == {}

        here.store.held[verb].set()
        await finish(worker, here, depot)

    assert len(depot.done) == 20


@EVERY_ORDERING
@virtual_time
async def test_deliveries_that_wait_for_a_hung_handler_are_dropped_by_a_revocation(ordering: str) -> None:
    here, depot, broker = guarded(), Depot(held={0: asyncio.Event()}), sent(10)
    options = {"ordering": ordering, "concurrency": 1, "drain_timeout_seconds": 1}
    async with running(dispatcher_of(depot.handle, here), broker, None, **options) as worker:
        await worker.until(lambda: depot.started == [0] and worker.worker.report().in_flight == 10)
        await worker.consumer.take([TOPIC])
        assert worker.worker.report().in_flight == 1
        depot.held[0].set()
        await worker.until(lambda: not unfinished(worker.worker))

        assert depot.started == depot.done == [0]
        assert broker.committed == {}
        assert worker.worker.report().tally.stale == 1
        await worker.consumer.give([TOPIC])
        await finish(worker, here, depot)

    assert len(depot.done) == 10


@EVERY_ORDERING
@virtual_time
async def test_a_cancelled_worker_drops_what_waits_for_a_handler_that_ignores_its_cancellation(ordering: str) -> None:
    started, end = list[int](), asyncio.Event()

    async def ignore(event: ParcelSent) -> None:
        started.append(event.number)
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    options = {"ordering": ordering, "concurrency": 1, "drain_timeout_seconds": 1}
    async with running(dispatcher_of(ignore, guarded()), sent(10), None, **options) as worker:
        await worker.until(lambda: started == [0] and worker.worker.report().in_flight == 10)
        # Not by cancelling the worker: the fake client also revokes partitions when it stops, which aiokafka does not.
        worker.worker._partitions.close_all()
        worker.worker._pipeline.abandon_all()
        left = worker.worker.report().in_flight
        end.set()
        await asyncio.sleep(1)
        assert (left, unfinished(worker.worker), started) == (1, {}, [0])


@EVERY_ORDERING
@virtual_time
async def test_replacing_a_client_at_any_step_keeps_the_backpressure_counts_exact(ordering: str) -> None:
    for step in range(0, 60, 2):
        here, depot = guarded(), Depot(seconds=0.1)
        broker = sent(20, keys=3)
        async with running(dispatcher_of(depot.handle, here), broker, ordering=ordering, concurrency=4) as worker:
            await turns(step)
            await worker.until(lambda worker=worker: worker.worker._poller is not None)  # type: ignore[misc]
            break_client(worker)
            await finish(worker, here, depot)
            assert len(depot.done) == 20


@virtual_time
async def test_replacing_a_client_cancels_slow_handlers_and_their_events_are_redelivered() -> None:
    here, depot, broker = guarded(), Depot(held={3: asyncio.Event(), 5: asyncio.Event()}), sent(10)
    options = {"ordering": "none", "drain_timeout_seconds": 1}
    async with running(dispatcher_of(depot.handle, here), broker, None, **options) as worker:
        await worker.until(lambda: len(depot.done) == 8)
        break_client(worker)
        await worker.until(lambda: depot.started.count(3) == 2)
        assert worker.worker.report().in_flight == 2  # the others are duplicates
        for each in depot.held.values():
            each.set()

        await finish(worker, here, depot)

    assert len(depot.done) == 10


class Interleaving:
    """A random sequence of rebalances, broken clients, outages, and waits."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.here = guarded()
        self.depot = Depot(seconds=self.chance.choice([0.0, 0.0, 0.05, 0.5]))
        self.depot.errors = {number: [OSError("later")] for number in self.chance.sample(range(40), 6)}
        self.ordering = self.chance.choice(["partition", "key", "none"])
        self.concurrency = self.chance.choice([1, 3, 8, 60])
        self.outcomes_refused = False
        """Whether the store refused outcomes for a while, so that events may run again after a client was replaced."""

    async def run(self) -> None:
        broker, dispatcher = sent(40, keys=5), dispatcher_of(self.depot.handle, self.here)
        options = {"ordering": self.ordering, "concurrency": self.concurrency, "drain_timeout_seconds": 1}
        async with running(dispatcher, broker, None, **options) as worker:
            for _ in range(self.chance.randrange(1, 12)):
                await self._do_something(worker)
                assert acknowledged(worker) <= await completed_parcels(self.here)
                assert self.depot.max_concurrency <= self.concurrency
            self.here.store.down.clear()
            await self._reassign(worker)
            await worker.until(lambda: all_committed(worker))
            await worker.until(lambda: not unfinished(worker.worker))
        assert await leases_left(self.here) == []
        assert await completed_parcels(self.here) == set(self.depot.done) == set(range(40))
        assert len(self.depot.done) == 40 or self.outcomes_refused, "each was handled once"

    async def _do_something(self, worker: RunningWorker) -> None:
        match self.chance.randrange(7):
            case 0:
                await turns(self.chance.randrange(30))
            case 1:
                await asyncio.sleep(self.chance.random())
            case 2 if TOPIC in worker.consumer.assignment():
                await worker.consumer.take([TOPIC])
            case 3:
                await self._reassign(worker)
            case 4:
                break_client(worker)
            case 5:
                self.here.store.down ^= {self.chance.choice(["reserve", "complete", "release"])}
                self.outcomes_refused |= "complete" in self.here.store.down
            case 6:
                self.here.store.lose_answers[self.chance.choice(["reserve", "complete"])] = 1

    async def _reassign(self, worker: RunningWorker) -> None:
        if worker.worker._joined and TOPIC not in worker.consumer.assignment():
            await worker.consumer.give([TOPIC])


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_in_any_interleaving_each_event_is_handled_once_and_committed_after_its_record(seed: int) -> None:
    run_virtual(Interleaving(seed).run())
