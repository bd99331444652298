"""Rules for errors of handlers: which errors they match, and how they are made."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.errors import ApplicationError, PermanentError, RetryAfter
from integr8s_idem.failures import FailureAction, FailureRule, dead_letter, discard, retry, retry_later, stop


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
        (lambda: retry(OSError()), "needs classes of exceptions"),  # type: ignore[arg-type]
        (lambda: stop(KeyboardInterrupt), "needs classes of exceptions"),  # type: ignore[arg-type]
        (lambda: retry(OSError, attempts=0), "attempts is 0"),
        (lambda: retry(OSError, attempts=True), "attempts is True"),
        (lambda: retry(OSError, first_pause=3, longest_pause=2), "exceeds longest_pause"),
        (lambda: retry_later(OSError, delay=-1), "non-negative"),
    ],
)
def test_an_invalid_rule_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ApplicationError, match=message):
        make()


def test_the_delay_of_retry_after_is_a_duration_or_a_number_of_seconds() -> None:
    assert RetryAfter(timedelta(minutes=5)).delay == RetryAfter(300).delay == timedelta(minutes=5)
    assert RetryAfter(-1).delay == timedelta()


def test_retry_after_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RetryAfter(5, "the cluster is full")))

    assert (error.delay, error.reason) == (timedelta(seconds=5), "the cluster is full")
    assert str(error).startswith("the handler asks for a retry after 5 s: the cluster is full.")


def test_actions_have_the_names_that_settings_use() -> None:
    assert [action.value for action in FailureAction] == ["retry", "retry_later", "dead_letter", "discard", "stop"]
