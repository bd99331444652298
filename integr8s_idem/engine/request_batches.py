"""Make the requests of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from integr8s_idem._util.tokens import iter_tokens
from integr8s_idem.engine.work import Isolation, Work
from integr8s_idem.keys import KeySpace
from integr8s_idem.records import ReserveRequest

RetentionRule: TypeAlias = Callable[[timedelta | None], timedelta]
"""Computes how long an unsettled record is kept from the ttl of its work."""

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_ALONE: Final = Isolation.ALONE

RETENTION_IN_LEASES: Final = 10
"""An unsettled record is kept for at least this many leases, so that the attempts of a crashing event are counted."""


def retention_rule(default: timedelta, lease: timedelta) -> RetentionRule:
    """Return the rule for work whose ttl is `default` unless it has its own."""
    longest_unsettled = RETENTION_IN_LEASES * lease
    return lambda ttl: max(default if ttl is None else ttl, longest_unsettled)


def requests_of(
    works: Sequence[Work], space: KeySpace, lease: timedelta, owner: str, retention_of: RetentionRule
) -> list[ReserveRequest]:
    """Return the reservation requests for `works`, the same as `StoreClient.request` makes for each."""
    made: list[ReserveRequest] = []
    tokens = iter_tokens(len(works))
    ttl, retention = None, retention_of(None)
    for work in works:
        key = space.full(work.key)  # may raise an error: before the work gets a token
        if not work.token:
            work.token = next(tokens)
        if work.ttl is not ttl:  # usually the same object in the whole batch
            ttl, retention = work.ttl, retention_of(work.ttl)
        made.append(
            ReserveRequest(
                key=key,
                token=work.token,
                lease=lease,
                retention=retention,
                fingerprint=work.fingerprint,
                owner=owner,
                trace=work.trace,
                alone=work.isolation is _ALONE,
            )
        )
    return made
