"""Errors can be pickled and copied, and the documented tree is complete."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest

from integr8s_idem import errors
from integr8s_idem.errors import IdempotencyError, SettingsMistake

LEASE = timedelta(seconds=30)
EXAMPLES: list[IdempotencyError] = [
    errors.KeyReusedError("order:1", b"\x01" * 16, b"\x02" * 16),
    errors.InProgressError("order:1", 1, LEASE, "billing-7"),
    errors.ScheduledError("order:1", 1, LEASE, "billing-7"),
    errors.IdempotencyConflictError("order:1", 1, LEASE, "billing-7", LEASE),
    errors.PreviouslyFailedError("order:1", 5, "ValueError: no"),
    errors.LeaseLostError("order:1", 1, LEASE, "billing", "billing-7"),
    errors.LeaseLostError("order:1", 1, LEASE, "billing", withdrawn=True),
    errors.LeaseLostError("order:1", 1, LEASE, "billing", late=True),
    errors.HandlerTimeoutError("charge", LEASE),
    errors.HandlerCancelledError("charge"),
    errors.HandlerExitError("charge"),
    errors.HandlerExitError("charge", "PanicException: called `unwrap` on None"),
    errors.PartialFailureError({}),
    errors.TransactionAbortedError("order:1", "a deadlock"),
    errors.DiscardedError("order:1", 1, "ValueError: no"),
    errors.ServiceStoppedError("order:1", "charge", "stop(MemoryError)", "MemoryError: the ledger is damaged"),
    errors.MemberFencedError("billing", "billing-0.billing.1"),
    errors.RetryAfter(LEASE),
    errors.RetryAfter(LEASE, "the cluster is full"),
    errors.OutcomeUnknownError(LEASE),
    errors.OutcomeUnknownError(LEASE, "the bank has not answered"),
    errors.PermanentError("no such user"),
    errors.CrashedTooOftenError(5),
    errors.StepInterruptedError("ship", "order:1", "the carrier did not answer"),
    errors.InvalidKeyError("empty"),
    errors.ResultDroppedError("order:1"),
    errors.ResultDecodeError("order:1", "Receipt", "paid: Field required"),
    errors.UndecodableEventError("malformed", "invalid JSON"),
    errors.EventTooLargeError("orders", 2, 1),
    errors.PublishError("orders", "no broker"),
    errors.StoreUnavailableError("reserve", "connection refused"),
    errors.ResultNotStoredError("order:1", "connection refused"),
    errors.StoreConfigurationError("reserve", "NOAUTH"),
    errors.CorruptRecordError("order:1", "no such version"),
    errors.BrokerUnavailableError("localhost:9092", "connection refused"),
    errors.SettingsError("settings.toml", [SettingsMistake("store.url", "not a Redis URL")]),
    errors.ApplicationError("no such service"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_can_be_pickled_and_copied(error: IdempotencyError) -> None:
    for duplicate in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(duplicate) is type(error)
        assert str(duplicate) == str(error)
        assert vars(duplicate) == vars(error)


def test_every_error_class_has_an_example() -> None:
    def kinds(kind: type[IdempotencyError]) -> set[str]:
        return {kind.__name__}.union(*(kinds(child) for child in kind.__subclasses__()))

    abstract = {"IdempotencyError", "EventError", "StoreError"}

    assert {name for name in kinds(IdempotencyError) if hasattr(errors, name)} - abstract == {
        type(error).__name__ for error in EXAMPLES
    }


def test_the_module_docstring_lists_every_error() -> None:
    assert errors.__doc__ is not None

    for error in EXAMPLES:
        assert type(error).__name__ in errors.__doc__


def test_exactly_these_errors_are_retryable() -> None:
    assert {type(error).__name__ for error in EXAMPLES if error.retryable} == {
        "InProgressError",
        "IdempotencyConflictError",
        "ScheduledError",
        "LeaseLostError",
        "HandlerTimeoutError",
        "HandlerCancelledError",
        "HandlerExitError",
        "TransactionAbortedError",
        "RetryAfter",
        "OutcomeUnknownError",
        "PublishError",
        "StoreUnavailableError",
        "ResultNotStoredError",
        "BrokerUnavailableError",
    }
