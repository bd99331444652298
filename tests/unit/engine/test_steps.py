"""Steps: completed steps are not repeated, and a later run continues where the previous one stopped."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from integr8s_idem.config import OnKeyReused
from integr8s_idem.engine.step_slots import Once
from integr8s_idem.engine.steps import Steps
from integr8s_idem.engine.work import Attempt, HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    LeaseLostError,
    PermanentError,
    PreviouslyFailedError,
    ResultDroppedError,
    StepInterruptedError,
)
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, guarded


@dataclass
class Reservation:
    number: int


class Effects:
    """Side effects in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def reserve(self, order: str) -> Reservation:
        self.seen.append(f"reserve {order}")
        return Reservation(len(self.seen))

    async def ship(self, reservation: Reservation) -> None:
        self.seen.append(f"ship {reservation.number}")


VERBS = ("reserve", "renew", "complete", "fail", "release", "get")


class Process:
    """A worker process on a shared store.  After its death none of its calls reach the store."""

    def __init__(self, store: FlakyStore, **config: Any) -> None:
        self.here = guarded(FlakyStore(store.inner), **config)
        self.died = asyncio.Event()

    async def unit(self, body: Callable[[Steps], Awaitable[Any]], key: str = "order:1") -> Any:
        """Run `body` as the unit `key`."""

        async def unit() -> Any:
            return await body(self.here.manager.steps())

        return await self.here.manager.run(key, unit)

    async def die(self, *_: object) -> None:
        """Kill the process: it stops without notice."""
        self.here.store.held = {verb: asyncio.Event() for verb in VERBS}
        self.died.set()
        await asyncio.Event().wait()

    async def runs_until_it_dies(self, body: Callable[[Steps], Awaitable[Any]], key: str = "order:1") -> None:
        running = asyncio.ensure_future(self.unit(body, key))
        await self.died.wait()
        await asyncio.sleep(31)
        _FORGOTTEN.append(running)


_FORGOTTEN: list[Any] = []
"""Tasks of dead processes."""


@virtual_time
async def test_a_run_after_a_crash_continues_after_the_completed_steps() -> None:
    store, effects = guarded().store, Effects()
    first, second = Process(store), Process(store)

    async def dying(steps: Steps) -> None:
        await steps.run("reserve", effects.reserve, "1")
        await first.die()

    async def whole(steps: Steps) -> str:
        reservation = await steps.run("reserve", effects.reserve, "1")
        assert reservation == Reservation(1)
        await steps.run("ship", effects.ship, reservation)
        return "shipped"

    await first.runs_until_it_dies(dying)
    assert await second.unit(whole) == "shipped"
    assert effects.seen == ["reserve 1", "ship 1"]


@virtual_time
async def test_a_run_after_a_failure_does_not_repeat_completed_steps() -> None:
    process, effects, fails = Process(guarded().store), Effects(), [OSError("no carrier")]

    async def ship(reservation: Reservation) -> None:
        if fails:
            raise fails.pop()
        await effects.ship(reservation)

    async def unit(steps: Steps) -> None:
        reservation = await steps.run("reserve", effects.reserve, "1")
        await steps.run("ship", ship, reservation)

    with pytest.raises(OSError, match="no carrier"):
        await process.unit(unit)
    await process.unit(unit)
    assert effects.seen == ["reserve 1", "ship 1"]


@virtual_time
@pytest.mark.parametrize("value", [None, 0, "", False, [], b"", b"x", {"a": 1}])
async def test_step_results_are_restored_unchanged(value: object) -> None:
    process, seen, fails = Process(guarded().store), [], [OSError("the end")]

    async def step() -> Any:
        seen.append("done")
        return value

    async def unit(steps: Steps) -> Any:
        got = await steps.run("one", step)
        if fails:
            raise fails.pop()
        return got

    with pytest.raises(OSError, match="the end"):
        await process.unit(unit)
    got = await process.unit(unit)
    assert (got, type(got), seen) == (value, type(value), ["done"])


@virtual_time
async def test_step_results_are_stored_even_if_result_caching_is_disabled() -> None:
    process, effects, fails = Process(guarded().store, enable_result_caching=False), Effects(), [OSError("the end")]

    async def unit(steps: Steps) -> None:
        assert await steps.run("reserve", effects.reserve, "1") == Reservation(1)
        if fails:
            raise fails.pop()

    with pytest.raises(OSError, match="the end"):
        await process.unit(unit)
    await process.unit(unit)
    assert effects.seen == ["reserve 1"]


@virtual_time
async def test_an_interrupted_step_runs_again() -> None:
    store, seen = guarded().store, []
    first, second = Process(store), Process(store)

    async def half() -> None:
        seen.append("half")
        await first.die()

    async def step() -> None:
        seen.append("whole")

    await first.runs_until_it_dies(lambda steps: steps.run("one", half))
    await second.unit(lambda steps: steps.run("one", step))
    assert seen == ["half", "whole"]


@virtual_time
async def test_an_interrupted_at_most_once_step_ends_the_unit() -> None:
    store, seen = guarded().store, []
    first, second, third = Process(store), Process(store), Process(store)

    async def half() -> None:
        seen.append("half")
        await first.die()

    async def unit(steps: Steps) -> None:
        await steps.run("one", half, once="at_most_once")

    await first.runs_until_it_dies(unit)
    with pytest.raises(StepInterruptedError, match="step one of order:1 was reserved by an earlier run"):
        await second.unit(unit)
    with pytest.raises(PreviouslyFailedError, match="StepInterruptedError"):
        await third.unit(unit)
    assert seen == ["half"]


@virtual_time
async def test_an_at_most_once_step_never_runs_without_a_record() -> None:
    here, printed, failures = guarded(on_store_error="open"), list[str](), [ConnectionError()]

    async def print_invoice() -> None:
        printed.append("invoice")

    async def unit() -> None:
        if not printed:
            here.store.fail_next("reserve")
        await here.manager.steps().run("print", print_invoice, once="at_most_once")
        if failures:
            raise failures.pop()

    with pytest.raises(ConnectionError):
        await here.manager.run("order:1", unit)
    await here.manager.run("order:1", unit)

    assert printed == ["invoice"]


@virtual_time
async def test_a_failed_at_most_once_step_does_not_run_again() -> None:
    process, seen = Process(guarded().store), []

    async def step() -> None:
        seen.append("done")
        raise OSError("half way")

    async def unit(steps: Steps) -> None:
        await steps.run("one", step, once=Once.AT_MOST_ONCE)

    with pytest.raises(OSError, match="half way"):
        await process.unit(unit)
    with pytest.raises(StepInterruptedError, match="OSError: half way"):
        await process.unit(unit)
    assert seen == ["done"]


@virtual_time
async def test_a_completed_at_most_once_step_is_replayed() -> None:
    process, effects, fails = Process(guarded().store), Effects(), [OSError("the end")]

    async def unit(steps: Steps) -> None:
        assert await steps.run("reserve", effects.reserve, "1", once="at_most_once") == Reservation(1)
        if fails:
            raise fails.pop()

    with pytest.raises(OSError, match="the end"):
        await process.unit(unit)
    await process.unit(unit)
    assert effects.seen == ["reserve 1"]


@virtual_time
async def test_concurrent_steps_are_found_again_in_any_order() -> None:
    store, seen = guarded().store, []
    first, second = Process(store), Process(store)

    async def step(name: str) -> str:
        seen.append(name)
        return name.upper()

    async def dying(steps: Steps) -> None:
        await asyncio.gather(*(steps.run(name, step, name) for name in "abc"))
        await first.die()

    async def whole(steps: Steps) -> list[str]:
        return list(await asyncio.gather(*(steps.run(name, step, name) for name in "dcba")))

    await first.runs_until_it_dies(dying)
    assert await second.unit(whole) == ["D", "C", "B", "A"]
    assert sorted(seen) == ["a", "b", "c", "d"]


@virtual_time
async def test_more_steps_than_one_page_are_found_again() -> None:
    store, seen = guarded().store, []
    first, second = Process(store), Process(store)

    async def step(number: int) -> int:
        seen.append(number)
        return number

    async def dying(steps: Steps) -> None:
        for number in range(40):
            await steps.run(f"number-{number}", step, number)
        await first.die()

    async def whole(steps: Steps) -> int:
        return sum([await steps.run(f"number-{number}", step, number) for number in range(41)])

    await first.runs_until_it_dies(dying)
    assert await second.unit(whole) == sum(range(41))
    assert seen == list(range(41))


@pytest.mark.parametrize("cancelled", [1, 15, 16, 40])
@pytest.mark.parametrize("during", ["get", "reserve"])
@virtual_time
async def test_a_step_is_found_again_after_others_were_cancelled_before_they_were_recorded(
    cancelled: int, during: str
) -> None:
    process, printed = Process(guarded().store), []
    store, manager = process.here.store, process.here.manager

    async def print_invoice() -> None:
        printed.append("invoice")

    async def look_up(number: int) -> None:
        await asyncio.sleep(100)

    async def unit(steps: Steps) -> str:
        if manager.attempt().number > 1:
            await steps.run("print", print_invoice, once="at_most_once")
            return "done"
        answers = store.held[during] = asyncio.Event()
        optional = [asyncio.create_task(steps.run(f"look-up-{number}", look_up, number)) for number in range(cancelled)]
        await asyncio.sleep(1)
        printing = asyncio.create_task(steps.run("print", print_invoice, once="at_most_once"))
        await asyncio.sleep(1)
        for each in optional:
            each.cancel()
        await asyncio.sleep(1)
        answers.set()
        await printing
        raise ConnectionError("after the step")

    with pytest.raises(ConnectionError):
        await process.unit(unit)

    assert await process.unit(unit) == "done"
    assert printed == ["invoice"]


@virtual_time
async def test_many_concurrent_steps_that_wait_for_each_other_all_start() -> None:
    store, together = guarded().store, asyncio.Barrier(50)

    async def meet() -> None:
        await together.wait()

    async def unit(steps: Steps) -> str:
        await asyncio.gather(*(steps.run(f"number-{number}", meet) for number in range(50)))
        return "done"

    assert await Process(store).unit(unit) == "done"


@pytest.mark.parametrize("local_memory_keys", [0, 100])
@virtual_time
async def test_deleting_a_unit_deletes_its_steps_and_their_steps(local_memory_keys: int) -> None:
    process, seen = Process(guarded().store, local_memory_keys=local_memory_keys), []
    manager = process.here.manager

    async def inner() -> None:
        seen.append("inner")

    async def outer(number: int) -> None:
        seen.append(f"outer {number}")
        if number == 0:
            await manager.steps().run("inner", inner)

    async def unit(steps: Steps) -> None:
        for number in range(20):
            await steps.run(f"outer-{number}", outer, number)
        raise PermanentError("given up")

    for _ in range(2):
        with pytest.raises(PermanentError):
            await process.unit(unit)
        assert len(seen) == 21
        assert await manager.delete("order:1")
        assert not await manager.delete("order:1")
        seen.clear()


@virtual_time
async def test_a_run_that_was_taken_over_starts_no_more_steps() -> None:
    store, effects = guarded().store, Effects()
    zombie, other = Process(store), Process(store)
    stalled, go_on = asyncio.Event(), asyncio.Event()

    async def stalling(steps: Steps) -> None:
        reservation = await steps.run("reserve", effects.reserve, "1")
        zombie.here.store.held = {"renew": asyncio.Event()}
        # Like a suspended process: its own clock does not end it.
        lease = zombie.here.manager.executor.runs.current().lease  # type: ignore[union-attr]
        lease.reschedule(None)  # type: ignore[union-attr]
        stalled.set()
        await go_on.wait()
        await steps.run("ship", effects.ship, reservation)

    async def whole(steps: Steps) -> None:
        await steps.run("ship", effects.ship, await steps.run("reserve", effects.reserve, "1"))

    asleep = asyncio.ensure_future(zombie.unit(stalling))
    await stalled.wait()
    await asyncio.sleep(31)
    await other.unit(whole)
    go_on.set()
    with pytest.raises(LeaseLostError):
        await asleep
    assert effects.seen == ["reserve 1", "ship 1"]


@virtual_time
async def test_a_run_waits_for_a_step_of_an_earlier_run() -> None:
    store, seen = guarded().store, []
    zombie, other = Process(store), Process(store)
    started = asyncio.Event()

    async def slow() -> str:
        seen.append("slow")
        zombie.here.store.held = {"renew": asyncio.Event()}
        outer = zombie.here.manager._leases.held
        for lease in outer:
            lease.reschedule(None)
        started.set()
        await asyncio.sleep(35)
        return "done by the zombie"

    async def unit(steps: Steps) -> str:
        return await steps.run("one", slow)

    asleep = asyncio.ensure_future(zombie.unit(unit))
    await started.wait()
    await asyncio.sleep(31)
    # Its lease has ended as well, so the step is taken over instead of being waited for.
    assert await other.unit(unit) == "done by the zombie"
    assert seen == ["slow", "slow"]
    with pytest.raises(LeaseLostError):
        await asleep


@virtual_time
async def test_a_step_of_a_failed_run_does_not_start() -> None:
    """`gather` continues with the other steps if one raises; here one that waits for the lease of a dead process."""
    store, seen = guarded().store, []
    first, second = Process(store), Process(store)

    async def book() -> None:
        seen.append("book")

    async def charge() -> None:
        raise PermanentError("no such card")

    async def dying(steps: Steps) -> None:
        await asyncio.sleep(LEASE * 0.6)  # so that the lease of the step ends well after that of the unit
        await steps.run("book", first.die)

    async def failing(steps: Steps) -> None:
        await asyncio.gather(steps.run("book", book), steps.run("charge", charge))

    _FORGOTTEN.append(asyncio.ensure_future(first.unit(dying)))
    await first.died.wait()
    with pytest.raises(PermanentError, match="no such card"):
        await second.unit(failing)
    await asyncio.sleep(2 * LEASE)
    assert seen == []


@virtual_time
async def test_a_step_removed_from_the_code_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    store, effects = guarded().store, Effects()
    first, second = Process(store), Process(store)

    async def dying(steps: Steps) -> None:
        await steps.run("reserve", effects.reserve, "1")
        await first.die()

    async def renamed(steps: Steps) -> None:
        await steps.run("reserve-stock", effects.reserve, "1")

    await first.runs_until_it_dies(dying)
    with caplog.at_level(logging.WARNING):
        await second.unit(renamed)
    assert "without requesting step reserve, which an earlier run completed" in caplog.text
    assert second.here.observer.counts[Signal.STEP_ORPHANED] == 1


@virtual_time
async def test_nothing_is_reported_if_all_steps_are_requested(caplog: pytest.LogCaptureFixture) -> None:
    process, effects, fails = Process(guarded().store), Effects(), [OSError("the end")]

    async def unit(steps: Steps) -> None:
        await steps.run("reserve", effects.reserve, "1")
        if fails:
            raise fails.pop()

    with pytest.raises(OSError, match="the end"):
        await process.unit(unit)
    await process.unit(unit)
    assert "without requesting" not in caplog.text


@virtual_time
async def test_a_replay_repeats_interrupted_steps_but_not_completed_ones() -> None:
    here, effects = guarded(), Effects()
    fails: list[Exception] = [PermanentError("no carrier")]

    async def ship(reservation: Reservation) -> None:
        if fails:
            raise fails.pop()
        await effects.ship(reservation)

    async def unit(_: Attempt) -> None:
        steps = here.manager.steps()
        reservation = await steps.run("reserve", effects.reserve, "1")
        await steps.run("ship", ship, reservation, once="at_most_once")

    async def generation(number: int) -> Outcome[None]:
        return await here.manager.execute(Work(Key.of("order:1").in_generation(number)), unit)

    assert isinstance(await generation(0), HandlerFailed)
    assert not isinstance(await generation(1), HandlerFailed)
    assert effects.seen == ["reserve 1", "ship 1"]


@virtual_time
async def test_a_step_result_too_large_to_store_raises_an_error_in_the_later_run() -> None:
    process, fails = Process(guarded().store, max_result_size_bytes=100), [OSError("the end")]

    async def step() -> str:
        return "x" * 200

    async def unit(steps: Steps) -> None:
        await steps.run("one", step)
        if fails:
            raise fails.pop()

    with pytest.raises(OSError, match="the end"):
        await process.unit(unit)
    with pytest.raises(ResultDroppedError):
        await process.unit(unit)


@virtual_time
async def test_steps_wait_for_the_store_without_counting_an_attempt() -> None:
    process, effects = Process(guarded().store), Effects()
    store = process.here.store

    async def unit(steps: Steps) -> None:
        store.down = {"reserve", "complete", "get"}
        asyncio.get_running_loop().call_later(5, store.down.clear)
        reservation = await steps.run("reserve", effects.reserve, "1")
        store.down = {"complete"}
        asyncio.get_running_loop().call_later(5, store.down.clear)
        await steps.run("ship", effects.ship, reservation)

    await process.unit(unit)
    assert effects.seen == ["reserve 1", "ship 1"]


@pytest.mark.parametrize("name", ["reserve", "ship", "charge", "refund"])
@virtual_time
async def test_a_step_that_a_development_version_recorded_is_found(name: str) -> None:
    store, seen = guarded().store, []
    process = Process(store)
    unit = process.here.manager.space.full(process.here.manager.space.key("order:1"))

    async def step() -> str:
        seen.append(name)
        return name

    async def failing(steps: Steps) -> str:
        await steps.run(name, step)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await process.unit(failing)
    entry = store.inner._entries[f"{unit};s0"]  # type: ignore[attr-defined]
    entry.fingerprint = hashlib.sha256(name.encode()).digest()[:16]

    assert await process.unit(lambda steps: steps.run(name, step)) == name
    assert seen == [name]


@virtual_time
async def test_a_step_does_not_take_the_slot_of_another_under_the_run_policy() -> None:
    store, seen = guarded().store, []
    process = Process(store, on_key_reused=OnKeyReused.RUN)

    async def step(name: str) -> str:
        seen.append(name)
        return name

    space = process.here.manager.space
    foreign = space.step(space.full(space.key("order:1")), "", 0)
    await process.here.manager.run(foreign, lambda: step("foreign"), fingerprint=b"f" * 16)

    assert await process.unit(lambda steps: steps.run("mine", step, "mine")) == "mine"
    assert seen == ["foreign", "mine"]
    record = await process.here.manager.get(space.step(space.full(space.key("order:1")), "", 1))
    assert record is not None
    assert record.status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_misuse_of_steps_raises_errors() -> None:
    process, effects = Process(guarded().store), Effects()

    async def twice(steps: Steps) -> None:
        await steps.run("reserve", effects.reserve, "1")
        await steps.run("reserve", effects.reserve, "2")

    def plain(_: str) -> None: ...

    with pytest.raises(ApplicationError, match="two steps of order:1 are named reserve"):
        await process.unit(twice)
    with pytest.raises(ApplicationError, match="must have 1 to 100 characters"):
        await process.unit(lambda steps: steps.run("", effects.reserve, "1"), "order:2")
    with pytest.raises(ApplicationError, match="is not an async function"):
        await process.unit(lambda steps: steps.run("plain", plain, "1"), "order:3")  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="once must be 'at_least_once' or 'at_most_once', not 'twice'"):
        await process.unit(lambda steps: steps.run("x", effects.reserve, "1", once="twice"), "order:4")  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="pass the function itself, as in"):
        await process.unit(lambda steps: steps.run("x", effects.reserve("1")), "order:5")  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="is running here"):
        process.here.manager.steps()


@virtual_time
async def test_a_run_has_one_set_of_steps() -> None:
    here = guarded()

    async def unit() -> bool:
        return here.manager.steps() is here.manager.steps()

    assert await here.manager.run("order:1", unit)
