"""The state of the model as plain tuples, so that equal states compare equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from integr8s_idem.records import IdempotencyStatus, Previous


class Lease(str, Enum):
    """The lease of a reservation by the store's clock; only whether it holds matters, not for how long."""

    LIVE = "live"
    ENDED = "ended"
    RELEASED = "released"
    SCHEDULED = "scheduled"
    """Released with a delay: nobody may reserve the key before it is due."""
    DUE = "due"
    """Was scheduled, and the delay has passed."""
    NONE = "settled"


class Record(NamedTuple):
    """The record of a key in the store."""

    status: IdempotencyStatus
    attempt: int
    fence: int
    token: int
    """0 for settled and scheduled records, which belong to nobody."""
    lease: Lease
    previous: Previous


class Key(NamedTuple):
    """A key: its record, and the facts about it, which workers and the store cannot see."""

    record: Record | None = None
    clock: int = 0
    """The highest fence so far; it stands for the store's clock, which outlives every record."""
    begun: bool = False
    """Whether a handler has started with the reservation in the record."""
    unaware: int = 0
    """Number of effects of runs with attempt 1."""
    forgotten: int = 0
    """How often the store has lost the record."""
    sink: int = 0
    """The highest fence in the fenced sink; 0 before the first effect."""


class Held(NamedTuple):
    """The reservation that a worker believes it holds."""

    token: int
    fence: int
    attempt: int


class Run(NamedTuple):
    """The attempt and fence of a handler."""

    fence: int
    first: bool
    """Whether its attempt is 1."""


class Phase(str, Enum):
    """The progress of a worker on a delivery."""

    IDLE = "idle"
    ASKING = "asking"
    ABOUT_TO_TAKE = "about to take over"
    """Has read the record and will write it; only if reserving is not one step."""
    RESERVED = "reserved"
    """Waits for its turn; the process may stall here until the lease ends."""
    RUNNING = "running"
    EFFECT_DONE = "effect done"
    COMPLETING = "completing"
    COMPLETING_AGAIN = "completing again"
    """The store rejected the token: reserve the key again."""
    RELEASING = "releasing"
    SCHEDULING = "scheduling"
    FAILING = "failing"
    FAILING_AGAIN = "failing again"
    DEAD_LETTERING = "dead-lettering"
    FAILING_AFTER_DEAD_LETTER = "failing after dead letter"
    """Only if the dead letter is sent first."""
    SETTLED = "settled"


class Task(NamedTuple):
    """A delivery in a worker."""

    phase: Phase = Phase.IDLE
    token: int = 0
    """Token for the next reserve, kept until that is answered."""
    held: Held | None = None
    run: Run | None = None
    """Set while the handler runs before its effect."""


IDLE = Task()
SETTLED = Task(Phase.SETTLED)

Worker: TypeAlias = tuple[Task, ...]
"""By message."""


class Partition(NamedTuple):
    """A partition in the view of the broker."""

    owner: int = -1
    """The worker that owns it; -1 for none."""
    committed: int = 0
    """The committed offset."""


class Verb(str, Enum):
    """A store call."""

    RESERVE = "reserve"
    RENEW = "renew"
    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"
    SCHEDULE = "schedule"
    """Release with a delay."""


class Request(NamedTuple):
    """A call on its way to the store."""

    verb: Verb
    key: int
    token: int
    fence: int = 0
    worker: int = 0


class Faults(NamedTuple):
    """The number of remaining faults of each kind."""

    crashes: int = 0
    """A worker dies at any step, and is replaced by a new process."""
    moves: int = 0
    """A partition is revoked from its owner, which may learn of it late or never."""
    stalls: int = 0
    """The lease of a live worker ends, so that it becomes a zombie."""
    unanswered: int = 0
    """The answer to an executed call is lost, or renewals are lost until the worker cancels the run."""
    late: int = 0
    """A call that its caller has given up reaches the store at any later time, or never."""
    lost_records: int = 0
    """The store loses a record: eviction, flush, failover, end of its ttl."""
    failures: int = 0
    """A handler raises a transient or permanent error, before or after its effect."""


class Rule(str, Enum):
    """The rules, by what breaks them."""

    LOST = "an offset has moved over a message that is neither completed nor dead-lettered"
    REWOUND = "the group's offset has moved back"
    TWO_LEASES = "a key with a live lease was reserved again"
    STALE_WRITE = "a record was changed by a worker that does not own it"
    OUTCOME_OVERWRITTEN = "a settled record was overwritten"
    EARLY = "a scheduled key was reserved before it was due"
    COUNTED_AS_A_CRASH = "the takeover of a scheduled key counts as one after a crash"
    WAITS_FOR_ITSELF = "a worker waits for its own reservation"
    TWO_RUNS_OF_ONE_RESERVATION = "a second run was started with a reservation"
    LATE_START = "a handler was started after its lease had ended"
    SILENT_REPEAT = "an effect was repeated by a run with attempt 1"
    OWNER_TURNED_AWAY = "the fenced sink rejected the owner of the key"
    RUN_AFTER_DEAD_LETTER = "a message was handled after it had been dead-lettered"
    STUCK = "a message can never be settled, even without further faults"


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    keys: tuple[Key, ...]
    partitions: tuple[Partition, ...]
    done: tuple[bool, ...]
    """By key: whether a completion was ever recorded."""
    dead_letters: tuple[bool, ...]
    """By message: whether it is in the dead-letter topic."""
    faults: Faults
    network: tuple[Request, ...] = ()
    """Calls that their callers have given up, and that may still arrive."""
    broken: Rule | None = None
    """The rule that the last step broke."""


class Step(NamedTuple):
    """A step from one state to the next."""

    what: str
    worker: int = -1
    message: int = -1
    key: int = -1
    is_fault: bool = False


Move: TypeAlias = tuple[Step, State]
Moves: TypeAlias = Iterator[Move]


class Message(NamedTuple):
    """A message in the log."""

    partition: int
    offset: int
    key: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The size of the model and its possible faults."""

    workers: int
    partitions: tuple[tuple[int, ...], ...]
    """The keys of the messages of each partition, by offset; a repeated key is a duplicate."""
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
        """Return the initial state."""
        messages = self.messages
        keys = 1 + max(message.key for message in messages)
        return State(
            workers=((IDLE,) * len(messages),) * self.workers,
            keys=(Key(),) * keys,
            partitions=(Partition(),) * len(self.partitions),
            done=(False,) * keys,
            dead_letters=(False,) * len(messages),
            faults=self.faults,
        )

    def __str__(self) -> str:
        logs = " | ".join("".join("abcdefgh"[key] for key in keys) for keys in self.partitions)
        faults = ", ".join(f"{n} {name}" for name, n in self.faults._asdict().items() if n)
        return f"{self.workers} workers, log {logs}, {self.max_attempts} attempts, {faults or 'no faults'}"
