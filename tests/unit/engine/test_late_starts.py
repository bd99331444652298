"""Every entry point reserves work again if its lease has expired before its function starts.

The lease clock and the store's clock jump together, and the event loop's clock does not move, as after a stall.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from contextvars import Context
from functools import partial

import pytest

from integr8s_idem import Attempt, BaseEvent, EventRouter
from integr8s_idem._util.loop_fairness import LONGEST_TURN
from integr8s_idem.errors import LeaseLostError, StoreUnavailableError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.handler import EventHandler
from integr8s_idem.integrations.dishka import (
    FromDishka,
)
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.support.guarded import LEASE, guarded
from tests.support.late_starts import (
    BY_EVERY_ENTRY,
    CALLED_LATER,
    GIVEN,
    Entry,
    OrderPlaced,
    Run,
    Tariff,
    container_of,
    value_of,
)
from tests.support.stalling import ManualClock


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream_guard.pause_after", lambda _: 0.0)


@BY_EVERY_ENTRY
async def test_work_with_a_late_lease_that_is_still_held_starts_as_the_same_attempt(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)

    entry.store.stall, entry.store.skipped = clock.stall, kind.skipped
    await entry.call()
    await entry.close()

    assert [attempt.number for attempt in entry.starts] == [1]
    assert entry.prevented == 1
    first, again = entry.store.reserved[-2:]
    assert (first.key, first.token, first.fence) == (again.key, again.token, again.fence)


@BY_EVERY_ENTRY
async def test_work_completed_by_another_process_is_answered_as_a_duplicate(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = kind(clock, inner), kind(clock, inner)

    async def done_elsewhere() -> None:
        clock.leap()
        # In a separate context, as in another process.
        await asyncio.create_task(other.call(), context=Context())

    entry.store.stall, entry.store.skipped = done_elsewhere, kind.skipped
    if kind.duplicate is LeaseLostError:
        with pytest.raises(LeaseLostError):
            await entry.call()
    else:
        assert await entry.call() == kind.duplicate
    await entry.close()
    await other.close()

    assert entry.starts == []
    assert [attempt.number for attempt in other.starts] == [2]
    assert entry.prevented == 1


@BY_EVERY_ENTRY
async def test_nothing_starts_on_a_late_lease_while_the_store_does_not_answer(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)

    async def leap_into_an_outage() -> None:
        clock.leap()
        entry.store.fail_next("reserve")

    entry.store.stall, entry.store.skipped = leap_into_an_outage, kind.skipped
    if not kind.is_patient:
        with suppress(StoreUnavailableError):
            assert await entry.call() is None
        assert entry.starts == []
    await entry.call()
    await entry.close()

    assert len(entry.starts) == 1
    assert entry.prevented == 1


@pytest.mark.parametrize("kind", CALLED_LATER)
async def test_a_lease_that_ends_between_the_first_check_and_the_call_prevents_the_start(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)
    entry.observer.stalls_in = kind.skipped + 1

    await entry.call()
    await entry.close()

    assert [attempt.number for attempt in entry.starts] == [1]
    assert entry.prevented == 1
    first, again = entry.store.reserved[-2:]
    assert (first.token, first.fence) == (again.token, again.fence)


async def test_a_lease_that_ends_while_dependencies_are_made_prevents_the_start(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, router, made = Run(clock, inner), EventRouter(), list[Tariff]()

    async def tariff() -> Tariff:
        if not made:
            clock.leap()
        made.append(Tariff())
        return made[-1]

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced, tariff: FromDishka[Tariff], attempt: FromDishka[Attempt]) -> str:
        assert tariff is made[-1]
        return entry.start(attempt)

    container = container_of(entry, router, tariff)
    [outcome] = await (await container.get(EventDispatcher)).dispatch(GIVEN)
    await container.close()

    assert value_of(outcome) == "receipt 1"
    assert (len(made), len(entry.starts), entry.prevented) == (2, 1, 1)


async def test_a_run_with_an_expired_lease_is_not_restarted_by_nested_runs(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    """Its side effects have happened, so a late start of a nested run must not look as if it had not started."""
    entry = Run(clock, inner)
    charges: list[int] = []

    async def inner_handler(event: BaseEvent) -> str:
        return "inner"

    unguarded = EventHandler(inner_handler, name="inner")

    async def charge() -> str:
        charges.append(1)
        clock.seconds += 2 * LEASE  # the event loop is blocked
        return str(await unguarded(BaseEvent(event_type="inner")))

    assert await entry.manager.run("outer", charge) == "inner"
    assert charges == [1]


async def test_functions_that_do_not_await_let_the_event_loop_run_between_them() -> None:
    """Outcomes and renewals are written between functions that do not await."""
    here = guarded()
    started, completed = list[int](), list[int]()

    async def work(number: int) -> None:
        started.append(number)
        completed.append(here.store.calls["complete"])
        time.sleep(2 * LONGEST_TURN)  # noqa: ASYNC251  # a badly behaved function

    await asyncio.gather(*(here.manager.run(f"job:{number}", partial(work, number)) for number in range(10)))

    assert sorted(started) == list(range(10))
    assert completed[-1] >= 8, "outcomes do not wait for the last function"
