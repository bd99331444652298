"""Consumer groups, as a Kafka coordinator manages them: members join, a leader assigns partitions, sessions time out.

This module contains only the state; `kafka_wire.py` implements the protocol.  Everything runs in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar
from uuid import uuid4

NO_ERROR = 0
ILLEGAL_GENERATION = 22
INCONSISTENT_PROTOCOL = 23
UNKNOWN_MEMBER = 25
REBALANCE_IN_PROGRESS = 27

_T = TypeVar("_T")

Protocols = Sequence[tuple[str, bytes]]


class GroupState(Enum):
    EMPTY = "empty"
    JOINING = "joining"
    """Waiting for every member to join the next generation."""
    SYNCING = "syncing"
    """Waiting for the leader's assignment."""
    STABLE = "stable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Response to a join.  Only the leader's response contains the members with their metadata."""

    error: int = NO_ERROR
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    member: str = ""
    members: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Response to a sync: the member's assignment."""

    error: int = NO_ERROR
    assignment: bytes = b""


@dataclass(slots=True, kw_only=True)
class _Member:
    name: str
    protocols: dict[str, bytes]
    session_seconds: float
    rebalance_seconds: float
    joining: asyncio.Future[Joined] | None = None
    syncing: asyncio.Future[Synced] | None = None
    assignment: bytes = b""
    silence: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Group:
    """A consumer group.  Times are those of the event loop."""

    name: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    leader: str = ""
    protocol: str = ""
    _members: dict[str, _Member] = field(default_factory=dict)
    _deadline: asyncio.TimerHandle | None = None

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    async def join(
        self, member: str, client: str, protocols: Protocols, *, session_seconds: float, rebalance_seconds: float
    ) -> Joined:
        """Join the next generation, and wait until it is complete.

        Args:
            member: The member id of an earlier response, or "" for a new member.
            client: Prefix of a new member id.
            protocols: Assignors with their metadata, best first.
            session_seconds: A member without a request for this long is removed.
            rebalance_seconds: How long to wait for the other members.
        """
        if member and member not in self._members:
            return Joined(error=UNKNOWN_MEMBER, member=member)
        if not self._has_common(protocols, but=member):
            return Joined(error=INCONSISTENT_PROTOCOL, member=member)
        known = self._members.get(member) or self._add(client)
        known.protocols = dict(protocols)
        known.session_seconds, known.rebalance_seconds = session_seconds, rebalance_seconds
        _answer(known.joining, Joined(error=REBALANCE_IN_PROGRESS, member=known.name))
        known.joining = asyncio.get_running_loop().create_future()
        _stop(known.silence)  # the session of a waiting member does not time out
        if self.state is not GroupState.JOINING:
            self._rebalance()
        waiting = known.joining
        self._finish_joining_if_all_are_here()
        return await waiting

    async def sync(self, member: str, generation: int, assignments: Sequence[tuple[str, bytes]]) -> Synced:
        """Send (leader) or request (other members) the assignment, and wait until the leader has sent it."""
        error = self.check(member, generation)
        if error:
            return Synced(error=error)
        known = self._members[member]
        if self.state is GroupState.STABLE:
            return Synced(assignment=known.assignment)
        if member == self.leader:
            self._assign(dict(assignments))
            return Synced(assignment=known.assignment)
        _answer(known.syncing, Synced(error=REBALANCE_IN_PROGRESS))
        known.syncing = asyncio.get_running_loop().create_future()
        return await known.syncing

    def check(self, member: str, generation: int) -> int:
        """Return the error code for a heartbeat or a commit of this member; 0 if it is valid."""
        known = self._members.get(member)
        if known is None:
            return UNKNOWN_MEMBER
        if generation != self.generation:
            return ILLEGAL_GENERATION
        self._heard(known)
        return REBALANCE_IN_PROGRESS if self.state is GroupState.JOINING else NO_ERROR

    def check_commit(self, member: str, generation: int) -> int:
        """Like `check`, but accept commits during a rebalance, and without a member while the group is empty."""
        if generation < 0 and not self._members:
            return NO_ERROR
        error = self.check(member, generation)
        if self.state is GroupState.SYNCING and not error:
            return REBALANCE_IN_PROGRESS
        return NO_ERROR if error == REBALANCE_IN_PROGRESS else error

    def leave(self, member: str) -> int:
        """Leave without waiting for the session to time out."""
        if member not in self._members:
            return UNKNOWN_MEMBER
        self._drop(member)
        return NO_ERROR

    def close(self) -> None:
        """Remove all members; waiting members are asked to rejoin."""
        _stop(self._deadline)
        for member in self._members.values():
            self._forget(member)
        self._members.clear()
        self.state = GroupState.EMPTY

    def _has_common(self, protocols: Protocols, *, but: str) -> bool:
        names = {name for name, _ in protocols}
        others = [set(member.protocols) for member in self._members.values() if member.name != but]
        return bool(names.intersection(*others))

    def _add(self, client: str) -> _Member:
        member = _Member(name=f"{client}-{uuid4()}", protocols={}, session_seconds=0, rebalance_seconds=0)
        self._members[member.name] = member
        return member

    def _drop(self, name: str) -> None:
        self._forget(self._members.pop(name))
        if self.state is not GroupState.JOINING:
            self._rebalance()
        self._finish_joining_if_all_are_here()

    def _forget(self, member: _Member) -> None:
        _stop(member.silence)
        _answer(member.joining, Joined(error=UNKNOWN_MEMBER, member=member.name))
        _answer(member.syncing, Synced(error=UNKNOWN_MEMBER))

    def _heard(self, member: _Member) -> None:
        _stop(member.silence)
        loop = asyncio.get_running_loop()
        member.silence = loop.call_later(member.session_seconds, self._drop, member.name)

    def _rebalance(self) -> None:
        self.state = GroupState.JOINING
        for member in self._members.values():
            _answer(member.syncing, Synced(error=REBALANCE_IN_PROGRESS))
            member.syncing = None
        patience = max((member.rebalance_seconds for member in self._members.values()), default=0)
        _stop(self._deadline)
        self._deadline = asyncio.get_running_loop().call_later(patience, self._finish_joining)

    def _finish_joining_if_all_are_here(self) -> None:
        if self.state is GroupState.JOINING and all(member.joining for member in self._members.values()):
            self._finish_joining()

    def _finish_joining(self) -> None:
        _stop(self._deadline)
        for late in [member for member in self._members.values() if member.joining is None]:
            self._forget(self._members.pop(late.name))
        self.generation += 1
        if not self._members:
            self.state, self.leader = GroupState.EMPTY, ""
            return
        self.state = GroupState.SYNCING
        if self.leader not in self._members:
            self.leader = next(iter(self._members))
        self.protocol = self._choose_protocol()
        for member in self._members.values():
            self._tell_joined(member)

    def _choose_protocol(self) -> str:
        offers = [set(member.protocols) for member in self._members.values()]
        common = set.intersection(*offers)
        return next(name for name in self._members[self.leader].protocols if name in common)

    def _tell_joined(self, member: _Member) -> None:
        everybody = tuple((other.name, other.protocols[self.protocol]) for other in self._members.values())
        member.assignment = b""
        answer = Joined(
            generation=self.generation,
            protocol=self.protocol,
            leader=self.leader,
            member=member.name,
            members=everybody if member.name == self.leader else (),
        )
        _answer(member.joining, answer)
        member.joining = None
        self._heard(member)

    def _assign(self, assignments: dict[str, bytes]) -> None:
        self.state = GroupState.STABLE
        for member in self._members.values():
            member.assignment = assignments.get(member.name, b"")
            _answer(member.syncing, Synced(assignment=member.assignment))
            member.syncing = None


class Groups:
    """All groups by name, created on first use."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __getitem__(self, name: str) -> Group:
        return self._groups.setdefault(name, Group(name))

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _answer(waiting: asyncio.Future[_T] | None, answer: _T) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(answer)
