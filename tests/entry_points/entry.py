"""The common interface of all entry points: send work, get an answer.

Each hard case is written once, in `test_hard_cases.py`, and runs on every entry point.  An entry point defines how to
send work and how to interpret the answer, and lists in `sees` the cases whose answers differ from `USUAL`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeAlias

from integr8s_idem import IdempotencyManager
from integr8s_idem.engine.results import decode_result
from integr8s_idem.errors import (
    IdempotencyConflictError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    PreviouslyFailedError,
    ResultDroppedError,
    ResultNotStoredError,
    StepInterruptedError,
    StoreUnavailableError,
)
from integr8s_idem.records import Completed
from tests.support.fault_proxy import FaultProxy
from tests.support.gated import GatedWork, Run
from tests.support.kafka import Kafka


class Case(Enum):
    """The hard cases; values are the column headings in the documentation."""

    TWO_AT_ONCE = "concurrent duplicate"
    CRASH = "next attempt after a crash"
    FAILURE = "fails once"
    FAILURES = "always fails"
    ZOMBIE = "stalled beyond its lease, key taken over"
    OTHER_PAYLOAD = "same key, different payload"
    DOWN_BEFORE = "before the work"
    DOWN_AFTER = "after the work, briefly"
    DOWN_FOR_LONG = "after the work, longer than the lease"
    TOO_LARGE = "duplicate; result too large to store"
    FALSY = 'duplicate; result `None`, `0`, `""`, `[]`, `{}` or `False`'
    ITERATOR = "duplicate; result an iterator, which the first caller gets as a list"
    CANCELLED = "cancelled while running"


class Sees(Enum):
    """Answers to one attempt, as the sender sees them."""

    VALUE = "the value"
    CONFLICT = "a conflict"
    ERROR = "the error"
    GIVEN_UP = "given up"
    REUSED = "refused"
    DOWN = "no store"
    UNSTORED = "done, outcome not stored"
    LOST = "lease lost"
    DROPPED = "done, result gone"
    NOT_STORED = "refused, nothing stored"
    AGAIN = "redelivered"
    CANCELLED = "cancelled"


FINAL = frozenset({Sees.VALUE, Sees.GIVEN_UP, Sees.REUSED, Sees.DROPPED})
"""Answers after which senders stop retrying."""

Seen: TypeAlias = tuple[Sees, ...]
"""Answers to one sender that retries until the last one is final, consecutive repetitions removed."""

USUAL: Mapping[Case, Seen] = {
    Case.TWO_AT_ONCE: (Sees.VALUE,),
    Case.CRASH: (Sees.VALUE,),
    Case.FAILURE: (Sees.ERROR, Sees.VALUE),
    Case.FAILURES: (Sees.ERROR, Sees.GIVEN_UP),
    Case.ZOMBIE: (Sees.LOST, Sees.VALUE),
    Case.OTHER_PAYLOAD: (Sees.REUSED,),
    Case.DOWN_BEFORE: (Sees.DOWN, Sees.VALUE),
    Case.DOWN_AFTER: (Sees.VALUE,),
    Case.DOWN_FOR_LONG: (Sees.UNSTORED, Sees.VALUE),
    Case.TOO_LARGE: (Sees.DROPPED,),
    Case.FALSY: (Sees.VALUE,),
    Case.ITERATOR: (Sees.VALUE,),
    Case.CANCELLED: (Sees.CANCELLED, Sees.VALUE),
}

USUAL_WORDS: Mapping[Sees, str] = {
    Sees.VALUE: "the value",
    Sees.CONFLICT: "`IdempotencyConflictError`",
    Sees.ERROR: "its error",
    Sees.GIVEN_UP: "`PreviouslyFailedError`",
    Sees.REUSED: "`KeyReusedError`",
    Sees.DOWN: "`StoreUnavailableError`",
    Sees.UNSTORED: "`ResultNotStoredError`",
    Sees.LOST: "`LeaseLostError`",
    Sees.DROPPED: "`ResultDroppedError`",
    Sees.CANCELLED: "`CancelledError`",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one attempt."""

    sees: Sees
    value: Any = None

    @property
    def final(self) -> bool:
        return self.sees in FINAL


_BY_ERROR: Sequence[tuple[type[BaseException], Sees]] = (
    (IdempotencyConflictError, Sees.CONFLICT),
    (InProgressError, Sees.CONFLICT),
    (KeyReusedError, Sees.REUSED),
    (PreviouslyFailedError, Sees.GIVEN_UP),
    (StepInterruptedError, Sees.GIVEN_UP),
    (ResultDroppedError, Sees.DROPPED),
    (ResultNotStoredError, Sees.UNSTORED),
    (StoreUnavailableError, Sees.DOWN),
    (LeaseLostError, Sees.LOST),
    (OSError, Sees.ERROR),  # raised by the work in these cases
)


def answer_of(error: BaseException) -> Answer:
    """Return the answer for an error, or re-raise it if no case expects it."""
    for kind, sees in _BY_ERROR:
        if isinstance(error, kind):
            return Answer(sees)
    raise error


def replayed(done: Completed) -> Answer:
    """Return the answer for a stored outcome that the caller reads itself."""
    if done.result is None:
        return Answer(Sees.DROPPED)
    return Answer(Sees.VALUE, decode_result(done.key, done.result))


@dataclass(slots=True)
class Process:
    """The manager, work and message source of one application process."""

    manager: IdempotencyManager
    work: GatedWork
    place: str
    """Identifies the topic to consume; a later process in the same place resumes from its committed offset."""
    kafka: Kafka | None = None
    store: FaultProxy | None = None
    """The proxy between the process and its store."""


class Entry(ABC):
    """An entry point in one application process."""

    name: ClassVar[str]
    label: ClassVar[str]
    """Name in the documentation."""
    sees: ClassVar[Mapping[Case, Seen]] = {}
    words: ClassVar[Mapping[Sees, str]] = {}
    in_threads: ClassVar[bool] = False
    """Whether its manager runs on the event loop of the synchronous bridge."""
    needs_kafka: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    """Whether work with an unknown outcome is run again."""
    cancel_lease: ClassVar[float] = 60.0
    """Lease in seconds for the cancellation case; short if the key is held until its lease ends."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.manager = process.manager
        self.work = process.work

    async def open(self) -> None:  # noqa: B027  # most have nothing to open
        """Start consuming, or set up clients."""

    async def close(self) -> None:  # noqa: B027  # nor to close
        """Stop, even if work is running."""

    @abstractmethod
    async def send(self, key: str, payload: str = "p") -> Answer:
        """Send work and return the answer to its first attempt."""

    async def retry(self, key: str, payload: str = "p") -> Answer:
        """Return the answer to the next attempt, made by the sender or the broker, after one that was not final."""
        return await self.send(key, payload)

    async def cancel(self, sending: asyncio.Task[Answer]) -> None:
        """Cancel the task or process that runs the work."""
        sending.cancel()

    async def acknowledged(self) -> bool:
        """Return whether the last message is acknowledged; `False` if the entry point has no acknowledgments."""
        return False

    def run_here(self, payload: str) -> Run:
        """Return the run of the calling code."""
        attempt = self.manager.attempt()
        return Run(payload, attempt.number, attempt.fence)

    @classmethod
    def expected(cls, case: Case) -> Seen:
        return cls.sees.get(case, USUAL[case])

    @classmethod
    def cell(cls, case: Case) -> str:
        """Return the cell of the documentation table for a case."""
        words = {**USUAL_WORDS, **cls.words}
        return ", then ".join(words[sees] for sees in cls.expected(case))


def seen(answers: Sequence[Answer]) -> Seen:
    """Return the answers without consecutive repetitions."""
    kinds = [answer.sees for answer in answers]
    return tuple(kind for index, kind in enumerate(kinds) if index == 0 or kind is not kinds[index - 1])
