"""A simulated broker: logs, offsets, and a consumer group with eager rebalances."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from aiokafka.errors import CommitFailedError, UnknownMemberIdError

from integr8s_idem.worker.kafka_protocols import Partition
from tests.simulation.history import History
from tests.simulation.network import Network

if TYPE_CHECKING:
    from tests.simulation.consumer import SimulatedConsumer
    from tests.simulation.processes import Process

SESSION: Final = 3.0
"""Seconds without a heartbeat after which a member is removed."""

REBALANCE: Final = 3.0
"""Seconds that a rebalance waits for members to join."""

HEARTBEAT: Final = 0.5
"""Maximum seconds until a member learns of a rebalance or of its removal."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    timestamp: int = 1_893_456_000_000
    is_marker: bool = False
    """Whether the message occupies an offset that no consumer sees: a transaction marker or an aborted message."""


class Broker:
    """The logs by partition, and the consumer group."""

    def __init__(self, history: History, random: Random, network: Network, topics: Sequence[str], partitions: int):
        self.logs: dict[Partition, list[Message]] = {
            Partition(topic, number): [] for topic in topics for number in range(partitions)
        }
        self.topics = set(topics)
        self.dead_letters: list[Message] = []
        self.transactions: Callable[[], int] = lambda: 0
        """Returns the number of markers after a message."""
        self.refusing = False
        """Whether the broker rejects messages."""
        self.poll_failures = 0.0
        """Probability that a poll fails and loses its messages."""
        self.commit_failures = 0.0
        self.hold_ups = 0.0
        """Probability that a commit or stop gets no answer."""
        self.history = history
        self.random = random
        self.network = network
        self.group = Group(self)
        self.on_copy: Callable[[Message], None] = lambda message: None
        """Called with each message that is appended to a retry topic."""
        self.when_copied: Callable[[Process], None] | None = None
        """Called with the process of the next copy, before its broker confirms it."""
        self._partitions = partitions

    def create(self, topic: str) -> None:
        """Create a topic; members read it when they have subscribed to it."""
        self.topics.add(topic)
        self.logs.update({Partition(topic, number): [] for number in range(self._partitions)})

    def append(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Message:
        """Append a message and return it; dead letters go to a list that nobody consumes."""
        if topic.endswith(".dlq"):
            self.dead_letters.append(Message(topic, 0, len(self.dead_letters), key, value, headers))
            self.history.dead_letter(headers)
            return self.dead_letters[-1]
        number = zlib.crc32(key) % self._partitions if key is not None else 0
        log = self.logs[Partition(topic, number)]
        appended = Message(topic, number, len(log), key, value, tuple(headers))
        log.append(appended)
        if ".retry." in topic:
            self.on_copy(appended)
        self.history.note("message", topic, number, len(log) - 1)
        for _ in range(self.transactions()):
            log.append(Message(topic, number, len(log), None, None, is_marker=True))
        for member in self.group.members:
            member.wake()
        return appended


@dataclass(slots=True)
class Group:
    """The consumer group in the view of its coordinator."""

    broker: Broker
    members: dict[SimulatedConsumer, asyncio.Future[tuple[int, list[Partition]]] | None] = field(default_factory=dict)
    """Members, each with the future of its assignment while it joins."""
    generation: int = 0
    committed: dict[Partition, int] = field(default_factory=dict)
    preparing: bool = False
    rewind: int = 0
    """Number of messages by which the next rebalance rewinds the offsets."""
    check: Callable[[Partition, int, int], None] = lambda partition, known, offset: None
    """Called for every commit with the old and the new offset."""

    def join(self, member: SimulatedConsumer) -> asyncio.Future[tuple[int, list[Partition]]]:
        """Join the group; the answer comes when all members have joined or the rebalance timed out."""
        place: asyncio.Future[tuple[int, list[Partition]]] = asyncio.get_running_loop().create_future()
        self.members[member] = place
        self.begin_rebalance()
        self._complete_if_all_joined()
        return place

    def leave(self, member: SimulatedConsumer) -> None:
        """Remove a member that left or timed out."""
        if member not in self.members:
            return
        self.broker.history.note("out", member.name)
        place = self.members.pop(member)
        if place is not None and not place.done():
            place.set_exception(UnknownMemberIdError())
        member.notify(member.generation)
        if self.preparing:
            self._complete_if_all_joined()
        else:
            self.begin_rebalance()

    def begin_rebalance(self) -> None:
        if self.preparing:
            return
        self.preparing = True
        self.broker.history.counts["rebalances"] += 1
        self.broker.history.note("rebalance")
        for member, place in self.members.items():
            if place is None:
                member.notify(member.generation)
        awaited = self.generation
        self.broker.network.later(REBALANCE, lambda: self._give_up_waiting(awaited))
        self._complete_if_all_joined()

    def _give_up_waiting(self, awaited: int) -> None:
        if self.preparing and self.generation == awaited:
            for member in [member for member, place in self.members.items() if place is None]:
                self.broker.history.note("out", member.name)
                del self.members[member]
                member.notify(member.generation)
            self._complete_if_all_joined()

    def _complete_if_all_joined(self) -> None:
        if not self.preparing or any(place is None for place in self.members.values()):
            return
        self.preparing = False
        self.generation += 1
        self.broker.history.counts["assignments"] += 1
        self._rewind_offsets()
        members = list(self.members)
        self.broker.random.shuffle(members)
        parts: dict[SimulatedConsumer, list[Partition]] = {member: [] for member in members}
        for number, partition in enumerate(self.broker.logs):
            if readers := [member for member in members if partition.topic in member.topics]:
                parts[readers[number % len(readers)]].append(partition)
        for member, part in parts.items():
            self.broker.history.note("part", member.name, *(f"{at.topic}-{at.partition}" for at in part))
            place = self.members[member]
            self.members[member] = None
            member.assigned_generation = self.generation
            if place is not None and not place.done():
                place.set_result((self.generation, part))

    def _rewind_offsets(self) -> None:
        if not self.rewind:
            return
        for partition, offset in self.committed.items():
            self.committed[partition] = max(0, offset - self.rewind)
            self.broker.history.note("rewound", partition.topic, partition.partition, self.committed[partition])
        self.rewind = 0

    def commit(self, member: SimulatedConsumer, generation: int, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets.

        Raises:
            CommitFailedError: The member was removed, or is of an earlier generation.
        """
        if member not in self.members or generation != self.generation:
            self.broker.history.note("commit refused", member.name)
            raise CommitFailedError(f"generation {generation} of {self.generation}")
        for partition, offset in offsets.items():
            known = self.committed.get(partition, 0)
            self.broker.history.note("commit", member.name, partition.topic, partition.partition, offset)
            if offset < known:
                self.broker.history.violate("C", f"the offset of {partition} goes back from {known} to {offset}")
            self.committed[partition] = offset
            self.broker.history.counts["commits"] += 1
            self.check(partition, known, offset)
