"""Decide what happens after a failed run of a handler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from integr8s_idem.config.idempotency import LARGEST
from integr8s_idem.errors import LeaseLostError, PermanentError, RetryAfter, TransactionAbortedError
from integr8s_idem.failures import DEFAULT_RULES, FailureAction, FailureRule

_NO_FAILURES: Final = (TransactionAbortedError, LeaseLostError)
"""Errors that say nothing about the event: rules do not apply to them."""

_RETRY_ALONE: Final = FailureRule(FailureAction.RETRY, (Exception,), attempts=LARGEST)


class FailurePolicy:
    """All rules of a handler, in order."""

    def __init__(self, rules: Iterable[FailureRule] = (), *, schedules: bool = False) -> None:
        """
        Args:
            rules: Those that apply before `DEFAULT_RULES`.
            schedules: Whether a retry with a delay is scheduled in the store, so that nobody runs the work before.
        """
        self.rules: Final = tuple(rules)
        self.schedules: Final = schedules
        self.most_attempts: Final = most_attempts(self.rules)

    def decide(self, error: Exception, *, together: bool = False) -> FailureRule | None:
        """Return the rule for an attempt that failed with `error`; `None` if no rule matches.

        Args:
            error: The error of the handler.
            together: Whether several events of a batch failed with this error, and only one may have caused it.
        """
        if isinstance(error, _NO_FAILURES):
            return None
        rule = self._decide(error)
        return _RETRY_ALONE if together and rule is not None and _hits_innocent(rule, error) else rule

    def _decide(self, error: Exception) -> FailureRule | None:
        for rule in (*self.rules, *DEFAULT_RULES):
            if rule.matches(error):
                return _not_before(rule, error.delay) if isinstance(error, RetryAfter) else rule
        if isinstance(error, ExceptionGroup):
            return max((self._decide(each) for each in error.exceptions), key=_care)
        return None


def most_attempts(rules: Iterable[FailureRule]) -> int:
    """Return the largest number of attempts that a rule allows; 0 if none says how many."""
    return max((rule.attempts or 0 for rule in rules), default=0)


_CARE: Final = (FailureAction.DISCARD, FailureAction.DEAD_LETTER, FailureAction.RETRY, FailureAction.RETRY_LATER)


def _care(rule: FailureRule | None) -> tuple[int, timedelta]:
    """Return how careful a decision is: of several errors, the most careful one decides."""
    if rule is None:
        return (_CARE.index(FailureAction.RETRY), timedelta())
    place = len(_CARE) if rule.action is FailureAction.STOP else _CARE.index(rule.action)
    return (place, rule.delay or timedelta())


def _hits_innocent(rule: FailureRule, error: Exception) -> bool:
    """Whether the rule ends events that failed together, though only one may be the cause.

    A handler that raises `PermanentError` for a whole batch means all of its events.
    """
    if rule.action is FailureAction.DEAD_LETTER:
        return not isinstance(error, PermanentError)
    return rule.action is FailureAction.DISCARD


def _not_before(rule: FailureRule, delay: timedelta) -> FailureRule:
    """Return the rule with a pause of at least `delay`, if it retries."""
    if rule.action not in (FailureAction.RETRY, FailureAction.RETRY_LATER):
        return rule
    return replace(rule, action=FailureAction.RETRY_LATER, delay=max(rule.delay or timedelta(), delay))
