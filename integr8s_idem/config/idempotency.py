"""`IdempotencyConfig`: the behavior of the guard.  A plain model that can be nested in other settings."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from integr8s_idem.config.urls import redacted
from integr8s_idem.errors import ApplicationError

EnumT = TypeVar("EnumT", bound=Enum)

KeyPrefix: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


def _not_bool(value: object) -> object:
    """Reject booleans, which Python would accept as the numbers 0 and 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("bool_for_number", "must be a number, not true or false")
    return value


NOT_BOOL: Final = BeforeValidator(_not_bool)
"""Place it last in the annotation of a number, after its bounds."""

LARGEST: Final = 2**31 - 1
"""Largest signed 32-bit integer, the limit of brokers and clients."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST), NOT_BOOL]
Interval: TypeAlias = Annotated[float, Field(ge=0, le=2_147_483), NOT_BOOL]
"""Interval in seconds; 0 means never."""

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=2_147_483), NOT_BOOL]
"""Duration in seconds; the limit is 32 bits of milliseconds, as in brokers and clients."""


class Section(BaseModel):
    """Base class of sections: rejects unknown names, is immutable, and hides values in errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # An address may contain a password.
        for name, value in super().__repr_args__():
            yield name, redacted(value) if isinstance(value, str) else value


class OnInProgress(str, Enum):
    """What a duplicate does while the first run is in progress."""

    WAIT = "wait"
    """Wait for the outcome, up to a limit.  A worker parks the delivery; its offset stays uncommitted."""
    RAISE = "raise"
    """Raise `InProgressError` at once.  In a worker, the delivery fails and is retried."""
    SKIP = "skip"
    """Skip it, with unknown outcome.  A worker acknowledges the delivery: if the owner dies, the event is lost."""


class OnFailure(str, Enum):
    """How a failed run affects the next delivery."""

    RETRY = "retry"
    """Release the key for up to `max_attempts` runs, then mark it FAILED."""
    BLOCK = "block"
    """Mark it FAILED at once: no second run until the record expires."""


def chosen(kind: type[EnumT], given: EnumT | str, name: str) -> EnumT:
    """Return the member of `kind` for a member or its value.

    Raises:
        ApplicationError: `given` is not a valid value.
    """
    try:
        return kind(given)
    except ValueError:
        known = " or ".join(repr(each.value) for each in kind)
        raise ApplicationError(f"{name} must be {known}, not {given!r}") from None


class OnStoreError(str, Enum):
    """What workers do while the store is unavailable."""

    CLOSED = "closed"
    """Handle and acknowledge nothing; nothing is lost."""
    OPEN = "open"
    """Run handlers unguarded: duplicates are possible, and counted."""


class OnKeyReused(str, Enum):
    """What happens if a key is reused with a different payload."""

    RAISE = "raise"
    """Raise `KeyReusedError`; a worker dead-letters the message."""
    RUN = "run"
    """Run the handler unguarded."""


class IdempotencyConfig(Section):
    """Behavior of the guard: keys, times, policies."""

    key_prefix: KeyPrefix = "idempotency"
    """Prefix of all keys in the store."""
    default_ttl_seconds: Annotated[float, Field(gt=0, le=3_153_600_000), NOT_BOOL] = 3600
    """How long outcomes are kept, from completion, by the store's clock. Should exceed the retention of the topics."""
    processing_timeout_seconds: Annotated[float, Field(ge=0.1, le=2_147_483), NOT_BOOL] = 300
    """The lease: a worker that does not renew it for this long is considered dead, and its events are taken over."""
    enable_result_caching: bool = True
    """Store the results of handlers and return them to duplicates."""
    max_result_size_bytes: Annotated[int, Field(ge=0, le=64 * 1024 * 1024), NOT_BOOL] = 1_048_576
    """Larger results are dropped and counted; duplicates are still detected."""
    on_in_progress: OnInProgress = OnInProgress.WAIT
    """What a duplicate does while the first run is in progress: wait, raise or skip."""
    wait_timeout_seconds: Seconds = 30
    """How long `manager.run` waits for a run in progress before InProgressError. Workers park the delivery instead."""
    on_failure: OnFailure = OnFailure.RETRY
    """After a failed run: retry (up to max_attempts, then FAILED) or block (FAILED at once)."""
    max_attempts: Count = 5
    """Attempts per event before it is given up; workers do not count crashes while other events were running."""
    on_store_error: OnStoreError = OnStoreError.CLOSED
    """While the store is unavailable: closed (handle nothing, lose nothing) or open (run unguarded)."""
    on_key_reused: OnKeyReused = OnKeyReused.RAISE
    """If a key is reused with a different payload: raise, or run unguarded."""
    local_memory_keys: Annotated[int, Field(ge=0, le=10_000_000), NOT_BOOL] = 0
    """Number of completed keys cached in memory to answer duplicates; deletions by other processes are noticed late."""
    hash_keys: bool = False
    """Store and display keys only as hashes, for keys that contain personal data."""

    @property
    def ttl(self) -> timedelta:
        """`default_ttl_seconds`."""
        return timedelta(seconds=self.default_ttl_seconds)

    @property
    def lease(self) -> timedelta:
        """`processing_timeout_seconds`."""
        return timedelta(seconds=self.processing_timeout_seconds)

    @property
    def wait_timeout(self) -> timedelta:
        """`wait_timeout_seconds`."""
        return timedelta(seconds=self.wait_timeout_seconds)
