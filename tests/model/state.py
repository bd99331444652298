"""What there is at one moment.  Plain tuples: two states are the same if all of this is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from integr8s_idem.records import IdempotencyStatus, Previous


class Lease(str, Enum):
    """How a reservation stands by the store's clock.  How long it lasts does not matter, only whether it does."""

    LIVE = "live"
    ENDED = "ended"
    RELEASED = "released"
    NONE = "settled"


class Record(NamedTuple):
    """What the store holds for one key."""

    status: IdempotencyStatus
    attempt: int
    fence: int
    token: int
    """0 once it is settled: terminal records keep no token."""
    lease: Lease
    previous: Previous


class Key(NamedTuple):
    """One key: its record, and what really happened, which nobody in the model can see."""

    record: Record | None = None
    clock: int = 0
    """The highest fence given so far: the store's clock, which outlives every record."""
    begun: bool = False
    """A handler has begun under the reservation that the record holds."""
    unaware: int = 0
    """Effects of runs that took themselves for the first."""
    forgotten: int = 0
    """How often the store has lost its record."""
    sink: int = 0
    """The highest fence that has reached the fenced sink; 0 before the first effect."""


class Held(NamedTuple):
    """The reservation that a worker believes to have."""

    token: int
    fence: int
    attempt: int


class Run(NamedTuple):
    """What a handler was told when it began."""

    fence: int
    first: bool
    """Its attempt is 1."""


class Phase(str, Enum):
    """How far a worker is with one delivery."""

    IDLE = "idle"
    ASKING = "asking"
    ABOUT_TO_TAKE = "about to take"
    """Has read the record and will write it.  Only where reserving is not one step."""
    RESERVED = "reserved"
    """Waits for its turn: the process may stand still here, and the lease end."""
    RUNNING = "running"
    EFFECT_DONE = "effect done"
    COMPLETING = "completing"
    COMPLETING_ANEW = "completing anew"
    """The store did not know our token any more: ask for the key again."""
    RELEASING = "releasing"
    FAILING = "failing"
    FAILING_ANEW = "failing anew"
    DEAD_LETTERING = "dead-lettering"
    FAILING_AFTER_LETTER = "failing after letter"
    """Only where the dead letter comes first."""
    SETTLED = "settled"


class Task(NamedTuple):
    """One delivery on its way through one worker."""

    phase: Phase = Phase.IDLE
    token: int = 0
    """For the next reserve; kept until that has an answer."""
    held: Held | None = None
    run: Run | None = None
    """While the handler runs and has not had its effect."""


IDLE = Task()
SETTLED = Task(Phase.SETTLED)

Worker: TypeAlias = tuple[Task, ...]
"""By message."""


class Partition(NamedTuple):
    """One partition as the broker sees it."""

    owner: int = -1
    """The worker that has it; -1 for nobody."""
    committed: int = 0
    """Offset: all messages before it are settled, says the group."""


class Verb(str, Enum):
    """A call of the store."""

    RESERVE = "reserve"
    RENEW = "renew"
    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"


class Request(NamedTuple):
    """A call on its way to the store."""

    verb: Verb
    key: int
    token: int
    fence: int = 0
    worker: int = 0


class Faults(NamedTuple):
    """How many of each kind may still happen."""

    crashes: int = 0
    """A worker dies, at any step.  It comes back as a new process that knows nothing."""
    moves: int = 0
    """A partition is taken from its owner, which may learn of it late or never."""
    stalls: int = 0
    """A lease ends under a worker that is alive: a zombie."""
    unanswered: int = 0
    """The store executes a call and its answer is lost; or renewals are lost until the worker stops itself."""
    late: int = 0
    """A call is given up by its caller and reaches the store at any later time, or never."""
    lost_records: int = 0
    """The store forgets a record: eviction, flush, failover, end of its ttl."""
    failures: int = 0
    """A handler raises, before or after its effect, for now or for good."""


class Rule(str, Enum):
    """What must never happen."""

    LOST = "an offset has moved over a message that is neither completed nor dead-lettered"
    REWOUND = "the group's offset has moved back"
    TWO_LEASES = "a key was given away under a live lease"
    STALE_WRITE = "a record was changed by somebody who does not own it"
    OUTCOME_OVERWRITTEN = "a settled record was overwritten"
    WAITS_FOR_ITSELF = "a worker waits for a reservation of its own"
    TWO_RUNS_OF_ONE_RESERVATION = "a run was begun under a reservation that had a run already"
    LATE_START = "a handler was begun on a lease that had ended"
    SILENT_REPEAT = "an effect was repeated by a run that took itself for the first"
    OWNER_TURNED_AWAY = "the fenced sink refused the owner of the key"
    RUN_AFTER_DEAD_LETTER = "a message was handled after it had been dead-lettered"
    STUCK = "a message can never be settled, even without further faults"


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    keys: tuple[Key, ...]
    partitions: tuple[Partition, ...]
    done: tuple[bool, ...]
    """By key: a completion was recorded, now or earlier."""
    letters: tuple[bool, ...]
    """By message: it is in the dead-letter topic."""
    faults: Faults
    network: tuple[Request, ...] = ()
    """Calls that their callers have given up and that may still arrive."""
    broken: Rule | None = None
    """The rule that the last step broke."""


class Step(NamedTuple):
    """What leads from one state to the next."""

    what: str
    worker: int = -1
    message: int = -1
    key: int = -1
    is_fault: bool = False


Move: TypeAlias = tuple[Step, State]
Moves: TypeAlias = Iterator[Move]


class Message(NamedTuple):
    """One message of the log."""

    partition: int
    offset: int
    key: int


@dataclass(frozen=True, slots=True)
class Setup:
    """How large the world is and what may go wrong in it."""

    workers: int
    partitions: tuple[tuple[int, ...], ...]
    """For each partition the keys of its messages, by offset; a key that stands twice is a duplicate."""
    faults: Faults
    max_attempts: int = 2

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(
            Message(partition, offset, key)
            for partition, keys in enumerate(self.partitions)
            for offset, key in enumerate(keys)
        )

    def start(self) -> State:
        """Nobody has anything yet."""
        messages = self.messages
        keys = 1 + max(message.key for message in messages)
        return State(
            workers=((IDLE,) * len(messages),) * self.workers,
            keys=(Key(),) * keys,
            partitions=(Partition(),) * len(self.partitions),
            done=(False,) * keys,
            letters=(False,) * len(messages),
            faults=self.faults,
        )

    def __str__(self) -> str:
        logs = " | ".join("".join("abcdefgh"[key] for key in keys) for keys in self.partitions)
        faults = ", ".join(f"{n} {name}" for name, n in self.faults._asdict().items() if n)
        return f"{self.workers} workers, log {logs}, {self.max_attempts} attempts, {faults or 'no faults'}"
