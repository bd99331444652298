"""A group of workers under load that can be signaled and replaced."""

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
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.jobs import Stream, out_of_order
from tests.crashes.judging import CompletedKeys, judge, log_tail
from tests.crashes.orders import Order
from tests.support.effects import Effects

PARTITIONS: Final = 6
PATIENCE: Final = 90.0
"""Seconds within which everything must be settled after the last message and the last kill."""


class WorkerGroup:
    """Workers of one group; a worker that ends is replaced immediately."""

    def __init__(self, fork_server: ForkServer, order: Order, topics: Topics, rng: Random) -> None:
        self.order = order
        self.topics = topics
        self.effects = Effects(Path(order.folder))
        self.completed = CompletedKeys(topics.servers.store, self.effects, f"{order.key_prefix}:")
        self.workers: list[ForkedWorker] = []
        self.figures = Figures()
        self._fork_server = fork_server
        self._stream = Stream(rng, order.lease)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, servers: Servers, fork_server: ForkServer, name: str, rng: Random, *, size: int
    ) -> AsyncIterator[Self]:
        """Start `size` workers with ordering by key, on their own topics."""
        folder = servers.folder / name
        folder.mkdir()
        order = Order(
            bootstrap=servers.broker.bootstrap,
            store=servers.redis_settings,
            prefix=f"{name}.",
            folder=str(folder),
            ordering="key",
        )
        async with servers.topic_set(order.prefix, PARTITIONS) as topics:
            worker_group = cls(fork_server, order, topics, rng)
            worker_group.effects.prepare()
            for _ in range(size):
                worker_group.workers.append(await fork_server.start(order))
            yield worker_group

    @asynccontextmanager
    async def load(self, jobs_a_second: float) -> AsyncIterator[None]:
        """Publish jobs until the block ends."""
        stopped = asyncio.Event()
        publishing = asyncio.create_task(self._publish(jobs_a_second, stopped))
        try:
            yield
        finally:
            stopped.set()
            await publishing

    async def _publish(self, jobs_a_second: float, stopped: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for job in self._stream:
            await self.topics.publish([job])
            # Catch up on at most one second of delayed jobs.
            due = max(due + 1 / jobs_a_second, loop.time() - 1)
            await asyncio.sleep(max(0.0, due - loop.time()))
            if stopped.is_set():
                return

    async def replace(self, index: int, *signals: tuple[float, signal.Signals]) -> None:
        """Send signals, each after a pause in seconds, to a worker; the last one ends it.  Start a replacement.

        Raises:
            ViolationError: The exit status cannot be explained by the signals, or a completed key ran again.
        """
        worker = self.workers[index]
        for pause, number in signals:
            await asyncio.wait({worker.ended}, timeout=pause)
            worker.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            status = await asyncio.shield(worker.ended)
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"a worker exited with status {status}:\n{log_tail(self.folder)}")
        self.figures["kills" if status == -signal.SIGKILL else "drains"] += 1
        self.workers[index] = await self._fork_server.start(self.order)
        await self.completed.check()

    @property
    def folder(self) -> Path:
        return Path(self.order.folder)

    async def wait_until_settled(self) -> None:
        """Wait until all published messages are settled and committed."""
        began = time.monotonic()
        while not await self.topics.settled(self.order.group):
            if time.monotonic() - began > PATIENCE:
                raise ViolationError(f"not settled after {PATIENCE:g} s:\n{log_tail(self.folder)}")
            await asyncio.sleep(0.2)
        self.figures["settled_after_ms"] += int((time.monotonic() - began) * 1000)

    async def verdict(self) -> Figures:
        """Stop all workers and check the results.

        Raises:
            ViolationError: A promise was broken.
        """
        for worker in self.workers:
            if await worker.end(signal.SIGTERM, PATIENCE) != 0:
                raise ViolationError(f"a worker did not exit cleanly:\n{log_tail(self.folder)}")
        self.figures["completed_before_the_end"] += len(self.completed)
        await self.completed.check(no_worker_running=True)
        self.figures.update(await judge(self.topics, self.effects, self.order.key_prefix))
        wrong = out_of_order(self.effects)
        if wrong:
            raise ViolationError(f"first effects out of order: {wrong}")
        return self.figures

    async def start(self, **changes: object) -> ForkedWorker:
        """Start another worker that does not belong to `workers`."""
        return await self._fork_server.start(replace(self.order, **changes))  # type: ignore[arg-type]
