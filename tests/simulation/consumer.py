"""A simulated `AIOKafkaConsumer` with the behavior described in docs/explanation/worker.md, A1 to A16."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from typing import Any, Final

from aiokafka.errors import IllegalStateError, KafkaConnectionError, RequestTimedOutError, UnknownMemberIdError

from integr8s_idem.worker.kafka_protocols import Partition
from tests.simulation.broker import HEARTBEAT, SESSION, Broker, Message
from tests.simulation.network import Channel, SilenceError
from tests.simulation.processes import PROCESS, Process

MOST_FAILURES: Final = 2
"""Maximum number of consecutive failing polls; after a third one the worker would look for damaged messages."""


class SimulatedConsumer:
    """A member of the group."""

    def __init__(self, broker: Broker) -> None:
        process = PROCESS.get()
        assert process is not None
        self.process: Process = process
        self._context = copy_context()
        self.name = process.name
        self.generation = -1
        """Generation of the current assignment."""
        self.assigned_generation = -1
        self.topics: frozenset[str] = frozenset()
        self._broker = broker
        self._channel = Channel()
        self._listener: Any = None
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._rejoin = asyncio.Event()
        self._first = asyncio.Event()
        """Set after the first assignment."""
        self._stable = asyncio.Event()
        self._arrived = asyncio.Event()
        self._coordination: asyncio.Task[None] | None = None
        self._in_listener = False
        self._closing = False
        self._failures = 0

    # Called by the group

    def notify(self, generation: int) -> None:
        """Learn with the next heartbeat of a rebalance or of its removal."""
        loop = asyncio.get_running_loop()

        def beat() -> None:
            if self.process.cut_off:
                loop.call_later(HEARTBEAT, beat)
            elif self.generation == generation:
                self._rejoin.set()

        # In the context of the process, so that a stalled process does not notice it.
        if self._coordination is not None and not self.process.dead:
            loop.call_later(self._broker.random.uniform(0, HEARTBEAT), beat, context=self._context)

    def wake(self) -> None:
        self._arrived.set()

    async def _coordinate(self) -> None:
        group = self._broker.group
        while not self._closed():
            try:
                generation, partitions = await group.join(self)
            except UnknownMemberIdError:
                await asyncio.sleep(HEARTBEAT)
                continue
            await asyncio.sleep(self._broker.random.uniform(0.001, 0.02))
            self.generation = generation
            self._positions = {at: group.committed.get(at, 0) for at in partitions}
            self._paused.clear()
            self._first.set()
            await self._notify_listener(self._listener.on_partitions_assigned(list(partitions)))
            if self._closed():
                return
            self._stable.set()
            if generation != self.assigned_generation or self not in group.members or group.preparing:
                self._rejoin.set()
            await self._rejoin.wait()
            self._rejoin.clear()
            self._stable.clear()
            await self._notify_listener(self._listener.on_partitions_revoked(list(self._positions)))

    def _closed(self) -> bool:
        return self._closing

    async def _notify_listener(self, listener: Any) -> None:
        self._in_listener = True
        try:
            await listener
        except Exception as error:  # noqa: BLE001  # as aiokafka does; the worker has noted it
            self._broker.history.violate("U", f"the listener raised {error!r}")
        finally:
            self._in_listener = False

    # Called by the worker

    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None:
        self._listener = listener
        self.topics = frozenset(topics)

    async def start(self) -> None:
        await asyncio.sleep(self._broker.random.uniform(0.01, 0.2))
        if self._broker.refusing:
            raise KafkaConnectionError("no broker")
        if not self.topics <= self._broker.topics:
            raise KafkaConnectionError("a topic does not exist")
        self._coordination = asyncio.get_running_loop().create_task(self._coordinate())
        await self._first.wait()

    async def stop(self) -> None:
        self._closing = True
        task, group = self._coordination, self._broker.group
        if task is None:
            return
        if not self._in_listener:
            task.cancel()
        await asyncio.wait({task})
        self._stable.clear()
        silent = self._broker.random.random() < self._broker.hold_ups
        # A member that does not leave properly is removed when its session expires.
        self._broker.network.later(SESSION if silent else 0.01, lambda: group.leave(self))
        if silent:
            await asyncio.get_running_loop().create_future()

    async def getmany(self, *only: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        if not self._stable.is_set():
            await self._stable.wait()
        self._arrived.clear()
        batches = self._fetch(only, max_records)
        if self._failures < MOST_FAILURES and self._broker.random.random() < self._broker.poll_failures:
            self._failures += 1
            self._broker.history.note("poll fails", *(f"{at.topic}-{at.partition}" for at in batches))
            raise RequestTimedOutError
        self._failures = 0
        if not batches:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._arrived.wait()
            except TimeoutError:
                return {}
            if not self._stable.is_set():
                await self._stable.wait()
            batches = self._fetch(only, max_records)
        await asyncio.sleep(0)
        return batches

    def _fetch(self, only: Sequence[Partition], most: int) -> dict[Partition, list[Message]]:
        batches: dict[Partition, list[Message]] = {}
        if self.process.cut_off:
            return batches
        for partition, position in self._positions.items():
            if most <= 0 or partition in self._paused or (only and partition not in only):
                continue
            taken = self._broker.logs[partition][position : position + self._broker.random.randint(1, most)]
            if taken:
                self._positions[partition] = taken[-1].offset + 1
            if messages := [message for message in taken if not message.is_marker]:
                batches[partition] = messages
                most -= len(messages)
        return batches

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        if not set(offsets) <= set(self._positions):
            self._broker.history.violate("C", f"{self.name} commits partitions that are not assigned to it")
            raise IllegalStateError("not assigned")
        broker, generation, committed = self._broker, self.generation, dict(offsets)
        fails = broker.random.random()
        if fails < broker.hold_ups or self.process.cut_off:
            await asyncio.get_running_loop().create_future()
        if fails < broker.hold_ups + broker.commit_failures:
            raise RequestTimedOutError
        try:
            await broker.network.ask(lambda: broker.group.commit(self, generation, committed), 1.0, self._channel)
        except SilenceError:
            raise RequestTimedOutError from None

    async def position(self, partition: Any) -> int:
        return self._positions[partition]

    def seek(self, partition: Any, offset: int) -> None:
        self._positions[partition] = offset

    def pause(self, *partitions: Any) -> None:
        self._paused.update(partitions)

    def resume(self, *partitions: Any) -> None:
        self._paused.difference_update(partitions)

    def assignment(self) -> set[Any]:
        return set(self._positions)

    def highwater(self, partition: Any) -> int | None:
        return len(self._broker.logs[partition])

    async def end_offsets(self, partitions: Sequence[Any]) -> Mapping[Any, int]:
        return {partition: len(self._broker.logs[partition]) for partition in partitions}
