"""Failures that rules decide about: their errors, the rules, and when a handler raises them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from integr8s_idem.errors import RetryAfter
from integr8s_idem.failures import dead_letter, discard, retry, retry_later, stop

DELAY: Final = 1.5
"""Seconds."""

OWN_ATTEMPTS: Final = 7
"""More than any service allows."""


class TransientError(Exception):
    """An error that is retried more often than others."""


class BusyError(Exception):
    """An error that is retried after a delay."""


class InvalidError(Exception):
    """An error of an event that is dead-lettered."""


class WithdrawnError(Exception):
    """An error of an event that is discarded."""


class CorruptError(Exception):
    """An error that stops the service."""


OF_HANDLERS: Final = (discard(WithdrawnError), stop(CorruptError))
OF_ROUTER: Final = (retry(TransientError, attempts=OWN_ATTEMPTS), dead_letter(InvalidError))
OF_SETTINGS: Final = (retry_later(BusyError, delay=DELAY), stop(WithdrawnError, InvalidError))
"""The second rule never decides."""


class Kind(Enum):
    """What a rule decides about the failures of a work."""

    NONE = "none"
    """It has no failures that a rule knows."""
    RETRY = "retry"
    RETRY_LATER = "retry_later"
    RETRY_AFTER = "retry_after"
    """The handler chooses when to be called again."""
    DEAD_LETTER = "dead_letter"
    DISCARD = "discard"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class RuledFailures:
    """The failures of one work, the same for every attempt and worker."""

    kind: Kind = Kind.NONE
    attempts: int = 0
    """The attempts up to this one fail."""
    late: bool = False
    """Whether they fail after their effect."""
    delay: float = DELAY
    """Seconds until the next attempt, if the handler chooses them."""

    def raise_for(self, attempt: int, *, late: bool) -> None:
        """Raise the error of this attempt, if it fails at this point."""
        if self.kind is not Kind.NONE and late == self.late and attempt <= self.attempts:
            raise self._error()

    def _error(self) -> Exception:
        if self.kind is Kind.RETRY_AFTER:
            return RetryAfter(self.delay, "as planned")
        return _ERRORS[self.kind]("as planned")


_ERRORS: Final[dict[Kind, type[Exception]]] = {
    Kind.RETRY: TransientError,
    Kind.RETRY_LATER: BusyError,
    Kind.DEAD_LETTER: InvalidError,
    Kind.DISCARD: WithdrawnError,
    Kind.STOP: CorruptError,
}

_ALWAYS: Final = 10**6

_MOST: Final = {Kind.RETRY: OWN_ATTEMPTS + 1, Kind.RETRY_LATER: 3, Kind.RETRY_AFTER: 3, Kind.STOP: 2}
"""Maximum number of failing attempts; the others always fail."""


def share_of(seed: int) -> float:
    """Return the share of works whose failures a rule knows; none in half of all runs.

    Like the other functions here, it has a random generator of its own, so that the other choices of a seed do not
    depend on it.
    """
    random = Random(f"{seed}/rules")  # a simulation
    return random.choice((0.0, random.uniform(0.1, 0.7)))


def failures_of(seed: int, handler: str, event_id: str, share: float) -> RuledFailures:
    """Return the failures of a work."""
    random = Random(f"{seed}/{handler}/{event_id}/rules")  # a simulation
    if random.random() >= share:
        return RuledFailures()
    kind = random.choice(tuple(Kind)[1:])
    most = _MOST.get(kind)
    return RuledFailures(kind, _ALWAYS if most is None else random.randint(1, most), random.random() < 0.3)


def attempts_before(error: str, max_attempts: int) -> int | None:
    """Return how many attempts are made before an event with this error is given up; `None`: it never is."""
    if error in {CorruptError.__name__, WithdrawnError.__name__}:
        return None
    limits = {
        TransientError.__name__: OWN_ATTEMPTS,
        BusyError.__name__: max_attempts,
        RetryAfter.__name__: max_attempts,
    }
    return limits.get(error, 0)
