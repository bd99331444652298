"""Rules for errors of handlers: which errors they match, and how they are made."""

from __future__ import annotations

import pickle
import re
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem import BaseEvent, EventDispatcher, EventRouter
from integr8s_idem.errors import ApplicationError, OutcomeUnknownError, PermanentError, RetryAfter
from integr8s_idem.failures import FailureAction, FailureRule, dead_letter, discard, retry, retry_later, stop
from integr8s_idem.integrations.kafka_loops import policy_of
from integr8s_idem.reconciliation import Unknown


class OrderWithdrawnError(PermanentError):
    """An error with which a handler chooses a dead letter."""


def raised_from(error: Exception, *causes: Exception) -> Exception:
    """Return `error`, raised from the first cause, which was raised from the second, and so on."""
    last: BaseException = error
    for cause in causes:
        last.__cause__ = cause
        last = cause
    return error


def test_a_rule_matches_its_errors_and_their_subclasses() -> None:
    rule = retry(OSError, KeyError)

    assert rule.matches(OSError())
    assert rule.matches(ConnectionResetError())
    assert rule.matches(KeyError())
    assert not rule.matches(ValueError())


@pytest.mark.parametrize("causes", [(OSError(),), (KeyError(), ConnectionResetError())])
def test_a_rule_examines_causes_only_if_it_says_so(causes: tuple[Exception, ...]) -> None:
    error = raised_from(ValueError(), *causes)

    assert retry(OSError, through_causes=True).matches(error)
    assert not retry(OSError).matches(error)


def test_an_error_that_occurred_while_another_was_handled_is_not_its_cause() -> None:
    error = ValueError()
    error.__context__ = OSError()

    assert not retry(OSError, through_causes=True).matches(error)


def test_causes_that_form_a_circle_are_examined_once() -> None:
    error, cause = ValueError(), KeyError()
    error.__cause__, cause.__cause__ = cause, error

    assert not retry(OSError, through_causes=True).matches(error)


@pytest.mark.parametrize("chosen", [OrderWithdrawnError(), RetryAfter(1)], ids=lambda error: type(error).__name__)
def test_a_rule_for_all_errors_does_not_override_the_choice_of_a_handler(chosen: Exception) -> None:
    assert not retry(Exception).matches(chosen)
    assert retry(type(chosen)).matches(chosen)


def test_a_cause_does_not_override_the_choice_of_a_handler() -> None:
    error = raised_from(OrderWithdrawnError(), OSError())

    assert not retry(OSError, through_causes=True).matches(error)


def test_a_group_of_errors_matches_only_rules_that_name_a_group() -> None:
    group = ExceptionGroup("two calls failed", [OSError(), OSError()])

    assert not retry(Exception).matches(group)
    assert retry(ExceptionGroup).matches(group)


@pytest.mark.parametrize(
    ("rule", "attempt", "is_last"),
    [
        (retry(OSError), 4, False),
        (retry(OSError), 5, True),
        (retry(OSError, attempts=7), 5, False),
        (retry_later(OSError, delay=1, attempts=2), 2, True),
        (dead_letter(OSError), 1, True),
        (stop(OSError), 1_000, False),
    ],
    ids=str,
)
def test_a_rule_says_after_which_attempt_an_event_is_given_up(rule: FailureRule, attempt: int, is_last: bool) -> None:
    assert rule.is_last(attempt, 5) is is_last


def test_a_rule_is_shown_as_it_is_written() -> None:
    rule = retry(OSError, KeyError, attempts=20, first_pause=timedelta(seconds=2), jitter=False)

    assert str(rule) == "retry(OSError, KeyError, attempts=20, first_pause=2, jitter=False)"
    assert str(discard(OSError, through_causes=True)) == "discard(OSError, through_causes=True)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: discard(), "at least one class"),
        (lambda: retry(OSError()), "needs subclasses of Exception, not OSError"),  # type: ignore[arg-type]
        (lambda: stop(KeyboardInterrupt), "needs subclasses of Exception, not <class 'KeyboardInterrupt'>"),  # type: ignore[arg-type]
        (lambda: discard(BaseException), "needs subclasses of Exception, not <class 'BaseException'>"),  # type: ignore[arg-type]
        (lambda: retry(OSError, attempts=0), "attempts is 0"),
        (lambda: retry(OSError, attempts=True), "attempts is True"),
        (lambda: retry(OSError, first_pause=3, longest_pause=2), "exceeds longest_pause"),
        (lambda: retry_later(OSError, delay=-1), "non-negative"),
        (lambda: retry_later(OSError, delay=None), "needs a delay, as in retry_later"),  # type: ignore[arg-type]
        (lambda: retry(OSError, jitter="no"), "jitter is 'no', but must be True or False"),  # type: ignore[arg-type]
        (lambda: stop(OSError, through_causes=1), "through_causes is 1, but must be"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_rule_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ApplicationError, match=message):
        make()


def test_the_delay_of_retry_after_is_a_duration_or_a_number_of_seconds() -> None:
    assert RetryAfter(timedelta(minutes=5)).delay == RetryAfter(300).delay == timedelta(minutes=5)
    assert RetryAfter(-1).delay == timedelta()


@pytest.mark.parametrize("delay", [timedelta(days=36_501), timedelta.max, 1e13])
@pytest.mark.parametrize("error", [RetryAfter, OutcomeUnknownError])
def test_a_delay_of_retry_after_that_is_longer_than_a_century_is_a_century(
    error: type[RetryAfter], delay: timedelta | float
) -> None:
    assert error(delay).delay == timedelta(days=36_500)


@pytest.mark.parametrize("delay", [True, "5", None, float("nan"), float("inf"), 10**30, -(10**30)])
@pytest.mark.parametrize("error", [RetryAfter, OutcomeUnknownError])
def test_a_delay_of_retry_after_that_is_not_a_duration_is_refused(error: type[RetryAfter], delay: Any) -> None:
    with pytest.raises(ApplicationError, match=rf"{error.__name__} needs a delay, .*, not {re.escape(repr(delay))}"):
        error(delay)


def test_a_reason_that_is_not_text_is_refused() -> None:
    reason: Any = 3
    with pytest.raises(ApplicationError, match="the reason of RetryAfter is 3, but must be a string"):
        RetryAfter(5, reason)
    with pytest.raises(ApplicationError, match="the reason of Unknown is 3, but must be a string"):
        Unknown(5, reason)


@pytest.mark.parametrize(
    ("failures", "shown"),
    [
        (retry(OSError), r"retry\(OSError\)"),
        (3, "3"),
        (None, "None"),
        (OSError, "<class 'OSError'>"),
        ([OSError], "<class 'OSError'>"),
        ("retry", "'r'"),
    ],
)
def test_rules_that_are_not_a_list_of_rules_are_refused(failures: Any, shown: str) -> None:
    message = rf"failures= takes a list of rules, as in failures=\[retry\(OSError, attempts=20\)\], not {shown}"
    with pytest.raises(ApplicationError, match=message):
        EventRouter(failures=failures)
    with pytest.raises(ApplicationError, match=message):
        EventRouter().on(BaseEvent, failures=failures)
    with pytest.raises(ApplicationError, match=message):
        EventDispatcher(EventRouter(), failures=failures)
    if failures is not None:  # a loop has no rules then, not even the default ones
        with pytest.raises(ApplicationError, match=message):
            policy_of(failures)


def test_retry_after_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RetryAfter(5, "the cluster is full")))

    assert (error.delay, error.reason) == (timedelta(seconds=5), "the cluster is full")
    assert str(error).startswith("the handler asks for a retry after 5 s: the cluster is full.")


def test_actions_have_the_names_that_settings_use() -> None:
    assert [action.value for action in FailureAction] == ["retry", "retry_later", "dead_letter", "discard", "stop"]
