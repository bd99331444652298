"""What every way into the guard has in common: work is sent, and its sender sees an answer.

A hard case is written once, in `test_hard_cases.py`, and runs over all entries.  An entry says how work is sent, what
an answer looks like, and, in `sees`, where what its senders see differs from `USUAL`.
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
    """What goes wrong, as the documentation heads its columns."""

    TWO_AT_ONCE = "two at once: the second sees"
    CRASH = "the next, after a crash"
    FAILURE = "it fails once"
    FAILURES = "it fails always"
    ZOMBIE = "a zombie, whose lease was taken over"
    OTHER_PAYLOAD = "the key with another payload"
    DOWN_BEFORE = "before the work"
    DOWN_AFTER = "after it, for a moment"
    DOWN_FOR_LONG = "after it, beyond the lease"
    TOO_LARGE = "a duplicate, of a result too large to keep"
    FALSY = 'a duplicate, of `None`, `0`, `""`, `[]`, `{}`, `False`'
    ITERATOR = "a duplicate, of an iterator, which the first got as a list"
    CANCELLED = "cancelled in its midst"


class Sees(Enum):
    """What a sender is told."""

    VALUE = "the value"
    CONFLICT = "a conflict"
    ERROR = "the error"
    GIVEN_UP = "given up"
    REUSED = "refused"
    DOWN = "no store"
    UNSTORED = "done, not remembered"
    LOST = "lease lost"
    DROPPED = "done, result gone"
    NOT_STORED = "refused, nothing stored"
    AGAIN = "it comes again"
    CANCELLED = "cancelled"


FINAL = frozenset({Sees.VALUE, Sees.GIVEN_UP, Sees.REUSED, Sees.DROPPED})
"""Whoever sees this does not try again."""

Seen: TypeAlias = tuple[Sees, ...]
"""What a sender sees, one after the other, who tries again until it is over; repetitions count once."""

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
    """What one try came to."""

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
    (OSError, Sees.ERROR),  # what the work of these cases raises
)


def answer_of(error: BaseException) -> Answer:
    """What an error tells.  An error that no case expects is raised."""
    for kind, sees in _BY_ERROR:
        if isinstance(error, kind):
            return Answer(sees)
    raise error


def replayed(done: Completed) -> Answer:
    """What a remembered outcome tells those who read it themselves."""
    if done.result is None:
        return Answer(Sees.DROPPED)
    return Answer(Sees.VALUE, decode_result(done.key, done.result))


@dataclass(slots=True)
class Process:
    """What one process of an application has, and where its messages come from."""

    manager: IdempotencyManager
    work: GatedWork
    place: str
    """Names the topic that it consumes; another process in the same place goes on where it stopped."""
    kafka: Kafka | None = None
    store: FaultProxy | None = None
    """Stands before its store."""


class Entry(ABC):
    """One process of an application, and one way into its guard."""

    name: ClassVar[str]
    label: ClassVar[str]
    """How documentation names it."""
    sees: ClassVar[Mapping[Case, Seen]] = {}
    words: ClassVar[Mapping[Sees, str]] = {}
    in_threads: ClassVar[bool] = False
    """Whether its guard works on the loop for plain functions."""
    needs_kafka: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    """Whether work whose end is not known is done again."""
    cancel_lease: ClassVar[float] = 60.0
    """Seconds of the lease in the case of a cancellation: short where the key stays until its lease ends."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.manager = process.manager
        self.work = process.work

    async def open(self) -> None:  # noqa: B027  # most have nothing to open
        """Begin."""

    async def close(self) -> None:  # noqa: B027  # nor to close
        """End, whatever is under way."""

    @abstractmethod
    async def send(self, key: str, payload: str = "p") -> Answer:
        """Send work, and what its first try came to."""

    async def again(self, key: str, payload: str = "p") -> Answer:
        """What the next try comes to, of work whose last one was not final: of the sender, or of the broker."""
        return await self.send(key, payload)

    async def cancel(self, sending: asyncio.Task[Answer]) -> None:
        """Cancel whoever does the work."""
        sending.cancel()

    async def acknowledged(self) -> bool:
        """Whether the last that was sent will never come again.  Never, where nothing is acknowledged."""
        return False

    def run_here(self, payload: str) -> Run:
        """The run that the calling code is part of."""
        attempt = self.manager.attempt()
        return Run(payload, attempt.number, attempt.fence)

    @classmethod
    def expected(cls, case: Case) -> Seen:
        return cls.sees.get(case, USUAL[case])

    @classmethod
    def told(cls, case: Case) -> str:
        """A cell of the table in the documentation."""
        words = {**USUAL_WORDS, **cls.words}
        return ", then ".join(words[sees] for sees in cls.expected(case))


def seen(answers: Sequence[Answer]) -> Seen:
    """What was seen, repetitions left out."""
    kinds = [answer.sees for answer in answers]
    return tuple(kind for index, kind in enumerate(kinds) if index == 0 or kind is not kinds[index - 1])
