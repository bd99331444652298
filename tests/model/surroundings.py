"""The environment of the deliveries: the broker, the store's clock, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from tests.model.delivery import TOKENS_OF_A_TASK, Deliveries, Here, put, with_key, with_record
from tests.model.protocol import Protocol
from tests.model.rules import judge_commit, owns
from tests.model.state import IDLE, Lease, Moves, Partition, Phase, Setup, State, Step

HANDED_OVER = frozenset(Phase) - {Phase.IDLE, Phase.ASKING}
NOBODY = -1


class Actor(NamedTuple):
    """An actor that can make steps, and the parts of a state that it reads and changes."""

    steps: Callable[[State], Moves]
    worker: int | None = None
    key: int | None = None
    """At most one of each. The other fields of a state are always included."""


class Machine:
    """The possible steps from each state."""

    def __init__(self, setup: Setup, protocol: Protocol) -> None:
        self.setup = setup
        self.protocol = protocol
        self.messages = setup.messages
        self.deliveries = Deliveries(setup, protocol)
        self._of_partition = [
            tuple(number for number, message in enumerate(self.messages) if message.partition == partition)
            for partition in range(len(setup.partitions))
        ]
        self.actors = tuple(self._actors())

    def _actors(self) -> Iterator[Actor]:
        for worker in range(self.setup.workers):
            for message, (_, _, key) in enumerate(self.messages):
                yield Actor(partial(self._delivery, worker, message), worker, key)
            yield Actor(partial(self._worker, worker), worker)
        for key in range(len(self.setup.start().keys)):
            yield Actor(partial(self._store, key), key=key)

    def steps(self, state: State) -> Moves:
        return chain.from_iterable(actor.steps(state) for actor in self.actors)

    def all_settled(self, partitions: tuple[Partition, ...]) -> bool:
        """Return whether all offsets are at the end of their partitions."""
        return all(
            partition.committed == len(keys) for partition, keys in zip(partitions, self.setup.partitions, strict=True)
        )

    # A delivery in a worker

    def _delivery(self, worker: int, message: int, state: State) -> Moves:
        partition, offset, _ = self.messages[message]
        here = self._here(state, worker, message)
        if state.partitions[partition].owner != worker:
            if here.task.phase in (Phase.ASKING, Phase.DEAD_LETTERING):
                # Waiting deliveries are dropped when their partition is revoked.
                yield Step("is dropped", worker, message, here.key), put(here, state, IDLE)
        elif here.task.phase is Phase.IDLE and offset >= state.partitions[partition].committed:
            # In any order, which includes the orders that lanes allow.
            yield Step("is delivered", worker, message, here.key), self.deliveries.delivered(here)
        yield from self.deliveries.steps(here)
        yield from self._lease(here)

    def _lease(self, here: Here) -> Moves:
        """The lease ends: by itself if no live worker renews it, otherwise by a stall of its holder."""
        state, record = here.state, here.record
        if record is None or record.lease is not Lease.LIVE or not self._made(here, record.token):
            return
        ended = record._replace(lease=Lease.ENDED) if self.protocol.record_outlives_its_lease else None
        after = with_record(state, here.key, ended)
        if not owns(here.task.held, record):
            yield Step("lease ends", key=here.key), after
        elif state.faults.stalls:
            faults = state.faults._replace(stalls=state.faults.stalls - 1)
            yield (
                Step("lease ends while its holder stalls", key=here.key, is_fault=True),
                after._replace(faults=faults),
            )

    def _made(self, here: Here, token: int) -> bool:
        """Return whether this delivery created the token."""
        return (token - 1) // TOKENS_OF_A_TASK == here.worker * len(self.messages) + here.message

    # A worker: assignment and revocation of partitions, and its crash

    def _worker(self, worker: int, state: State) -> Moves:
        tasks = state.workers[worker]
        for number, partition in enumerate(state.partitions):
            if partition.owner == worker:
                yield from self._owning(worker, state, number)
            elif partition.owner == NOBODY and self._may_have(worker, state, number):
                after = _with_partition(state, number, partition._replace(owner=worker))
                yield Step(f"is given partition {number}", worker), after
            if partition.owner != worker and not self.protocol.only_the_present_epoch_commits:
                yield from self._late_commit(worker, state, number)
        if state.faults.crashes and any(task.phase is not Phase.IDLE for task in tasks):
            yield Step("crashes", worker, is_fault=True), self._crashed(worker, state)

    def _owning(self, worker: int, state: State, number: int) -> Moves:
        offset = self._watermark(state, number)
        if offset > state.partitions[number].committed:
            yield Step("commits its offset", worker), self._committed(state, number, offset)
        if state.faults.moves:
            yield Step(f"loses partition {number}", worker, is_fault=True), self._moved(state, number)

    def _may_have(self, worker: int, state: State, number: int) -> bool:
        # In the model, a worker with unfinished deliveries of the partition cannot be its next owner.
        unread = state.partitions[number].committed < len(self.setup.partitions[number])
        return unread and all(state.workers[worker][message] == IDLE for message in self._of_partition[number])

    def _watermark(self, state: State, number: int) -> int:
        """Return the first unfinished offset."""
        partition = state.partitions[number]
        tasks, offset = state.workers[partition.owner], partition.committed
        for message in self._of_partition[number][offset:]:
            if self._finished(tasks[message].phase):
                offset = self.messages[message].offset + 1
            elif self.protocol.offset_stops_at_the_first_unfinished:
                break
        return offset

    def _finished(self, phase: Phase) -> bool:
        return (
            phase is Phase.SETTLED
            or (phase in HANDED_OVER and not self.protocol.offset_waits_for_completion)
            or (phase is Phase.DEAD_LETTERING and not self.protocol.offset_waits_for_the_dead_letter)
        )

    def _committed(self, state: State, number: int, offset: int) -> State:
        before, messages = state.partitions[number], self._of_partition[number]
        settled = [state.dead_letters[message] or state.done[self.messages[message].key] for message in messages]
        broken = judge_commit(before.committed, offset, settled)
        after = _with_partition(state, number, before._replace(committed=offset))._replace(broken=broken)
        # Forget the deliveries before the offset.
        return self._forget_settled(after, before.owner, messages[:offset])

    def _late_commit(self, worker: int, state: State, number: int) -> Moves:
        """Commit the offset of an old assignment; only if commits do not check the epoch."""
        first, before = self._of_partition[number][0], state.partitions[number]
        if state.workers[worker][first].phase is Phase.SETTLED:
            after = _with_partition(state, number, before._replace(committed=1))
            after = self._forget_settled(after, worker, (first,))
            broken = judge_commit(before.committed, 1, [True])
            yield Step("commits late", worker, first), after._replace(broken=broken)

    def _forget_settled(self, state: State, worker: int, messages: Sequence[int]) -> State:
        for message in messages:
            if state.workers[worker][message].phase is Phase.SETTLED:
                state = put(self._here(state, worker, message), state, IDLE)
        return state

    # Faults, within the limits of the setup

    def _crashed(self, worker: int, state: State) -> State:
        """Replace a crashed worker by a new process."""
        partitions = tuple(
            partition._replace(owner=NOBODY) if partition.owner == worker else partition
            for partition in state.partitions
        )
        idle = (IDLE,) * len(self.messages)
        workers = (*state.workers[:worker], idle, *state.workers[worker + 1 :])
        faults = state.faults._replace(crashes=state.faults.crashes - 1)
        return state._replace(workers=workers, partitions=partitions, faults=faults)

    def _moved(self, state: State, number: int) -> State:
        """Revoke a partition by a rebalance or an expired session; the worker may not know."""
        partition = state.partitions[number]
        after = _with_partition(state, number, partition._replace(owner=NOBODY))
        after = after._replace(faults=state.faults._replace(moves=state.faults.moves - 1))
        if self.protocol.only_the_present_epoch_commits:
            after = self._forget_settled(after, partition.owner, self._of_partition[number])
        return after

    def _store(self, index: int, state: State) -> Moves:
        """Yield calls that arrive late, the end of a delay, and the loss of a record."""
        for place, request in enumerate(state.network):
            if request.key == index:
                network = state.network[:place] + state.network[place + 1 :]
                after, answer = self.deliveries.executed(state._replace(network=network), request)
                yield Step(f"late call to {request.verb.value} arrives: {answer.value}", key=index), after
        key = state.keys[index]
        if key.record is not None and key.record.lease is Lease.SCHEDULED:
            yield Step("is due", key=index), with_record(state, index, key.record._replace(lease=Lease.DUE))
        if state.faults.lost_records and key.record is not None:
            faults = state.faults._replace(lost_records=state.faults.lost_records - 1)
            forgotten = key._replace(record=None, begun=False, forgotten=key.forgotten + 1)
            after = with_key(state, index, forgotten)._replace(faults=faults)
            yield Step("record is lost", key=index, is_fault=True), after

    def _here(self, state: State, worker: int, message: int) -> Here:
        return Here(state, worker, message, state.workers[worker][message], self.messages[message].key)


def _with_partition(state: State, number: int, partition: Partition) -> State:
    return state._replace(partitions=(*state.partitions[:number], partition, *state.partitions[number + 1 :]))
