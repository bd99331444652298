"""Leases are renewed in batches, and handlers are cancelled before their lease ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem.engine.leases import HeldLease, fence_margin
from integr8s_idem.errors import LeaseLostError
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.telemetry.log_fields import context_fields, logging_with
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import run_virtual, virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded, plain_manager


@virtual_time
async def test_a_handler_that_runs_for_a_day_keeps_its_lease_of_half_a_minute() -> None:
    here, job = guarded(), Job(seconds=86_400)

    assert await here.manager.run("order:1", job) == "receipt-1"

    assert (await here.record()).attempt == 1
    assert here.store.calls["renew"] == pytest.approx(86_400 / (LEASE / 3), rel=0.01)


@virtual_time
async def test_a_thousand_leases_are_renewed_in_shared_calls() -> None:
    here, job = guarded(), Job(seconds=LEASE * 10)

    await asyncio.gather(*(here.manager.run(f"order:{number}", job) for number in range(1_000)))

    assert job.finished == 1_000
    assert here.store.calls["renew"] <= 40


class RenewalsWithFields(MemoryIdempotencyRepository):
    """Notes the log fields of its renewals."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, object]] = []

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        self.fields.append(context_fields())
        return await super().renew(reservations, lease)


@virtual_time
async def test_what_is_logged_during_a_renewal_names_the_service_and_no_event() -> None:
    store = RenewalsWithFields()
    manager = guarded(FlakyStore(store)).manager

    with logging_with(event_id="1"):
        await manager.run("order:1", Job(seconds=LEASE))

    assert store.fields
    assert {tuple(fields.items()) for fields in store.fields} == {(("service", manager.scope),)}


@virtual_time
async def test_a_handler_whose_lease_cannot_be_renewed_is_stopped_before_the_lease_ends() -> None:
    here, job = guarded(), Job(seconds=1_000)
    here.store.down.add("renew")

    with pytest.raises(LeaseLostError, match="could not be renewed in time"):
        await here.manager.run("order:1", job)

    assert asyncio.get_running_loop().time() == pytest.approx(LEASE - fence_margin(LEASE))
    assert job.finished == 0
    assert here.observer.counts[Signal.RESERVATION_LOST] == 1


@virtual_time
async def test_a_slow_answer_to_reserve_shortens_the_local_lease() -> None:
    here, job = guarded(), Job(seconds=1_000)
    here.store.down.add("renew")
    here.store.held["reserve"] = asyncio.Event()
    asyncio.get_running_loop().call_later(20, here.store.held["reserve"].set)

    with pytest.raises(LeaseLostError):
        await here.manager.run("order:1", job)

    assert asyncio.get_running_loop().time() == pytest.approx(LEASE - fence_margin(LEASE))


@virtual_time
async def test_a_handler_whose_key_was_taken_over_is_stopped_at_the_next_renewal() -> None:
    here, job = guarded(), Job(seconds=1_000)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await here.manager.delete("order:1")
    await guarded(here.store, owner="billing-7").manager.reserve("order:1")

    with pytest.raises(LeaseLostError):
        await running

    assert asyncio.get_running_loop().time() <= LEASE / 2


@pytest.mark.scenario(45)
@virtual_time
async def test_a_record_lost_while_its_handler_runs_is_reserved_again() -> None:
    here, job = guarded(), Job(seconds=LEASE * 2)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await here.manager.delete("order:1")

    assert await running == "receipt-1"

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert here.observer.counts[Signal.RECORD_VANISHED] == 1
    assert job.runs == 1


@virtual_time
async def test_a_key_released_by_another_worker_is_not_treated_as_a_lost_record() -> None:
    """The run of the other worker may have had side effects, so this handler must not continue."""
    here, job = guarded(), Job(seconds=1_000)
    other = guarded(here.store, owner="billing-7")
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await here.manager.delete("order:1")
    taken = await other.manager.reserve("order:1")
    assert isinstance(taken, Reserved)
    await other.manager.release(taken)

    with pytest.raises(LeaseLostError):
        await running

    assert here.observer.counts[Signal.RECORD_VANISHED] == 0
    assert (await _taken_over(other)).attempt == 2


async def _taken_over(other: Guarded) -> Reserved:
    verdict = await other.manager.reserve("order:1")
    assert isinstance(verdict, Reserved)
    return verdict


@virtual_time
async def test_a_lease_that_an_operator_ends_costs_one_attempt_and_the_error_says_so() -> None:
    here, job = guarded(), Job(seconds=1_000)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    store = here.store.inner
    assert isinstance(store, MemoryIdempotencyRepository)
    assert await store.end_leases([await here.record()]) == [True]

    with pytest.raises(LeaseLostError, match=r"the store refused to renew it\. An operator ended its lease"):
        await running

    assert asyncio.get_running_loop().time() <= LEASE / 2
    assert (await _taken_over(here)).attempt == 2


@virtual_time
async def test_a_lease_survives_two_failed_renewals() -> None:
    here, job = guarded(), Job(seconds=LEASE * 3)
    here.store.down.add("renew")
    asyncio.get_running_loop().call_later(LEASE * 0.85, here.store.down.clear)

    assert await here.manager.run("order:1", job) == "receipt-1"


@virtual_time
async def test_a_renewal_that_hangs_stops_the_handler_in_time_too() -> None:
    here, job = guarded(), Job(seconds=1_000)
    here.store.held["renew"] = asyncio.Event()

    with pytest.raises(LeaseLostError):
        await here.manager.run("order:1", job)

    assert asyncio.get_running_loop().time() < LEASE


@virtual_time
async def test_a_renewed_lease_counts_from_the_request() -> None:
    here, job = guarded(), Job(seconds=1_000)
    gate = here.store.held["renew"] = asyncio.Event()
    asyncio.get_running_loop().call_later(LEASE * 0.9, gate.set)
    asyncio.get_running_loop().call_later(LEASE * 0.9, here.store.down.add, "renew")

    with pytest.raises(LeaseLostError):
        await here.manager.run("order:1", job)

    asked_at = LEASE / 3
    assert asyncio.get_running_loop().time() == pytest.approx(asked_at + LEASE - fence_margin(LEASE), abs=0.1)


@virtual_time
async def test_failing_renewals_are_rate_limited_and_the_handler_is_stopped() -> None:
    here, job = guarded(), Job(seconds=1_000)
    here.store.down.add("renew")
    here.store.refusal = ZeroDivisionError("a bug")
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    with pytest.raises(LeaseLostError):
        await here.manager.run("order:1", job)

    assert here.store.calls["renew"] < 20


@virtual_time
async def test_a_short_lease_among_long_ones_is_renewed_on_time() -> None:
    long = guarded(processing_timeout_seconds=600)
    short = guarded(long.store, scope="short", processing_timeout_seconds=1)
    job = Job(seconds=3_000)

    values = await asyncio.gather(long.manager.run("a", job), short.manager.run("b", job))

    assert list(values) == ["receipt-1", "receipt-1"]


@virtual_time
async def test_the_outcome_of_a_late_handler_is_stored_only_without_a_takeover() -> None:
    here = guarded()
    here.store.down.add("renew")

    async def stubborn() -> str:
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            await asyncio.sleep(10)
        return "late"

    assert await here.manager.run("order:1", stubborn) == "late"
    assert asyncio.get_running_loop().time() > LEASE


@virtual_time
async def test_nothing_is_renewed_after_the_manager_is_closed() -> None:
    here, job = guarded(), Job(seconds=1_000)
    here.store.held["renew"] = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(LEASE / 2)

    await here.manager.close()
    here.store.held.pop("renew").set()

    with pytest.raises(LeaseLostError):
        await running
    assert here.store.calls["renew"] == 1


@virtual_time
async def test_dropped_leases_leave_no_timer_behind() -> None:
    here, job = guarded(), Job(seconds=1)

    await asyncio.gather(*(here.manager.run(f"order:{number}", job) for number in range(100)))

    assert len(here.manager._leases) == 0
    assert not here.manager.executor.runs.keys()
    assert await here.store.count_active(here.manager.space.root) == 0


def test_a_manager_survives_its_event_loop_and_renews_on_the_next_one() -> None:
    async def short() -> None:
        await here.manager.run("first", Job(seconds=1))

    async def long() -> None:
        await asyncio.sleep(100)  # both loops start at 0: put the timer of the first into the past
        assert await here.manager.run("second", Job(seconds=LEASE * 3)) == "receipt-1"

    here = guarded()
    run_virtual(short())
    run_virtual(long())

    assert here.manager.space.full(Key.of("second"))


@pytest.mark.parametrize(("lease", "margin"), [(0.1, 0.01), (5, 0.5), (10, 1), (300, 1)])
def test_the_margin_is_a_tenth_of_the_lease_but_at_most_a_second(lease: float, margin: float) -> None:
    assert fence_margin(lease) == pytest.approx(margin)


async def test_a_handler_is_cancelled_after_a_stall_beyond_its_lease() -> None:
    """The timer of the handler and its lease are both due then, and the lease comes first."""
    lease, steps = 0.5, list[str]()
    manager = plain_manager(processing_timeout_seconds=lease)

    async def charge() -> None:
        steps.append("before")
        asyncio.get_running_loop().call_soon(time.sleep, 2 * lease)  # like a process that is stopped
        await asyncio.sleep(lease / 2)
        steps.append("after")

    with pytest.raises(LeaseLostError):
        await manager.run("order:1", charge)
    await manager.close()

    assert steps == ["before"]


@virtual_time
async def test_only_a_run_that_waits_enters_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    here, entered = guarded(), list[HeldLease]()

    def enter(lease: HeldLease) -> HeldLease:
        entered.append(lease)
        return Deadline.__enter__(lease)

    async def returns_at_once() -> str:
        return "done"

    monkeypatch.setattr(HeldLease, "__enter__", enter)

    await here.manager.run("order:1", returns_at_once)
    assert entered == []

    await here.manager.run("order:2", Job(seconds=1))
    assert len(entered) == 1
