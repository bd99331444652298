"""A minimal model of a store, with which the contract suite compares answers.

It has one dictionary, whole seconds and no fences: the suite only checks that fences grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

RESERVED: Final = "Reserved"
IN_PROGRESS: Final = "InProgress"
SCHEDULED: Final = "Scheduled"
COMPLETED: Final = "Completed"
FAILED: Final = "Failed"
KEY_REUSED: Final = "KeyReused"


@dataclass(frozen=True, slots=True)
class Owner:
    """One reservation of the model."""

    key: str
    token: bytes
    turn: int
    """Grows with every reservation, like a fence."""


@dataclass(slots=True)
class ModelRecord:
    """One record of the model; times are seconds on the model's clock."""

    owner: Owner
    attempt: int
    previous: str
    fingerprint: bytes | None
    lease_until: int
    expires: int
    status: str = RESERVED
    released: bool = False
    scheduled: bool = False
    outcome: object = None
    lapsed: int = 0
    lapsed_alone: int = 0
    alone: bool = False
    trace: object = None
    previous_trace: object = None
    """Trace of the previous attempt."""


def _differ(one: bytes, other: bytes) -> bool:
    """Whether two fingerprints of the same field set differ; those without one have the same."""

    def parts(fingerprint: bytes) -> tuple[bytes, bytes]:
        return (fingerprint[:4], fingerprint[4:]) if fingerprint[0] & 128 else (b"", fingerprint)

    (set_of_one, digest_of_one), (set_of_other, digest_of_other) = parts(one), parts(other)
    return set_of_one == set_of_other and digest_of_one != digest_of_other


@dataclass(slots=True)
class Model:
    """A store that is simple enough to be obviously correct."""

    now: int = 0
    turns: int = 0
    records: dict[str, ModelRecord] = field(default_factory=dict)

    def record(self, key: str) -> ModelRecord | None:
        """Return the current record, or `None`."""
        found = self.records.get(key)
        return found if found is not None and found.expires > self.now else None

    def reserve(
        self,
        key: str,
        token: bytes,
        lease: int,
        retention: int,
        fingerprint: bytes | None,
        alone: bool,
        trace: object,
    ) -> tuple[str, ModelRecord]:
        """Return the name of the verdict and its record."""
        found = self.record(key)
        if found is not None and found.status == RESERVED:
            previous = "released" if found.released or found.scheduled else "lapsed"
        else:
            previous = "none"

        def take() -> tuple[str, ModelRecord]:
            taken = self._take(key, token, lease, retention, fingerprint, found, previous)
            taken.alone, taken.trace = alone, trace
            return RESERVED, taken

        if found is None:
            return take()
        if found.fingerprint and fingerprint and _differ(found.fingerprint, fingerprint):
            return KEY_REUSED, found
        if found.status != RESERVED:
            return found.status, found
        if found.released:
            return take()
        if found.owner.token == token and not found.scheduled:
            found.lease_until, found.expires, found.alone = self.now + lease, self.now + retention, alone
            return RESERVED, found
        if found.lease_until > self.now:
            return SCHEDULED if found.scheduled else IN_PROGRESS, found
        return take()

    def _take(
        self,
        key: str,
        token: bytes,
        lease: int,
        retention: int,
        fingerprint: bytes | None,
        last: ModelRecord | None,
        previous: str,
    ) -> ModelRecord:
        self.turns += 1
        has_lapsed = previous == "lapsed"
        self.records[key] = ModelRecord(
            owner=Owner(key, token, self.turns),
            attempt=last.attempt + 1 if last is not None else 1,
            previous=previous,
            fingerprint=fingerprint,
            lease_until=self.now + lease,
            expires=self.now + retention,
            previous_trace=last.trace if last is not None else None,
            lapsed=last.lapsed + has_lapsed if last is not None else 0,
            lapsed_alone=last.lapsed_alone + (has_lapsed and last.alone) if last is not None else 0,
        )
        return self.records[key]

    def owned(self, owner: Owner) -> ModelRecord | None:
        """Return the record if this reservation still owns it."""
        found = self.record(owner.key)
        return found if found is not None and found.owner == owner and found.status == RESERVED else None

    def held(self, owner: Owner) -> ModelRecord | None:
        """Return the record if this reservation still owns it, and has not scheduled it."""
        found = self.owned(owner)
        return None if found is None or found.scheduled else found

    def renew(self, owner: Owner, lease: int) -> bool:
        found = self.held(owner)
        if found is None or found.released:
            return False
        found.lease_until = self.now + lease
        if found.expires < found.lease_until:
            found.expires = self.now + 2 * lease
        return True

    def release(self, owner: Owner) -> bool:
        found = self.held(owner)
        if found is None:
            return False
        found.released = True
        return True

    def schedule(self, owner: Owner, delay: int, retention: int) -> bool:
        found = self.owned(owner)
        if found is None:
            return False
        if not found.scheduled:
            found.released, found.scheduled = False, True
            found.lease_until = self.now + delay
            found.expires = max(found.expires, self.now + delay + retention)
        return True

    def settle(self, owner: Owner, status: str, ttl: int, outcome: object) -> bool:
        """Complete or fail a record, depending on `status`."""
        found = self.held(owner)
        if found is None:
            current = self.record(owner.key)
            return current is not None and current.owner == owner and current.status == status
        found.status, found.expires, found.outcome = status, self.now + ttl, outcome
        return True

    def delete(self, key: str) -> int:
        there = self.record(key) is not None
        self.records.pop(key, None)
        return int(there)

    def active(self) -> int:
        """Return the number of active leases."""
        living = [record for key in self.records if (record := self.record(key)) is not None]
        return sum(
            record.status == RESERVED and not record.released and record.lease_until > self.now for record in living
        )
