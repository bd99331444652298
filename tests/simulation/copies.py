"""Copies in retry topics, as their logs show them, and the checks that concern them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from integr8s_idem.worker.dead_letters import RETRY_PREFIX
from integr8s_idem.worker.kafka_protocols import Partition
from tests.simulation.broker import Message
from tests.simulation.history import DELAYED, Run
from tests.simulation.overtaking import STRANGERS, Overtaking
from tests.simulation.processes import Process
from tests.simulation.workload import SCOPE

if TYPE_CHECKING:
    from tests.simulation.world import World

PROMPTLY: Final = 3.0
"""Seconds within which an event that is scheduled has a copy, if nothing else fails."""


class Place(NamedTuple):
    """The position of a message."""

    topic: str
    partition: int
    offset: int


class Copy(NamedTuple):
    """A copy in a retry topic."""

    place: Place
    origin: Place
    group: str
    handler: str
    event_id: str
    attempt: int

    @property
    def is_own(self) -> bool:
        """Whether a worker of the group has published it."""
        return self.group == SCOPE and not self.is_forged

    @property
    def is_forged(self) -> bool:
        return self.group == SCOPE and self.event_id.startswith("s")


def place_of(message: Message) -> Place:
    return Place(message.topic, message.partition, message.offset)


def copy_in(message: Message) -> Copy:
    """Return the copy that a message of a retry topic is."""
    headers = {name.removeprefix(RETRY_PREFIX): value.decode() for name, value in message.headers}
    origin = Place(headers["topic"], int(headers["partition"]), int(headers["offset"]))
    attempt = int(headers["attempt"])
    return Copy(place_of(message), origin, headers["group"], headers["handler"], headers["event_id"], attempt)


class Copies:
    """The copies of a run."""

    def __init__(self, world: World, overtaking: Overtaking) -> None:
        self._world = world
        self._overtaking = overtaking
        self._by_key: defaultdict[str, list[Copy]] = defaultdict(list)
        self.quiet = overtaking.quiet
        """Whether nothing but the handlers fails from now on."""

    def add(self, message: Message) -> None:
        copy = copy_in(message)
        if copy.is_own:
            self._by_key[self._world.key_of(copy.handler, copy.origin.topic, copy.event_id)].append(copy)
            self._world.history.counts["copies"] += 1

    def waits(self, key: str, origin: Place) -> bool:
        """Return whether a copy of this message waits in a retry topic: its offset is not committed."""
        return any(copy.origin == origin for copy in self._unread(key))

    def _unread(self, key: str) -> list[Copy]:
        committed = self._world.broker.group.committed
        return [
            copy
            for copy in self._by_key[key]
            if copy.place.offset >= committed.get(Partition(copy.place.topic, copy.place.partition), 0)
        ]

    # Checks

    def check_run(self, run: Run, number: int) -> None:
        """Check G and H: copies of others are ignored, and the attempt of a copy counts if its record has vanished."""
        history = self._world.history
        if number >= STRANGERS:
            history.violate("G", f"{run.work} runs, though its copy is not one of this group")
            return
        if history.counts["stalls"] or history.counts["partitions"] or self._world.is_unread(run.key):
            return  # the run may be that of a delivery which another worker has settled, or of the event itself
        attempts = [copy.attempt for copy in self._unread(run.key)]
        if attempts and run.attempt <= min(attempts):
            history.violate("H", f"{run.work} runs with attempt {run.attempt}, though {min(attempts)} have failed")

    def note_schedule(self, process: Process, key: str) -> None:
        """Check W later: an event that is scheduled is copied, and does not hold up its partition."""
        if not self.quiet:
            return
        made, moved = len(self._by_key[key]), self._world.moves()
        world, workers = self._world, [worker for worker in self._world.workers if worker.process is process]

        def check() -> None:
            can_copy = all(not (worker.ended or worker.is_stopping or worker.lacks_topics()) for worker in workers)
            if len(self._by_key[key]) == made and world.moves() == moved and process.running and can_copy:
                world.history.violate("W", f"{key} is scheduled, and is not copied within {PROMPTLY:g} s")

        world.store_network.later(PROMPTLY, check)

    def judge(self) -> None:
        """Check M: the number of attempts is bounded, also if records vanish and workers die."""
        history, most = self._world.history, self._world.setup.config.max_attempts
        faults = sum(what == "fault" for _, _, what, *_ in history.trace) + history.counts["deadly"]
        for key, runs in history.truth.runs.items():
            failed = sum(run.ended_with in DELAYED for run in runs)
            if failed > most * (1 + history.truth.losses[key]) + faults:
                history.violate("M", f"{key} has failed {failed} times; maximum: {most}")
