"""Random runs of one unit: steps that are requested together, cancelled at any moment, and requested again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.engine.step_slots import Once
from integr8s_idem.errors import StepInterruptedError
from integr8s_idem.records import IdempotencyRecord, ReserveRequest, Verdict
from integr8s_idem.testing.virtual_time import run_virtual, virtual_now

ATTEMPTS = 4
NAMES = [f"step-{number}" for number in range(60)]
ONCE = {name: random.Random(name).choice(list(Once)) for name in NAMES}


class Slow(MemoryIdempotencyRepository):
    """A store whose answers take a random time."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(clock=virtual_now)
        self._chance = chance

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        await asyncio.sleep(self._chance.random() / 10)
        verdicts = await super().reserve(requests)
        await asyncio.sleep(self._chance.random() / 10)
        return verdicts

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        await asyncio.sleep(self._chance.random() / 10)
        return await super().get(keys)


class History:
    """One unit that is attempted several times, and what its steps did."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._manager = IdempotencyManager(repository=Slow(self._chance), scope="shop")
        self._completed: set[str] = set()
        self._started: Counter[str] = Counter()
        self.repeated: list[str] = []
        """Steps that ran although an earlier run had completed them, or although they were `at_most_once`."""

    async def run(self) -> None:
        for _ in range(ATTEMPTS):
            with pytest.raises(ConnectionError):
                await self._manager.run("order:7", self._attempt)

    async def _attempt(self) -> None:
        names = self._chance.sample(NAMES, self._chance.randrange(1, len(NAMES)))
        while names:
            together = [names.pop() for _ in range(min(len(names), self._chance.choice([1, 2, 20, 40])))]
            tasks = [asyncio.create_task(self._step(name)) for name in together]
            if self._chance.random() < 0.5:
                await asyncio.wait(tasks, timeout=self._chance.choice([0.01, 0.1, 0.3]))
                kept = self._chance.choice([0, 0, 1, len(tasks) // 2])
                for task in self._chance.sample(tasks, len(tasks) - kept):
                    task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()
        raise ConnectionError("another attempt, please")

    async def _step(self, name: str) -> None:
        async def work() -> str:
            if name in self._completed or (self._started[name] and ONCE[name] is Once.AT_MOST_ONCE):
                self.repeated.append(name)
            self._started[name] += 1
            await asyncio.sleep(self._chance.random() / 10)
            return name

        try:
            assert await self._manager.steps().run(name, work, once=ONCE[name]) == name
        except StepInterruptedError:
            assert ONCE[name] is Once.AT_MOST_ONCE
            return
        self._completed.add(name)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_step_is_repeated_wherever_others_are_cancelled(first: int) -> None:
    repeated: dict[int, list[str]] = {}
    for seed in range(first, first + 50):
        history = History(seed)
        run_virtual(history.run())
        if history.repeated:
            repeated[seed] = history.repeated

    assert repeated == {}
