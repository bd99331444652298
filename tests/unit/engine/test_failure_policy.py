"""The rule that applies to an error, among those of the handler, its router, the settings and the defaults."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import BaseModel, ValidationError

from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.errors import LeaseLostError, PermanentError, RetryAfter, TransactionAbortedError
from integr8s_idem.failures import FailureAction, FailureRule, dead_letter, discard, retry, retry_later, stop


class Order(BaseModel):
    amount: int


def invalid_order() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate({"amount": "much"})
    return caught.value


def action_of(policy: FailurePolicy, error: Exception, *, together: bool = False) -> FailureAction | None:
    rule = policy.decide(error, together=together)
    return None if rule is None else rule.action


def test_the_first_rule_that_matches_decides() -> None:
    policy = FailurePolicy([discard(ConnectionResetError), retry(OSError, attempts=20), stop(Exception)])

    assert action_of(policy, ConnectionResetError()) is FailureAction.DISCARD
    assert policy.decide(OSError()) == retry(OSError, attempts=20)
    assert action_of(policy, KeyError()) is FailureAction.STOP


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (invalid_order(), FailureAction.DEAD_LETTER),
        (PermanentError(), FailureAction.DEAD_LETTER),
        (RetryAfter(60), FailureAction.RETRY_LATER),
        (ConnectionResetError(), None),
        (TypeError(), None),
        (ValueError(), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_without_rules_only_invalid_data_and_the_choices_of_handlers_are_special(
    error: Exception, action: FailureAction | None
) -> None:
    assert action_of(FailurePolicy(), error) is action


def test_a_rule_precedes_the_defaults() -> None:
    assert action_of(FailurePolicy([retry(ValidationError)]), invalid_order()) is FailureAction.RETRY


@pytest.mark.parametrize(
    "error",
    [
        TransactionAbortedError("order:1", "deadlock detected"),
        LeaseLostError("order:1", 1, timedelta(seconds=30), "billing"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_rules_do_not_apply_to_errors_that_say_nothing_about_the_event(error: Exception) -> None:
    assert FailurePolicy([discard(Exception)]).decide(error) is None


@pytest.mark.parametrize(
    ("rule", "attempts", "delay"),
    [
        (retry(RetryAfter, attempts=20), 20, 60),
        (retry_later(RetryAfter, delay=30), None, 60),
        (retry_later(RetryAfter, delay=90), None, 90),
    ],
    ids=str,
)
def test_a_rule_for_retry_after_does_not_shorten_its_delay(rule: FailureRule, attempts: int | None, delay: int) -> None:
    decided = FailurePolicy([rule]).decide(RetryAfter(60))

    assert decided is not None
    assert (decided.action, decided.attempts) == (FailureAction.RETRY_LATER, attempts)
    assert decided.delay == timedelta(seconds=delay)


def test_of_a_group_of_errors_the_most_careful_decision_counts() -> None:
    policy = FailurePolicy([discard(KeyError), dead_letter(IndexError), stop(MemoryError)])

    def action(*errors: Exception) -> FailureAction | None:
        return action_of(policy, ExceptionGroup("several calls failed", errors))

    assert action(KeyError(), KeyError()) is FailureAction.DISCARD
    assert action(KeyError(), IndexError()) is FailureAction.DEAD_LETTER
    assert action(KeyError(), OSError()) is None  # retried
    assert action(OSError(), RetryAfter(5), KeyError()) is FailureAction.RETRY_LATER
    assert action(RetryAfter(5), ExceptionGroup("and one more", [MemoryError()])) is FailureAction.STOP


def test_of_several_delays_the_longest_counts() -> None:
    rule = FailurePolicy().decide(ExceptionGroup("two calls failed", [RetryAfter(5), RetryAfter(9), RetryAfter(7)]))

    assert rule is not None
    assert rule.delay == timedelta(seconds=9)


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (KeyError(), FailureAction.RETRY),  # would be discarded
        (invalid_order(), FailureAction.RETRY),
        (PermanentError(), FailureAction.DEAD_LETTER),  # a handler that raises it means the whole batch
        (MemoryError(), FailureAction.STOP),
        (OSError(), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_events_that_failed_together_are_retried_before_a_rule_ends_them(
    error: Exception, action: FailureAction | None
) -> None:
    policy = FailurePolicy([discard(KeyError), stop(MemoryError)])

    assert action_of(policy, error, together=True) is action


def test_events_that_failed_together_are_retried_even_if_one_attempt_is_allowed() -> None:
    rule = FailurePolicy([discard(KeyError)]).decide(KeyError(), together=True)

    assert rule is not None
    assert not rule.is_last(1, 1)
