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


class MyError(Exception):
    """An error of the application."""


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (retry(MyError, attempts=2), retry(ValueError, attempts=8), 0),
        (retry(MyError, attempts=8), retry(ValueError), 1),  # five attempts
        (retry(MyError, attempts=3), retry(ValueError), 0),
        (retry_later(MyError, delay=60, attempts=2), retry_later(ValueError, delay=60, attempts=8), 0),
        (retry_later(MyError, delay=60), retry_later(ValueError, delay=90), 1),
        (retry(MyError, longest_pause=60), retry(ValueError, longest_pause=90), 1),
        (retry(MyError, first_pause=1), retry(ValueError, first_pause=9), 1),
        (retry(MyError), retry(ValueError, jitter=False), 1),
        (retry(MyError, attempts=1), retry_later(ValueError, delay=1, attempts=8), 1),
    ],
    ids=str,
)
def test_of_equally_careful_rules_the_one_with_the_fewest_attempts_and_the_longest_pause_decides(
    first: FailureRule, second: FailureRule, chosen: int
) -> None:
    """The order of the errors in a group of a `TaskGroup` is that in which the tasks happened to fail."""
    errors = [MyError(), ValueError()]
    for rules in ([first, second], [second, first]):
        policy = FailurePolicy(rules)
        for order in (errors, errors[::-1]):
            assert policy.decide(ExceptionGroup("g", order), max_attempts=5) == [first, second][chosen]


def test_a_rule_with_few_attempts_does_not_shorten_the_delay_of_another_error_of_its_group() -> None:
    policy = FailurePolicy([retry_later(MyError, delay=60, attempts=2)])

    for errors in ([MyError(), RetryAfter(300)], [RetryAfter(300), MyError()]):
        assert policy.decide(ExceptionGroup("g", errors)) == retry_later(MyError, delay=300, attempts=2)


@pytest.mark.parametrize("rule", [retry(MyError), retry(MyError, attempts=9)], ids=str)
def test_an_error_without_a_rule_has_the_attempts_of_the_service(rule: FailureRule) -> None:
    policy = FailurePolicy([rule])

    for errors in ([MyError(), KeyError()], [KeyError(), MyError()]):
        decided = policy.decide(ExceptionGroup("g", errors), max_attempts=3)
        assert decided == (None if rule.attempts else rule)


def test_deeply_nested_groups_are_examined() -> None:
    group: Exception = ExceptionGroup("g", [MyError()])
    for _ in range(2_000):
        group = ExceptionGroup("g", [group])

    assert action_of(FailurePolicy([discard(MyError)]), group) is FailureAction.DISCARD


def test_a_group_that_occurs_many_times_in_another_is_examined_once() -> None:
    group: Exception = ExceptionGroup("g", [MyError()])
    for _ in range(100):
        group = ExceptionGroup("g", [group, group])

    assert action_of(FailurePolicy([discard(MyError)]), group) is FailureAction.DISCARD


class _Broken(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("cannot be checked")


class BrokenError(Exception, metaclass=_Broken):
    """An error whose class cannot be checked."""


def test_if_the_check_of_a_rule_fails_the_error_is_retried_and_no_later_rule_applies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = FailurePolicy([dead_letter(MyError), stop(BrokenError), discard(Exception)])

    assert action_of(policy, MyError()) is FailureAction.DEAD_LETTER
    assert policy.decide(KeyError()) is None
    assert "stop(BrokenError)" in caplog.text
    assert "cannot be checked" in caplog.text


@pytest.mark.parametrize("rule", [retry(MyError, attempts=1), retry_later(MyError, delay=5, attempts=1)], ids=str)
def test_the_last_attempt_of_events_that_failed_together_is_followed_by_one_alone(rule: FailureRule) -> None:
    decided = FailurePolicy([rule]).decide(MyError(), together=True)

    assert decided is not None
    assert decided.action is FailureAction.RETRY
    assert not decided.is_last(1, 1)


def test_without_a_rule_the_only_attempt_of_events_that_failed_together_is_followed_by_one_alone() -> None:
    decided = FailurePolicy().decide(MyError(), together=True, max_attempts=1)

    assert decided is not None
    assert not decided.is_last(1, 1)
    assert FailurePolicy().decide(MyError(), together=True, max_attempts=1, blocks=True) is None
    assert FailurePolicy().decide(MyError(), together=True, max_attempts=2) is None
