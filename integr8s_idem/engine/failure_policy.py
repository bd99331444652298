"""Decide what happens after a failed run of a handler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from integr8s_idem.config.idempotency import LARGEST
from integr8s_idem.errors import LeaseLostError, PermanentError, RetryAfter, TransactionAbortedError
from integr8s_idem.failures import DEFAULT_RULES, FailureAction, FailureRule

logger = logging.getLogger(__name__)

_NO_FAILURES: Final = (TransactionAbortedError, LeaseLostError)
"""Errors that say nothing about the event: rules do not apply to them."""

_RETRY: Final = FailureRule(FailureAction.RETRY, (Exception,))
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

    def decide(
        self, error: Exception, *, together: bool = False, max_attempts: int = LARGEST, blocks: bool = False
    ) -> FailureRule | None:
        """Return the rule for an attempt that failed with `error`; `None` if no rule matches.

        Args:
            error: The error of the handler.
            together: Whether several events of a batch failed with this error, and only one may have caused it.
            max_attempts: Maximum attempts for rules that do not say how many, and without a rule.
            blocks: Whether an attempt to which no rule applies is the last one.
        """
        if isinstance(error, _NO_FAILURES):
            return None
        rule = self._decide(error, max_attempts)
        if together and _hits_innocent(rule, error, max_attempts, blocks=blocks):
            return _RETRY_ALONE
        return rule

    def _decide(self, error: Exception, max_attempts: int) -> FailureRule | None:
        """Return the most careful decision about `error`, or about the errors in it if no rule matches the group."""
        decided, pending, seen = list[FailureRule | None](), [error], set[int]()
        while pending:  # no recursion: Python limits its depth, but not that of groups
            each = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            rule = self._rule_for(each)
            if rule is None and isinstance(each, ExceptionGroup):
                pending += each.exceptions
            else:
                decided.append(rule)
        chosen = max(decided, key=lambda rule: _care(rule, max_attempts))
        # No error of a group is retried before its delay.
        delays = [rule.delay for rule in decided if rule is not None and rule.delay is not None]
        return _not_before(chosen, max(delays)) if chosen is not None and delays else chosen

    def _rule_for(self, error: Exception) -> FailureRule | None:
        for rule in (*self.rules, *DEFAULT_RULES):
            try:
                matches = rule.matches(error)
            except Exception:
                # Nobody knows whether it matches, so a later rule must not discard the event instead.
                logger.exception(
                    "cannot check whether %s matches an error: the event is retried as without rules", rule
                )
                return None
            if matches:
                return _not_before(rule, error.delay) if isinstance(error, RetryAfter) else rule
        return None


def most_attempts(rules: Iterable[FailureRule]) -> int:
    """Return the largest number of attempts that a rule allows; 0 if none says how many."""
    return max((rule.attempts or 0 for rule in rules), default=0)


_CARE: Final = (
    FailureAction.DISCARD,
    FailureAction.DEAD_LETTER,
    FailureAction.RETRY,
    FailureAction.RETRY_LATER,
    FailureAction.STOP,
)


def _care(rule: FailureRule | None, max_attempts: int) -> tuple[object, ...]:
    """Return how careful a decision is: of several errors, the most careful one decides, in any order."""
    careful = rule or _RETRY
    return (
        _CARE.index(careful.action),
        -(careful.attempts or max_attempts),
        *(pause or timedelta() for pause in (careful.delay, careful.longest_pause, careful.first_pause)),
        not careful.jitter,
        rule is not None,
    )


def _hits_innocent(rule: FailureRule | None, error: Exception, max_attempts: int, *, blocks: bool) -> bool:
    """Whether the decision ends events that failed together, though only one may be the cause.

    A handler that raises `PermanentError` for a whole batch means all of its events.  Only first attempts are made
    together.
    """
    if rule is None:
        return max_attempts == 1 and not blocks
    if rule.action is FailureAction.DISCARD:
        return True
    return rule.is_last(1, max_attempts) and not isinstance(error, PermanentError)


def _not_before(rule: FailureRule, delay: timedelta) -> FailureRule:
    """Return the rule with a pause of at least `delay`, if it retries."""
    if rule.action not in (FailureAction.RETRY, FailureAction.RETRY_LATER):
        return rule
    return replace(rule, action=FailureAction.RETRY_LATER, delay=max(rule.delay or timedelta(), delay))
