"""How a record stands at the moment it was read, by the store's clock.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final

from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

ALIVE_SHARE: Final = 0.5
"""Share of a lease that is left at least while its owner renews it: it does so after a third, with two tries."""


class Lease(str, Enum):
    """What has become of the lease of a record in progress."""

    HELD = "held"
    LAPSED = "lapsed"
    """It ended without a word: its owner crashed or stalled."""
    RELEASED = "released"
    """It was given back."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A record, and what follows from the moment at which it was read."""

    record: IdempotencyRecord

    @property
    def now(self) -> datetime:
        """When it was read, by the store's clock; by that of this machine if the store does not tell."""
        return self.record.seen_at or datetime.now(UTC)

    @property
    def lease(self) -> Lease | None:
        """`None` once settled."""
        record = self.record
        if record.status is not IdempotencyStatus.PROCESSING:
            return None
        if record.lease_until is None:
            return Lease.RELEASED
        return Lease.HELD if record.lease_until > self.now else Lease.LAPSED

    @property
    def lease_left(self) -> timedelta:
        """Until the lease ends; less than nothing once it has; nothing if there is none."""
        return self.record.lease_until - self.now if self.record.lease_until is not None else timedelta()

    @property
    def reserved_at(self) -> datetime:
        """When the last run began: a fence is the store's clock in microseconds, or a little more."""
        return _EPOCH + timedelta(microseconds=min(max(self.record.fence, 0), _LAST_US))

    @property
    def age(self) -> timedelta:
        """Since it was settled, or since its last run began."""
        return self.now - (self.record.settled_at or self.reserved_at)

    def seems_alive(self, lease: timedelta) -> bool:
        """Whether its owner has renewed the lease, of this length, as lately as one that lives does."""
        return self.lease is Lease.HELD and self.lease_left > lease * ALIVE_SHARE


def state_of(found: IdempotencyRecord | Corrupt) -> str:
    """`processing`, `completed`, `failed` or `corrupt`."""
    return "corrupt" if isinstance(found, Corrupt) else found.status.value
