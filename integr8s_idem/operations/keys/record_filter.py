"""Filter records by service, status, event type, owner, lease and age.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import KeySpace, escaped
from integr8s_idem.operations.keys.key_parser import ParsedKey
from integr8s_idem.operations.keys.record_state import Lease, RecordState, status_of
from integr8s_idem.records import Corrupt, IdempotencyRecord

STATUSES: Final = ("processing", "completed", "failed", "corrupt")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LENGTH: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Matches records that satisfy every field that is set; one of its values suffices."""

    services: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    """Owners that hold, or last held, the key of a record in progress."""
    lease_ended: bool = False
    """Match only records in progress whose lease has ended."""
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the filter matches every record."""
        return self == RecordFilter()

    def prefix(self, key_prefix: str) -> str:
        """Return a prefix of the keys of all matching records."""
        return KeySpace(key_prefix, self.services[0]).root if len(self.services) == 1 else f"{key_prefix}:"

    @property
    def key_parts(self) -> list[str]:
        """Texts that the keys of all matching records contain."""
        return [f":{escaped(self.event_types[0])}:"] if len(self.event_types) == 1 else []

    def matches(self, found: IdempotencyRecord | Corrupt, parsed: ParsedKey) -> bool:
        """Return whether the filter matches a record with the key `parsed`."""
        if self.services and parsed.scope not in self._scopes:
            return False
        if self.event_types and parsed.event_type not in self.event_types:
            return False
        if isinstance(found, Corrupt):
            # No other property can be read: the record matches unless one of them is filtered.
            rest = (self.owners, self.lease_ended, self.older_than is not None, self.newer_than is not None)
            return "corrupt" in self.states or not (self.states or any(rest))
        return self._matches_record(found)

    def _matches_record(self, record: IdempotencyRecord) -> bool:
        if self.states and status_of(record) not in self.states:
            return False
        state = RecordState(record)
        if self.lease_ended and state.lease not in (Lease.LAPSED, Lease.RELEASED):
            return False
        if self.owners and record.owner not in self.owners:
            return False
        if self.older_than is not None and state.age <= self.older_than:
            return False
        return self.newer_than is None or state.age < self.newer_than

    @property
    def _scopes(self) -> set[str]:
        # Keys contain a hash of names that are too long.
        return {root_scope(service) for service in self.services}

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are set, for audit lines."""
        durations = {"older_than": self.older_than, "newer_than": self.newer_than}
        given = {
            "service": list(self.services),
            "status": list(self.states),
            "event_type": list(self.event_types),
            "owner": list(self.owners),
            "lease_ended": self.lease_ended,
            **{f"{name}_seconds": each.total_seconds() for name, each in durations.items() if each is not None},
        }
        return {name: value for name, value in given.items() if value}


def root_scope(service: str) -> str:
    """Return the `scope` that `ParsedKey` has for keys of `service`."""
    raw = KeySpace("p", service).root.split(":")[1]
    return raw if raw.startswith("#") else service


def parse_duration(text: str) -> timedelta:
    """Parse `90s`, `15m`, `2h`, `8d`, `1w`, or a combination such as `1d12h`.

    Raises:
        ApplicationError: `text` has another form.
    """
    found = _LENGTH.findall(text)
    if not found or "".join(number + unit for number, unit in found) != text:
        raise ApplicationError(f'invalid duration "{text}"; write 90s, 15m, 2h, 8d or 1d12h')
    try:
        return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in found), timedelta())
    except OverflowError:
        raise ApplicationError(f'the duration "{text}" is too long') from None


def check_statuses(states: Sequence[str]) -> tuple[str, ...]:
    """Return `states`, or raise `ApplicationError` for an unknown status."""
    for state in states:
        if state not in STATUSES:
            raise ApplicationError(f'invalid status "{state}"; choose from {", ".join(STATUSES)}')
    return tuple(states)
