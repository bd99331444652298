"""Several workers of one group under load, and somebody who does things to them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final, Self

from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.forks import Forked, Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.jobs import Stream, out_of_order
from tests.crashes.judging import CompletedKeys, judge, last_words
from tests.crashes.orders import Order
from tests.support.effects import Effects

PARTITIONS: Final = 6
PATIENCE: Final = 90.0
"""Seconds until all must be quiet once nothing is published or killed any more."""


class Crew:
    """The workers; one that is taken away is replaced at once."""

    def __init__(self, nursery: Nursery, order: Order, topics: Topics, dice: Random) -> None:
        self.order = order
        self.topics = topics
        self.effects = Effects(Path(order.folder))
        self.completed = CompletedKeys(topics.ground.store, self.effects, f"{order.key_prefix}:")
        self.workers: list[Forked] = []
        self.figures = Figures()
        self._nursery = nursery
        self._stream = Stream(dice, order.lease)

    @classmethod
    @asynccontextmanager
    async def hired(
        cls, ground: Ground, nursery: Nursery, name: str, dice: Random, *, size: int
    ) -> AsyncIterator[Self]:
        """`size` workers that order their work by key, on topics of their own."""
        folder = ground.folder / name
        folder.mkdir()
        order = Order(
            bootstrap=ground.broker.bootstrap,
            store=ground.redis_settings,
            prefix=f"{name}.",
            folder=str(folder),
            ordering="key",
        )
        async with ground.topic_set(order.prefix, PARTITIONS) as topics:
            crew = cls(nursery, order, topics, dice)
            crew.effects.prepare()
            for _ in range(size):
                crew.workers.append(await nursery.start(order))
            yield crew

    @asynccontextmanager
    async def load(self, jobs_a_second: float) -> AsyncIterator[None]:
        """Publish while the block goes on."""
        enough = asyncio.Event()
        publishing = asyncio.create_task(self._publish(jobs_a_second, enough))
        try:
            yield
        finally:
            enough.set()
            await publishing

    async def _publish(self, jobs_a_second: float, enough: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for job in self._stream:
            await self.topics.publish([job])
            # What could not be published in time is not made up for beyond a second.
            due = max(due + 1 / jobs_a_second, loop.time() - 1)
            await asyncio.sleep(max(0.0, due - loop.time()))
            if enough.is_set():
                return

    async def replace(self, place: int, *signals: tuple[float, signal.Signals]) -> None:
        """Send the worker at `place` signals, each after so many seconds; the last ends it.  Another takes its place.

        Raises:
            ViolationError: It had ended by itself, or ends with a status that no signal explains; or a key that was
                completed has been run again.
        """
        worker = self.workers[place]
        for pause, number in signals:
            await asyncio.wait({worker.ended}, timeout=pause)
            worker.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            status = await asyncio.shield(worker.ended)
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"a worker ended with {status}:\n{last_words(self.folder)}")
        self.figures["kills" if status == -signal.SIGKILL else "drains"] += 1
        self.workers[place] = await self._nursery.start(self.order)
        await self.completed.look()

    @property
    def folder(self) -> Path:
        return Path(self.order.folder)

    async def quiet(self) -> None:
        """Return once all that was published is settled and committed."""
        began = time.monotonic()
        while not await self.topics.settled(self.order.group):
            if time.monotonic() - began > PATIENCE:
                raise ViolationError(f"not settled after {PATIENCE:g} s:\n{last_words(self.folder)}")
            await asyncio.sleep(0.2)
        self.figures["settled_after_ms"] += int((time.monotonic() - began) * 1000)

    async def verdict(self) -> Figures:
        """Send all home, and judge.

        Raises:
            ViolationError: A promise was broken.
        """
        for worker in self.workers:
            if await worker.end(signal.SIGTERM, PATIENCE) != 0:
                raise ViolationError(f"a worker does not end well:\n{last_words(self.folder)}")
        self.figures["completed_before_the_end"] += len(self.completed)
        await self.completed.look(nobody_lives=True)
        self.figures.update(await judge(self.topics, self.effects, self.order.key_prefix))
        wrong = out_of_order(self.effects)
        if wrong:
            raise ViolationError(f"first effects out of order: {wrong}")
        return self.figures

    async def start(self, **changes: object) -> Forked:
        """One more worker, outside of the crew."""
        return await self._nursery.start(replace(self.order, **changes))  # type: ignore[arg-type]
