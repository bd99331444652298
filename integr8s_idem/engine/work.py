"""One unit of work on its way through the manager, and what came of it.  Pure data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from integr8s_idem._util.fast_dataclass import quick
from integr8s_idem.config import OnFailure, OnKeyReused
from integr8s_idem.errors import StoreError
from integr8s_idem.events import Message
from integr8s_idem.keys import Key, downstream_key, first_generation_key
from integr8s_idem.records import Completed, Completion, Corrupt, Failed, InProgress, KeyReused

T = TypeVar("T")

WaitForStore: TypeAlias = Callable[[StoreError], Awaitable[None]]
"""Returns when it is worth asking the store again."""


@quick
@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of some work, as its function sees it."""

    key: str
    """The full key."""
    number: int
    """1 for the first; more means that an earlier run failed, was stopped or crashed."""
    fence: int
    """For conditional writes downstream: refuse those with a lower number than the highest seen."""
    deadline: float
    """When the lease ends unless it is renewed, in seconds of the event loop's clock (`loop.time()`)."""
    label: str = ""
    """The key as people read it."""
    generation: int = 0
    """How often the work was asked for anew on purpose: 0 but for replays."""

    def key_for(self, name: str) -> str:
        """A key for something done downstream, the same at every attempt: hand it to a payment API.

        It is the same in a replay, too: a run that failed may have come that far.  Where a replay is to do
        it once more, put `generation` into `name`.
        """
        return downstream_key(first_generation_key(self.key, self.generation), name)


class Transaction(Protocol):
    """A database transaction of the application's, in which an outcome is written beside what the work wrote."""

    async def complete(self, completion: Completion) -> bool:
        """Remember the outcome, if the transaction commits.  `False`: the reservation is no longer ours."""
        ...

    async def remember_nothing(self) -> None:
        """Let the transaction commit without an outcome: the run had no reservation."""
        ...

    async def send(self, messages: Sequence[Message]) -> None:
        """Have `messages` sent, in this order, if the transaction commits."""
        ...


SUSPECT_AFTER: Final = 2
"""Lapsed attempts from which on work may be what crashes its process.  A single crash isolates nothing."""

CRASHES_IN_COMPANY: Final = 10
"""Times `max_attempts`: so many crashes end work that could never run alone, or outlived its turns."""


def is_crash_limit_reached(attempt: int, lapsed: int, lapsed_alone: int, limit: int, *, isolates: bool) -> bool:
    """Whether work whose last attempt lapsed is given up before its next run.

    Args:
        attempt: The number of the next run.
        lapsed: How many attempts have lapsed, the last one included; 0 if the store does not count them.
        lapsed_alone: How many of these ran alone in their process.
        limit: `max_attempts`.
        isolates: Whether who runs the work can run it alone.
    """
    if not isolates or not lapsed:
        return attempt > limit
    return lapsed_alone >= limit or lapsed >= CRASHES_IN_COMPANY * limit


class Isolation(Enum):
    """What happens to work whose earlier attempts lapsed so often that it may be what crashes its process."""

    NONE = "none"
    """It runs: who asks cannot have it run alone.  Each crash counts toward its limit."""
    PENDING = "pending"
    """It does not run: who asks has it run alone.  Only crashes of such runs count toward its limit."""
    ALONE = "alone"
    """It runs alone in its process, and its record says so."""
    WAIVED = "waived"
    """It runs beside others, since running alone could not be had."""


@dataclass(slots=True)
class Work:
    """One unit of work on its way through `execute`; the same object is used for every try."""

    key: Key
    fingerprint: bytes | None = None
    ttl: timedelta | None = None
    """How long its outcome is remembered; the configured default if `None`."""
    event_type: str = ""
    """For metrics: one of a closed set, or empty."""
    known: bool = False
    """Whether the store has answered once: hits and misses are counted by work, not by look."""
    on_failure: OnFailure | None = None
    """What a failed run means; as configured if `None`."""
    gives_up: bool = True
    """Whether runs that failed as often as is allowed block the key."""
    on_key_reused: OnKeyReused | None = None
    """What the key with another fingerprint means; as configured if `None`."""
    forgotten: bool = False
    """Not remembered once it is done: others wait for its end, and then run themselves."""
    unguarded_runs: int = 0
    """Runs without a reservation, counted here because no record does."""
    aborted_runs: int = 0
    """Runs that the database has ended and rolled back: they are attempts, but no failures."""
    token: bytes = b""
    """Kept while `reserve` gets no answer, so that a lost answer finds its reservation; empty: a new one is drawn."""
    isolation: Isolation = Isolation.NONE
    returns: Callable[..., object] | None = None
    """The function whose return annotation names the type of its result; unknown if `None`."""
    fence: int = 0
    """Of the last reservation: one that is found again is not counted again."""


@quick
@dataclass(frozen=True, slots=True)
class Executed(Generic[T]):
    """The function ran and returned."""

    value: T
    attempt: int


@dataclass(frozen=True, slots=True)
class HandlerFailed:
    """The function ran and raised, or crashed too often to be tried again."""

    error: Exception
    attempt: int
    given_up: bool
    """The key is FAILED now; otherwise it was released, and the work may be tried again."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Too little of the lease was left to start the function: the work is to be reserved again."""


Outcome: TypeAlias = Executed[T] | HandlerFailed | Completed | InProgress | Failed | KeyReused | Corrupt
"""What came of one pass: the work was done now, was done before, or why it was not done."""
