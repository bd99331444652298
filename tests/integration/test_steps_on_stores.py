"""Steps on every kind of store: a step is an ordinary record and needs no other support."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotencyRepository, Once
from integr8s_idem.errors import StepInterruptedError
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.counting import CountingObserver
from tests.support.homes import Home, at_hand, open_home, open_records

MEMORY = "memory"
KINDS = (MEMORY, *at_hand("redis", "redis-cluster", "sqlite", "postgresql", "mysql", "dynamodb"))
LEASE = 3.0
"""Lease in seconds before a takeover; longer than a slow disk takes."""
LONG_LEASE = 60.0
"""Lease in seconds for tests without a crash."""


@pytest.fixture(scope="module", params=KINDS)
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    if request.param == MEMORY:
        yield Home(MEMORY, None)
        return
    with open_home(request.param) as home:
        yield home


@pytest.fixture
async def store(home: Home, tmp_path: Path, topic_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    if home.kind == MEMORY:
        yield MemoryIdempotencyRepository()
        return
    async with open_records(home.settings(tmp_path, timeout_seconds=5), topic_prefix.rstrip(".")) as store:
        yield store


@dataclass
class Receipt:
    step: str
    run: int


class Process:
    """One of several processes that share a store.  After its death, none of its calls reaches the store."""

    def __init__(self, store: IdempotencyRepository, lease: float, prefix: str) -> None:
        self.store = FlakyStore(store)
        self.observer = CountingObserver()
        config = IdempotencyConfig(key_prefix=prefix, processing_timeout_seconds=lease)
        self.manager = IdempotencyManager(config, self.store, self.observer, scope="billing")

    async def die(self) -> None:
        """Block all calls to the store and stop forever."""
        self.store.held = {verb: asyncio.Event() for verb in ("reserve", "renew", "complete", "fail", "release", "get")}
        await asyncio.Event().wait()

    async def end(self, work: asyncio.Task[Any]) -> None:
        """Finish the blocked calls and release their connections."""
        for held in self.store.held.values():
            held.set()
        self.store.held = {}
        work.cancel()
        await asyncio.wait({work})
        await self.manager.close()


async def gather_all(*steps: Coroutine[Any, Any, Receipt]) -> list[Receipt]:
    """Run `steps` concurrently until all have ended, and raise the first error: none may outlive its test."""
    ends = await asyncio.gather(*steps, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if isinstance(end, Receipt)]


@dataclass
class Fulfilment:
    """One order in four steps, two of them concurrent, with the counts of their effects."""

    order: str
    dies_in: str = ""
    effects: Counter[str] = field(default_factory=Counter)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    charged: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, process: Process) -> list[Receipt]:
        """Run the steps in a process that may die within a step, after its effect."""

        async def unit() -> list[Receipt]:
            steps = process.manager.steps()

            async def step(name: str, once: str) -> Receipt:
                return await steps.run(name, do, name, once=Once(once))

            async def do(name: str) -> Receipt:
                if name == "book" and self.dies_in:
                    await self.charged.wait()  # otherwise `charge` would be interrupted as well
                self.effects[name] += 1
                if name == self.dies_in:
                    self.dies_in = ""
                    self.died.set()
                    await process.die()
                return Receipt(name, self.effects[name])

            async def charge() -> Receipt:
                receipt = await step("charge", "at_most_once")
                self.charged.set()
                return receipt

            reserved = await step("reserve", "at_least_once")
            charged, booked = await gather_all(charge(), step("book", "at_least_once"))
            return [reserved, charged, booked, await step("ship", "at_most_once")]

        return await process.manager.run(self.order, unit, wait_timeout=timedelta(seconds=30))


@pytest.fixture
def processes(store: IdempotencyRepository, topic_prefix: str) -> Callable[[float], Process]:
    """Return a function that creates a process of the service with a lease in seconds."""
    return lambda lease: Process(store, lease, topic_prefix.rstrip("."))


DONE = [Receipt("reserve", 1), Receipt("charge", 1), Receipt("book", 1), Receipt("ship", 1)]


async def _run_after_a_crash_in(step: str, processes: Callable[[float], Process]) -> tuple[Counter[str], object]:
    """Return the effects and the result of an order after a process died in `step`."""
    fulfilment, first, second = Fulfilment(f"order:{step}", dies_in=step), processes(LEASE), processes(LEASE)
    dead = asyncio.create_task(fulfilment.run(first))
    await fulfilment.died.wait()
    [end] = await asyncio.gather(fulfilment.run(second), return_exceptions=True)
    effects = fulfilment.effects.copy()
    await first.end(dead)
    await second.manager.close()
    return effects, end


async def test_after_a_crash_in_any_step_the_next_run_continues_there(
    processes: Callable[[float], Process],
) -> None:
    results = await asyncio.gather(*(_run_after_a_crash_in(receipt.step, processes) for receipt in DONE))

    (reserve, charge, book, ship) = results
    assert reserve == ({"reserve": 2, "charge": 1, "book": 1, "ship": 1}, [Receipt("reserve", 2), *DONE[1:]])
    assert book == ({"reserve": 1, "charge": 1, "book": 2, "ship": 1}, [*DONE[:2], Receipt("book", 2), DONE[3]])
    for effects, end in (charge, ship):
        assert isinstance(end, StepInterruptedError)
        assert effects[end.step] == 1
    assert charge[0]["ship"] == 0
    assert ship[0] == {"reserve": 1, "charge": 1, "book": 1, "ship": 1}


async def test_more_steps_than_fit_into_one_read_are_stored_and_an_orphan_is_reported(
    processes: Callable[[float], Process],
) -> None:
    process, seen = processes(LONG_LEASE), Counter[int]()

    async def step(number: int) -> int:
        seen[number] += 1
        return number

    async def unit(count: int, fails: bool) -> int:
        steps = process.manager.steps()
        got = await asyncio.gather(*(steps.run(f"number-{number}", step, number) for number in range(count)))
        if fails:
            raise OSError("the end")
        return sum(got)

    with pytest.raises(OSError, match="the end"):
        await process.manager.run("order:1", lambda: unit(40, True))
    assert await process.manager.run("order:1", lambda: unit(39, False)) == sum(range(39))

    assert seen == dict.fromkeys(range(40), 1)
    assert process.observer.counts[Signal.STEP_ORPHANED] == 1
