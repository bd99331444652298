"""Data classes for a unit of work and its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from time import perf_counter
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, final

from msgspec import Struct

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnKeyReused
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.errors import StoreError
from integr8s_idem.events import Message
from integr8s_idem.failures import FailureRule
from integr8s_idem.keys import Key, downstream_key, first_generation_key
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failed,
    KeyReused,
    Pending,
    Reserved,
    TraceLink,
)
from integr8s_idem.stores import NO_DELAY

T = TypeVar("T")

WaitForStore: TypeAlias = Callable[[StoreError], Awaitable[None]]
"""Returns when the store may be available again."""


class Attempt(Struct, frozen=True, gc=False):
    """One run of a unit of work, as passed to its function."""

    key: str
    """The full key."""
    number: int
    """1 for the first attempt; higher if earlier runs failed, were stopped or crashed."""
    fence: int
    """Fencing token for downstream writes: reject writes with a lower number than the highest seen."""
    deadline: float
    """End of the lease unless it is renewed, in seconds of the event loop's clock (`loop.time()`)."""
    label: str = ""
    """The readable form of the key."""
    generation: int = 0
    """How many times the work was replayed deliberately; 0 for the original."""

    def key_for(self, name: str) -> str:
        """Return a key for a downstream call, such as a payment API.  It is the same for every attempt.

        It is also the same in a replay, because the failed run may have made the call already.  If a replay should
        make the call again, include `generation` in `name`.
        """
        return downstream_key(first_generation_key(self.key, self.generation), name)


class Transaction(Protocol):
    """A database transaction of the application in which an outcome is written."""

    async def complete(self, completion: Completion) -> bool:
        """Record the outcome if the transaction commits.  `False`: this process no longer holds the reservation."""
        ...

    async def remember_nothing(self) -> None:
        """Let the transaction commit without an outcome, because the run has no reservation."""
        ...

    async def send(self, messages: Sequence[Message]) -> None:
        """Send `messages` in order if the transaction commits."""
        ...


SUSPECT_AFTER: Final = 2
"""Lapsed attempts after which work is suspected of crashing its process.  A single crash does not isolate it."""

CRASHES_IN_COMPANY: Final = 10
"""Factor of `max_attempts`: work that crashed so often is given up even if it never ran alone."""


def is_crash_limit_reached(
    attempt: int, lapsed: int, lapsed_alone: int, limit: int, *, isolates: bool, most_attempts: int = 0
) -> bool:
    """Whether to give up work whose last attempt lapsed, instead of running it again.

    Args:
        attempt: The number of the next run.
        lapsed: How many attempts have lapsed, including the last one; 0 if the store does not count them.
        lapsed_alone: How many of these ran alone in their process.
        limit: `max_attempts`.
        isolates: Whether the caller can run the work alone.
        most_attempts: The largest number of attempts that a rule allows.  Attempts that failed within it do not count:
            otherwise, one crash after several of them would be the last.
    """
    if not isolates or not lapsed:
        return attempt > max(limit, most_attempts) or lapsed >= limit
    return lapsed_alone >= limit or lapsed >= CRASHES_IN_COMPANY * limit


class Isolation(Enum):
    """How to run work that is suspected of crashing its process, because earlier attempts have lapsed."""

    NONE = "none"
    """The caller cannot isolate work: it runs, and every crash counts toward its limit."""
    PENDING = "pending"
    """The caller isolates suspects: they are not started, and only crashes of isolated runs count toward the limit."""
    ALONE = "alone"
    """The work runs alone in its process, and its record is marked accordingly."""
    WAIVED = "waived"
    """The work runs beside others, because it could not be isolated."""


class Work(Struct):
    """One unit of work; the same object is used for all its attempts in this process."""

    key: Key
    fingerprint: bytes | None = None
    ttl: timedelta | None = None
    """How long the outcome is kept; the configured default if `None`."""
    event_type: str = ""
    """Label for metrics: one of a closed set, or empty."""
    known: bool = False
    """Whether the store has answered before; hits and misses are counted once per unit of work."""
    on_failure: OnFailure | None = None
    """What a failed run means for the next one; as configured if `None`."""
    gives_up: bool = True
    """Whether the key is blocked after the maximum number of failed runs."""
    on_key_reused: OnKeyReused | None = None
    """What to do if the key was used with another fingerprint; as configured if `None`."""
    failures: FailurePolicy | None = None
    """Decides what happens after a failed run; if `None`, only `on_failure` and `gives_up` do."""
    failed_runs: int = 0
    """Number of runs that have failed, as far as this process knows: their record may expire or be lost."""
    copied_attempt: int = 0
    """Number of the attempt after which the event was copied to a retry topic; 0 if it was not.

    It includes attempts that do not count toward a limit, so it is used only if the record has expired.
    """
    failed_together: bool = False
    """Whether the last run failed in a batch with others, only one of which may be the cause."""
    forgotten: bool = False
    """Whether the outcome is not kept: concurrent callers wait for its end, and then run themselves."""
    unguarded_runs: int = 0
    """Number of runs without a reservation, which no record counts."""
    uncounted_attempts: int = 0
    """Number of attempts that are not failures: the database rolled them back, or they were released unstarted."""
    token: bytes = b""
    """Kept after a `reserve` without an answer, so that the next one finds its reservation; empty: not reserved yet."""
    unstarted: Reserved | None = None
    """A reservation that was given up before the function started; the next `reserve` finds it by its token."""
    isolation: Isolation = Isolation.NONE
    returns: Callable[..., object] | None = None
    """The function whose return annotation is the type of the result; unknown if `None`."""
    fence: int = 0
    """Fence of the last reservation, so that it is not counted twice if found again."""
    context: Context | None = None
    """Context of the recorded span that it belongs to; `None` if that is the current one, or none is recorded."""
    trace: TraceLink | None = None
    """Link to the recorded span of this work, for its record."""
    looks: int = 0
    """How many times it was found in progress since `waiting_since`; 0 if it does not wait for another run."""
    unanswered: bool = False
    """Whether the store did not answer a request for this attempt, which has been observed."""
    handler: str = ""
    """Name of the handler that does it, for spans; empty if it is unknown."""
    waiting_since: float = 0.0
    """When it was first found in progress, in seconds of `time.perf_counter`."""

    def note_look(self) -> int:
        """Note that it was found in progress, and waits for the other run; return how many times that has happened."""
        if not self.looks:
            self.waiting_since = perf_counter()
        self.looks += 1
        return self.looks

    def count_copied_attempts(self) -> None:
        """Count the attempts before the event was copied, because its record no longer does."""
        # Failures here include them if the record had counted them.
        self.failed_runs = max(self.failed_runs, self.copied_attempt)
        self.copied_attempt = 0

    def rule_for(self, error: Exception, config: IdempotencyConfig) -> FailureRule | None:
        """Return the rule for a run that has failed with `error`, if there is one."""
        together, self.failed_together = self.failed_together, False
        if self.failures is None:
            return None
        blocks = (self.on_failure or config.on_failure) is OnFailure.BLOCK
        return self.failures.decide(error, together=together, max_attempts=config.max_attempts, blocks=blocks)

    def delay_of(self, rule: FailureRule | None) -> timedelta:
        """Return how long nobody may run this work after a failure that matches `rule`; zero if it is not scheduled."""
        if rule is None or rule.delay is None or self.failures is None or not self.failures.schedules:
            return NO_DELAY
        return rule.delay

    def keep(self, reservation: Reserved) -> None:
        """Let the next `reserve` find this reservation, which has not started: it counts as the same attempt."""
        self.token = reservation.token
        self.unstarted = reservation

    def forget_token(self) -> None:
        """Let the next `reserve` be an attempt of its own."""
        self.token = b""
        self.unstarted = None


@final
class Executed(Struct, Generic[T], frozen=True):
    """The function ran and returned."""

    value: T
    attempt: int


@dataclass(frozen=True, slots=True)
class HandlerFailed:
    """The function ran and raised, or crashed too often to be retried."""

    error: Exception
    attempt: int
    given_up: bool
    """Whether the key is FAILED now; otherwise it was released, and the work may be retried."""
    rule: FailureRule | None = None
    """The rule that matches the error of work that may be retried: when, or that the service stops."""
    due_in: timedelta | None = None
    """If the work was scheduled: when it is due, counted from the time when it was; nobody runs it before."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """The function ran and raised an error that a rule discards: the key is COMPLETED, without a result."""

    error: Exception
    attempt: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Too little of the lease was left to start the function: reserve the work again, or release its key."""


Outcome: TypeAlias = Executed[T] | HandlerFailed | Discarded | Completed | Pending | Failed | KeyReused | Corrupt
"""Outcome of one attempt: the work was done now, was done before, or was not done for some reason."""
