"""Which records are wanted.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import KeySpace, escaped
from integr8s_idem.operations.keys.key_parser import Named
from integr8s_idem.operations.keys.record_state import Lease, Standing, state_of
from integr8s_idem.records import Corrupt, IdempotencyRecord

STATES: Final = ("processing", "completed", "failed", "corrupt")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LENGTH: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhdw])")


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that is given must hold; within one of them, any."""

    services: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    """Of records in progress: who holds, or last held, the key."""
    lease_ended: bool = False
    """Only records in progress that nobody works on."""
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    @property
    def is_all(self) -> bool:
        """Whether nothing is ruled out."""
        return self == Wanted()

    def prefix(self, key_prefix: str) -> str:
        """What all keys of such records start with."""
        return KeySpace(key_prefix, self.services[0]).root if len(self.services) == 1 else f"{key_prefix}:"

    @property
    def holding(self) -> list[str]:
        """Parts that all keys of such records hold."""
        return [f":{escaped(self.event_types[0])}:"] if len(self.event_types) == 1 else []

    def takes(self, found: IdempotencyRecord | Corrupt, told: Named) -> bool:
        """Whether it is one of them; `told`: its key, taken apart."""
        if self.services and told.scope not in self._scopes:
            return False
        if self.event_types and told.event_type not in self.event_types:
            return False
        if isinstance(found, Corrupt):
            # Nothing else of it can be read: it is shown unless something else is asked for.
            rest = (self.owners, self.lease_ended, self.older_than is not None, self.newer_than is not None)
            return "corrupt" in self.states or not (self.states or any(rest))
        return self._takes_record(found)

    def _takes_record(self, record: IdempotencyRecord) -> bool:
        if self.states and state_of(record) not in self.states:
            return False
        standing = Standing(record)
        if self.lease_ended and standing.lease not in (Lease.LAPSED, Lease.RELEASED):
            return False
        if self.owners and record.owner not in self.owners:
            return False
        if self.older_than is not None and standing.age <= self.older_than:
            return False
        return self.newer_than is None or standing.age < self.newer_than

    @property
    def _scopes(self) -> set[str]:
        # A name that is too long stands as a hash in its keys.
        return {root_scope(service) for service in self.services}

    def told(self) -> dict[str, Any]:
        """For audit lines: what was asked for, and nothing else."""
        lengths = {"older_than": self.older_than, "newer_than": self.newer_than}
        given = {
            "service": list(self.services),
            "status": list(self.states),
            "event_type": list(self.event_types),
            "owner": list(self.owners),
            "lease_ended": self.lease_ended,
            **{f"{name}_seconds": length.total_seconds() for name, length in lengths.items() if length is not None},
        }
        return {name: value for name, value in given.items() if value}


def root_scope(service: str) -> str:
    """The scope as `Named` tells it of a key of `service`."""
    raw = KeySpace("p", service).root.split(":")[1]
    return raw if raw.startswith("#") else service


def length_of(text: str) -> timedelta:
    """`90s`, `15m`, `2h`, `8d`, `1w`; also one behind the other: `1d12h`.

    Raises:
        ApplicationError: It is none.
    """
    found = _LENGTH.findall(text)
    if not found or "".join(number + unit for number, unit in found) != text:
        raise ApplicationError(f'"{text}" is no length of time; write 90s, 15m, 2h, 8d or 1d12h')
    try:
        return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in found), timedelta())
    except OverflowError:
        raise ApplicationError(f'"{text}" is longer than anything is remembered') from None


def checked_states(states: Sequence[str]) -> tuple[str, ...]:
    """Raises `ApplicationError` for one that there is not."""
    for state in states:
        if state not in STATES:
            raise ApplicationError(f'no record has the status "{state}"; there are {", ".join(STATES)}')
    return tuple(states)
