"""`IdempotencyConfig`: how the guard behaves.  A plain model, fit for nesting in settings of one's own."""

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
    """`true` is the number 1 to Python; in settings it is a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("bool_for_number", "must be a number, not true or false")
    return value


NOT_BOOL: Final = BeforeValidator(_not_bool)
"""Stands last in the annotation of a number, behind its bounds."""

LARGEST: Final = 2**31 - 1
"""What 32 bits hold, as brokers and clients count."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST), NOT_BOOL]
Interval: TypeAlias = Annotated[float, Field(ge=0, le=2_147_483), NOT_BOOL]
"""Seconds from one time to the next; 0 for never."""

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=2_147_483), NOT_BOOL]
"""A duration; the bound is what 32 bits of milliseconds hold, as brokers and clients count."""


class Section(BaseModel):
    """Base of all sections: unknown names are mistakes, values do not change, errors do not show them."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # A password may be part of an address.
        for name, value in super().__repr_args__():
            yield name, redacted(value) if isinstance(value, str) else value


class OnInProgress(str, Enum):
    """What a duplicate does while the first run is on."""

    WAIT = "wait"
    """Wait for the outcome, bounded.  A worker parks the delivery; its offset stays uncommitted."""
    RAISE = "raise"
    """`InProgressError` at once.  In a worker it counts as a failure of that delivery and is retried."""
    SKIP = "skip"
    """Leave it, outcome unknown.  A worker acknowledges: an event whose owner dies is lost.  Know why."""


class OnFailure(str, Enum):
    """What a failed run means for the next delivery."""

    RETRY = "retry"
    """Release the key, up to `max_attempts` runs, then FAILED."""
    BLOCK = "block"
    """FAILED at once: no second run until the record's ttl ends."""


def chosen(kind: type[EnumT], given: EnumT | str, name: str) -> EnumT:
    """A policy that code has given by its name.

    Raises:
        ApplicationError: It is none.
    """
    try:
        return kind(given)
    except ValueError:
        known = " or ".join(repr(each.value) for each in kind)
        raise ApplicationError(f"{name} is {known}, not {given!r}") from None


class OnStoreError(str, Enum):
    """What happens while the store gives no answer."""

    CLOSED = "closed"
    """Nothing is handled, nothing is acknowledged, nothing is lost."""
    OPEN = "open"
    """Handlers run unguarded: duplicates are possible, and counted."""


class OnKeyReused(str, Enum):
    """What a known key with another payload means."""

    RAISE = "raise"
    """`KeyReusedError`; a worker dead-letters the message."""
    RUN = "run"
    """Run the handler unguarded."""


class IdempotencyConfig(Section):
    """How the guard behaves: keys, times, policies."""

    key_prefix: KeyPrefix = "idempotency"
    """What all keys in the store start with."""
    default_ttl_seconds: Annotated[float, Field(gt=0, le=3_153_600_000), NOT_BOOL] = 3600
    """How long an outcome is remembered, from completion, by the store's clock. Longer than the topics keep events."""
    processing_timeout_seconds: Annotated[float, Field(ge=0.1, le=2_147_483), NOT_BOOL] = 300
    """The lease: after this long without renewal a worker counts as dead and its events are taken over."""
    enable_result_caching: bool = True
    """Keep what handlers return, as the answer to duplicates."""
    max_result_size_bytes: Annotated[int, Field(ge=0, le=64 * 1024 * 1024), NOT_BOOL] = 1_048_576
    """A larger result is dropped and counted; the protection stays."""
    on_in_progress: OnInProgress = OnInProgress.WAIT
    """What a duplicate does while the first run is on: wait, raise or skip."""
    wait_timeout_seconds: Seconds = 30
    """How long `manager.run` waits for a running twin before InProgressError. Workers park instead."""
    on_failure: OnFailure = OnFailure.RETRY
    """What a failed run means: retry (up to max_attempts, then FAILED) or block (FAILED at once)."""
    max_attempts: Count = 5
    """Attempts at one event before it is given up; a worker does not count crashes beside other events."""
    on_store_error: OnStoreError = OnStoreError.CLOSED
    """While the store is down: closed (nothing is handled, nothing is lost) or open (unguarded)."""
    on_key_reused: OnKeyReused = OnKeyReused.RAISE
    """Same key, other payload: raise or run."""
    local_memory_keys: Annotated[int, Field(ge=0, le=10_000_000), NOT_BOOL] = 0
    """Keys that this process completed and whose duplicates it answers by itself; deletions elsewhere are seen late."""
    hash_keys: bool = False
    """Store and show keys as hashes only: for keys that hold personal data."""

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
