"""A broker with one topic's worth of everything: logs, a consumer group with eager rebalances, offsets."""

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

SESSION: Final = 3.0
"""Seconds of silence after which a member is out."""

REBALANCE: Final = 3.0
"""Seconds that a rebalance waits for its members."""

HEARTBEAT: Final = 0.5
"""Seconds after which a member knows at the latest that there is a rebalance, or that it is out."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    timestamp: int = 1_893_456_000_000
    is_marker: bool = False
    """It takes an offset, and no consumer ever sees it: the marker of a transaction, or an aborted message."""


class Broker:
    """Logs by partition."""

    def __init__(self, history: History, random: Random, network: Network, topics: Sequence[str], partitions: int):
        self.logs: dict[Partition, list[Message]] = {
            Partition(topic, number): [] for topic in topics for number in range(partitions)
        }
        self.letters: list[Message] = []
        self.transactions: Callable[[], int] = lambda: 0
        """How many markers follow a message."""
        self.refusing = False
        """It takes no messages."""
        self.poll_failures = 0.0
        """Share of polls that fail, losing what they have taken."""
        self.commit_failures = 0.0
        self.hold_ups = 0.0
        """Share of commits and stops that get no answer."""
        self.history = history
        self.random = random
        self.network = network
        self.group = Group(self)
        self._partitions = partitions

    def append(self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> None:
        """Take a message; dead letters go where nobody consumes them."""
        if topic.endswith(".dlq"):
            self.letters.append(Message(topic, 0, len(self.letters), key, value, headers))
            self.history.dead_letter(headers)
            return
        number = zlib.crc32(key) % self._partitions if key is not None else 0
        log = self.logs[Partition(topic, number)]
        log.append(Message(topic, number, len(log), key, value, tuple(headers)))
        self.history.note("message", topic, number, len(log) - 1)
        for _ in range(self.transactions()):
            log.append(Message(topic, number, len(log), None, None, is_marker=True))
        for member in self.group.members:
            member.wake()


@dataclass(slots=True)
class Group:
    """A consumer group as its coordinator sees it."""

    broker: Broker
    members: dict[SimulatedConsumer, asyncio.Future[tuple[int, list[Partition]]] | None] = field(default_factory=dict)
    """Each with what it waits for, while it joins."""
    generation: int = 0
    committed: dict[Partition, int] = field(default_factory=dict)
    preparing: bool = False
    rewind: int = 0
    """By how much the next rebalance finds the offsets set back."""
    check: Callable[[Partition, int, int], None] = lambda partition, known, offset: None
    """Told of every commit: from where to where."""

    def join(self, member: SimulatedConsumer) -> asyncio.Future[tuple[int, list[Partition]]]:
        """Ask for a part; the answer comes when everybody has asked, or has waited too long."""
        place: asyncio.Future[tuple[int, list[Partition]]] = asyncio.get_running_loop().create_future()
        self.members[member] = place
        self.begin_rebalance()
        self._complete_if_all_are_there()
        return place

    def leave(self, member: SimulatedConsumer) -> None:
        """It is out: it said so, or was silent for too long."""
        if member not in self.members:
            return
        self.broker.history.note("out", member.name)
        place = self.members.pop(member)
        if place is not None and not place.done():
            place.set_exception(UnknownMemberIdError())
        member.told_of(member.generation)
        if self.preparing:
            self._complete_if_all_are_there()
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
                member.told_of(member.generation)
        awaited = self.generation
        self.broker.network.later(REBALANCE, lambda: self._give_up_waiting(awaited))
        self._complete_if_all_are_there()

    def _give_up_waiting(self, awaited: int) -> None:
        if self.preparing and self.generation == awaited:
            for member in [member for member, place in self.members.items() if place is None]:
                self.broker.history.note("out", member.name)
                del self.members[member]
                member.told_of(member.generation)
            self._complete_if_all_are_there()

    def _complete_if_all_are_there(self) -> None:
        if not self.preparing or any(place is None for place in self.members.values()):
            return
        self.preparing = False
        self.generation += 1
        self._set_back()
        members = list(self.members)
        self.broker.random.shuffle(members)
        parts: dict[SimulatedConsumer, list[Partition]] = {member: [] for member in members}
        for number, partition in enumerate(self.broker.logs):
            if members:
                parts[members[number % len(members)]].append(partition)
        for member, part in parts.items():
            self.broker.history.note("part", member.name, *(f"{at.topic}-{at.partition}" for at in part))
            place = self.members[member]
            self.members[member] = None
            member.assigned_generation = self.generation
            if place is not None and not place.done():
                place.set_result((self.generation, part))

    def _set_back(self) -> None:
        if not self.rewind:
            return
        for partition, offset in self.committed.items():
            self.committed[partition] = max(0, offset - self.rewind)
            self.broker.history.note("rewound", partition.topic, partition.partition, self.committed[partition])
        self.rewind = 0

    def commit(self, member: SimulatedConsumer, generation: int, offsets: Mapping[Partition, int]) -> None:
        """Take offsets.

        Raises:
            CommitFailedError: From somebody who is not a member any more, or of an earlier generation.
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
