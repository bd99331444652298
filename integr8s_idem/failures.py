"""Rules for failed handlers: which errors are retried, and what happens to an event that is not.

    router = EventRouter(failures=[retry(httpx.TransportError, attempts=20), dead_letter(InvalidOrderError)])

    @router.on(OrderPlaced, failures=[discard(OrderWithdrawnError), stop(LedgerCorruptError)])
    async def charge(event: OrderPlaced) -> None: ...

The first rule that matches decides.  The order is: rules of the handler, of its router, of the settings
(`[[services.NAME.failures]]`), and `DEFAULT_RULES`.  An error that no rule matches is retried as the settings of the
service say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final, TypeAlias

from pydantic import ValidationError

from integr8s_idem._util.counts import is_count
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import ApplicationError, PermanentError, RetryAfter

__all__ = [
    "DEFAULT_RULES",
    "FailureAction",
    "FailureRule",
    "dead_letter",
    "discard",
    "retry",
    "retry_later",
    "stop",
]

ErrorClass: TypeAlias = type[Exception]


class FailureAction(str, Enum):
    """What happens after a failed attempt."""

    RETRY = "retry"
    """The handler runs again after a pause, until its attempts are used up; then the event is dead-lettered."""
    RETRY_LATER = "retry_later"
    """As `retry`, after a pause of a given length."""
    DEAD_LETTER = "dead_letter"
    """The event goes to the dead-letter topic at once."""
    DISCARD = "discard"
    """The event is settled as if the handler had succeeded."""
    STOP = "stop"
    """The service fails, and the event is redelivered when it is started again."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """What happens after an attempt that failed with one of some errors.

    Make rules with `retry`, `retry_later`, `dead_letter`, `discard` and `stop`.
    """

    action: FailureAction
    errors: tuple[ErrorClass, ...]
    """The errors that it matches, with their subclasses."""
    attempts: int | None = None
    """Maximum number of attempts, including the first; that of the service if `None`."""
    delay: timedelta | None = None
    """Minimum pause before the next attempt; `None` for a pause that grows with each attempt."""
    first_pause: timedelta | None = None
    """Maximum pause before the second attempt; that of the service if `None`."""
    longest_pause: timedelta | None = None
    """Maximum pause before any attempt; that of the service if `None`."""
    jitter: bool = True
    """Whether pauses are random, up to their maximum."""
    through_causes: bool = False
    """Whether it also matches an error that was raised `from` one of its errors, directly or not."""

    def matches(self, error: Exception) -> bool:
        """Whether the rule applies to `error`, which is not an `ExceptionGroup` unless the rule names one."""
        if isinstance(error, _OF_HANDLERS):
            # The handler has chosen what happens: a rule for all errors does not change it.
            return isinstance(error, tuple(each for each in self.errors if issubclass(each, _OF_HANDLERS)))
        if isinstance(error, BaseExceptionGroup):
            return isinstance(error, tuple(each for each in self.errors if issubclass(each, BaseExceptionGroup)))
        if isinstance(error, self.errors):
            return True
        return self.through_causes and any(isinstance(cause, self.errors) for cause in _causes(error))

    def covers(self, error: ErrorClass, *, through_causes: bool = False) -> bool:
        """Whether the rule matches every error of this class.

        Args:
            error: A class of errors.
            through_causes: Whether it must also match each error that was raised `from` one of these.
        """
        chosen = issubclass(error, _OF_HANDLERS)
        grouped = issubclass(error, BaseExceptionGroup)
        return (self.through_causes or not through_causes) and any(
            issubclass(error, each)
            and (not chosen or issubclass(each, _OF_HANDLERS))
            and (not grouped or issubclass(each, BaseExceptionGroup))
            for each in self.errors
        )

    def is_last(self, attempt: int, max_attempts: int) -> bool:
        """Whether the event is given up after the attempt with this number."""
        match self.action:
            case FailureAction.STOP:
                return False
            case FailureAction.DEAD_LETTER:
                return True
            case _:
                return attempt >= (self.attempts or max_attempts)

    def __str__(self) -> str:
        options = {
            "attempts": self.attempts,
            "delay": _seconds(self.delay),
            "first_pause": _seconds(self.first_pause),
            "longest_pause": _seconds(self.longest_pause),
            "jitter": None if self.jitter else False,
            "through_causes": self.through_causes or None,
        }
        named = [f"{name}={value}" for name, value in options.items() if value is not None]
        return f"{self.action.value}({', '.join([*map(_name, self.errors), *named])})"


_OF_HANDLERS: Final = (PermanentError, RetryAfter)
"""Errors with which a handler chooses what happens."""


def retry(
    *errors: ErrorClass,
    attempts: int | None = None,
    first_pause: Duration | None = None,
    longest_pause: Duration | None = None,
    jitter: bool = True,
    through_causes: bool = False,
) -> FailureRule:
    """Retry in place after these errors: the handler runs again after a pause that doubles with each attempt.

    Args:
        errors: Classes of errors; the rule also matches their subclasses.
        attempts: Maximum number of attempts, including the first; by default, `max_attempts` of the service.
        first_pause: Maximum pause before the second attempt; by default, `retry_initial_seconds` of the service.
        longest_pause: Maximum pause before any attempt; by default, `retry_max_seconds` of the service.
        jitter: Whether pauses are random, from 1 to 100 % of their maximum, so that events that failed together are
            not retried together.
        through_causes: Whether the rule also matches errors that were raised `from` one of these.

    Raises:
        ApplicationError: There is no error, a class is not an `Exception`, or a number is out of range.
    """
    first, longest = duration(first_pause, "first_pause"), duration(longest_pause, "longest_pause")
    if first is not None and longest is not None and first > longest:
        raise ApplicationError(f"retry(): first_pause {first} exceeds longest_pause {longest}")
    return _rule(
        FailureAction.RETRY,
        errors,
        attempts=attempts,
        first_pause=first,
        longest_pause=longest,
        jitter=jitter,
        through_causes=through_causes,
    )


def retry_later(
    *errors: ErrorClass, delay: Duration, attempts: int | None = None, through_causes: bool = False
) -> FailureRule:
    """Retry not earlier than `delay` after these errors.

    Args:
        errors: Classes of errors; the rule also matches their subclasses.
        delay: The pause before each attempt.
        attempts: Maximum number of attempts, including the first; by default, `max_attempts` of the service.
        through_causes: Whether the rule also matches errors that were raised `from` one of these.

    Raises:
        ApplicationError: As for `retry`.
    """
    pause: timedelta | None = duration(delay, "delay")
    if pause is None:
        raise ApplicationError("retry_later() needs a delay, as in retry_later(OSError, delay=60)")
    return _rule(FailureAction.RETRY_LATER, errors, attempts=attempts, delay=pause, through_causes=through_causes)


def dead_letter(*errors: ErrorClass, through_causes: bool = False) -> FailureRule:
    """Dead-letter the event at once after these errors, without another attempt.

    Args:
        errors: Classes of errors; the rule also matches their subclasses.
        through_causes: Whether the rule also matches errors that were raised `from` one of these.

    Raises:
        ApplicationError: There is no error, or a class is not an `Exception`.
    """
    return _rule(FailureAction.DEAD_LETTER, errors, through_causes=through_causes)


def discard(*errors: ErrorClass, through_causes: bool = False) -> FailureRule:
    """Settle the event after these errors as if the handler had succeeded.  Nobody handles it later.

    Its record is completed before its offset is committed, so that a redelivery is a duplicate.

    Args:
        errors: Classes of errors; the rule also matches their subclasses.
        through_causes: Whether the rule also matches errors that were raised `from` one of these.

    Raises:
        ApplicationError: There is no error, or a class is not an `Exception`.
    """
    return _rule(FailureAction.DISCARD, errors, through_causes=through_causes)


def stop(*errors: ErrorClass, through_causes: bool = False) -> FailureRule:
    """Stop the service after these errors.  The event is redelivered when the service is started again.

    Args:
        errors: Classes of errors; the rule also matches their subclasses.
        through_causes: Whether the rule also matches errors that were raised `from` one of these.

    Raises:
        ApplicationError: There is no error, or a class is not an `Exception`.
    """
    return _rule(FailureAction.STOP, errors, through_causes=through_causes)


def _rule(
    action: FailureAction,
    errors: tuple[ErrorClass, ...],
    *,
    attempts: int | None = None,
    delay: timedelta | None = None,
    first_pause: timedelta | None = None,
    longest_pause: timedelta | None = None,
    jitter: bool = True,
    through_causes: bool = False,
) -> FailureRule:
    if not errors:
        raise ApplicationError(f"{action.value}() needs at least one class of errors, as in {action.value}(OSError)")
    given: tuple[object, ...] = errors
    for each in given:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise ApplicationError(f"{action.value}() needs subclasses of Exception, not {each!r}")
    if attempts is not None and not is_count(attempts):
        raise ApplicationError(f"{action.value}(): attempts is {attempts!r}, but must be an integer of at least 1")
    switches: dict[str, object] = {"jitter": jitter, "through_causes": through_causes}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ApplicationError(f"{action.value}(): {name} is {value!r}, but must be True or False")
    return FailureRule(action, errors, attempts, delay, first_pause, longest_pause, jitter, through_causes)


DEFAULT_RULES: Final = (
    retry_later(RetryAfter, delay=0),  # after the delay of the error
    dead_letter(PermanentError, ValidationError),
)
"""Rules that apply after all others.  Other errors are retried, as the settings of the service say."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen, cause = {id(error)}, error.__cause__
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__


def checked_rules(rules: Iterable[FailureRule]) -> tuple[FailureRule, ...]:
    """Return `rules` as a tuple.

    Raises:
        ApplicationError: They are not a list of rules, or another iterable.
    """
    given: object = rules
    if not isinstance(given, Iterable):
        raise ApplicationError(_not_rules(given))
    checked = tuple(rules)
    for each in checked:
        if not isinstance(each, FailureRule):
            raise ApplicationError(_not_rules(each))
    return checked


def _not_rules(given: object) -> str:
    shown = str(given) if isinstance(given, FailureRule) else repr(given)
    return f"failures= takes a list of rules, as in failures=[retry(OSError, attempts=20)], not {shown}"


def _seconds(length: timedelta | None) -> str | None:
    return None if length is None else f"{length.total_seconds():g}"


def _name(error: ErrorClass) -> str:
    return error.__qualname__
