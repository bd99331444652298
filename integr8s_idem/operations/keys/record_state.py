"""The state of a record at the time it was read, by the store's clock.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final

from integr8s_idem.engine.results import discarded_error
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

ALIVE_SHARE: Final = 0.5
"""Share of a lease that always remains while its owner is alive: renewals start after a third, with two attempts."""


class Lease(str, Enum):
    """State of the lease of a record in progress."""

    HELD = "held"
    LAPSED = "lapsed"
    """It expired without an outcome: its owner crashed or stalled."""
    RELEASED = "released"
    """Its owner or an operator released it."""
    SCHEDULED = "scheduled"
    """Nobody holds it: an attempt failed, and the next one is not due yet."""


@dataclass(frozen=True, slots=True)
class RecordState:
    """A record with properties that depend on the time at which it was read."""

    record: IdempotencyRecord

    @property
    def now(self) -> datetime:
        """When the record was read, by the store's clock, or by this machine's if the store does not report it."""
        return self.record.seen_at or datetime.now(UTC)

    @property
    def lease(self) -> Lease | None:
        """The state of the lease; `None` once the record is settled."""
        record = self.record
        if record.status is not IdempotencyStatus.PROCESSING:
            return None
        if record.lease_until is None:
            return Lease.RELEASED
        if record.lease_until > self.now:
            return Lease.SCHEDULED if record.is_scheduled else Lease.HELD
        # Nobody held scheduled work, so it has not crashed when it is due.
        return Lease.RELEASED if record.is_scheduled else Lease.LAPSED

    @property
    def lease_left(self) -> timedelta:
        """Time until the lease ends, or scheduled work is due; negative afterwards; zero without a lease."""
        return self.record.lease_until - self.now if self.record.lease_until is not None else timedelta()

    @property
    def discarded(self) -> str | None:
        """The error because of which a rule has discarded the work; `None` if it was not discarded."""
        return discarded_error(self.record.result)

    @property
    def reserved_at(self) -> datetime:
        """When the last run began.  A fence is the store's clock in microseconds, or slightly more."""
        return _EPOCH + timedelta(microseconds=min(max(self.record.fence, 0), _LAST_US))

    @property
    def age(self) -> timedelta:
        """Time since the record was settled, or since its last run began."""
        return self.now - (self.record.settled_at or self.reserved_at)

    def is_owner_alive(self, lease: timedelta) -> bool:
        """Return whether the owner has renewed the lease, which lasts `lease`, as recently as a live owner would."""
        return self.lease is Lease.HELD and self.lease_left > lease * ALIVE_SHARE


def status_of(found: IdempotencyRecord | Corrupt) -> str:
    """Return `processing`, `completed`, `failed` or `corrupt`."""
    return "corrupt" if isinstance(found, Corrupt) else found.status.value
