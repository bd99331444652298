"""A reservation whose function has not started is reserved again as the same attempt, or released: it never lapses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.transactions import OutcomeWriter
from integr8s_idem.engine.work import Attempt, Isolation, Work
from integr8s_idem.errors import StoreError
from integr8s_idem.keys import Key
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time
from integr8s_idem.worker.assignments import AbandonedError
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.poison_events import PoisonEventRunner
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, Job, guarded
from tests.support.pipelines import Depot, all_committed, dispatcher_of, sent
from tests.support.stalling import ManualClock, StallingStore


class LeapingClock(ManualClock):
    """Moves with the event loop as well."""

    def __call__(self) -> float:
        return self.seconds + asyncio.get_running_loop().time()


class Stall:
    """A manager whose process stalls for longer than a lease after a reservation, and what the store does then."""

    def __init__(self, *, skipped: int = 0, failures: int = 0) -> None:
        self.clock = LeapingClock()
        self.store = StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
        self.here = guarded(self.store, clock=self.clock)
        self.failures = failures
        self.store.stall, self.store.skipped = self.stall, skipped

    async def stall(self) -> None:
        self.clock.leap()
        self.store.fail_next("reserve", self.failures)

    @property
    def prevented(self) -> int:
        return self.here.observer.counts[Signal.STALE_START_PREVENTED]


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop step by step until `condition` holds."""
    while not condition():  # noqa: ASYNC110  # the next step must be the test's
        await asyncio.sleep(0)


@virtual_time
async def test_a_key_is_released_if_the_request_that_reserves_it_again_is_cancelled_and_fails() -> None:
    stall, job = Stall(), Job()
    held = asyncio.Event()
    call = asyncio.create_task(stall.here.manager.run("order:1", job))
    await until(lambda: stall.prevented == 1)
    stall.store.held["reserve"] = held
    await until(lambda: stall.store.calls["reserve"] == 2)

    stall.store.fail_next("reserve", 2)
    call.cancel()
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert await stall.here.is_free("order:1")
    assert job.runs == 0


@virtual_time
async def test_a_step_that_has_not_started_is_not_taken_for_an_interrupted_one() -> None:
    stall, charged = Stall(skipped=1, failures=1), Job()

    async def unit() -> str:
        return str(await stall.here.manager.steps().run("charge", charged, once="at_most_once"))

    assert await stall.here.manager.run("order:1", unit) == "receipt-1"
    assert stall.prevented == 1
    assert [reserved.attempt for reserved in stall.store.reserved] == [1, 1, 1]


@virtual_time
async def test_an_isolated_run_that_has_not_started_before_an_outage_is_not_a_crash() -> None:
    stall, depot = Stall(failures=4), Depot()
    full = f"{stall.here.manager.space.root}handle:parcel_sent:id:parcel-0"
    stall.store.skipped = 3
    await stall.here.leave_crashes(full, times=2)

    async with running(dispatcher_of(depot.handle, stall.here), sent(1), None) as worker:
        await worker.until(lambda: all_committed(worker))

    assert stall.prevented == 1
    assert depot.done == [0]
    last = stall.store.reserved[-1]
    assert (last.attempt, last.lapsed) == (3, 2)


class Suspect:
    """Work with an outcome of its own transaction, which may have crashed its process."""

    def __init__(self, here: Guarded) -> None:
        self.executor: Executor = here.manager.executor
        self.work = Work(Key.of("order:1"), isolation=Isolation.PENDING)

    async def reserved(self) -> Run:
        found = await self.executor.execute_writing(self.work, self._never, self.wait)
        assert isinstance(found, Run)
        return found

    async def _never(self, attempt: Attempt, writer: OutcomeWriter) -> None:
        raise AssertionError

    async def wait(self, error: StoreError) -> None:
        raise error

    def isolate(self) -> None:
        """Do nothing: it is always a suspect."""


@virtual_time
async def test_a_transactional_suspect_is_released_if_its_turn_never_comes() -> None:
    here = guarded()
    await here.leave_crashes(here.manager.space.full(Key.of("order:1")), times=2)
    suspect = Suspect(here)
    run = await suspect.reserved()
    closing = asyncio.get_running_loop().create_future()
    closing.set_result(None)

    with pytest.raises(AbandonedError):
        await PoisonEventRunner(IsolationGate(), 0.5, 30, here.observer).run(
            suspect,  # type: ignore[arg-type]  # all that a runner needs
            run,
            closing,
            suspect.wait,
            None,  # type: ignore[arg-type]  # never called
        )

    assert await here.is_free("order:1")
