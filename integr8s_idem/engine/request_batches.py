"""Make the requests of a batch, by native code if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

from integr8s_idem._util import speedups
from integr8s_idem._util.tokens import iter_tokens, new_tokens
from integr8s_idem.engine.work import Isolation, Work
from integr8s_idem.keys import LONGEST_PLAIN, Key, KeySpace
from integr8s_idem.records import ReserveRequest

MakeOne: TypeAlias = Callable[[Work], ReserveRequest]
MakeMany: TypeAlias = Callable[[Sequence[Work]], list[ReserveRequest]]

RETENTION_IN_LEASES: Final = 10
"""An unsettled record is kept for at least this many leases, so that the attempts of a crashing event are counted."""


def retention_rule(default: timedelta, lease: timedelta) -> Callable[[timedelta | None], timedelta]:
    """Return a function that computes how long an unsettled record is kept from the ttl of its work."""
    longest_unsettled = RETENTION_IN_LEASES * lease
    return lambda ttl: max(default if ttl is None else ttl, longest_unsettled)


def batch_maker(
    make_one: MakeOne,
    space: KeySpace,
    lease: timedelta,
    owner: str,
    retention_of: Callable[[timedelta | None], timedelta],
) -> MakeMany:
    """Return a function that makes the requests for many works, the same as `make_one` does for each."""
    if speedups.native is None or space.hash_keys:
        return partial(_make_many, space, lease, owner, retention_of)
    maker = speedups.native.RequestMaker(
        Work,
        Key,
        ReserveRequest,
        alone=Isolation.ALONE,
        root=space.root,
        longest_plain=LONGEST_PLAIN,
        lease=lease,
        owner=owner,
        retention_of=retention_of,
    )

    # `_make_many` in Rust.
    def make(works: Sequence[Work]) -> list[ReserveRequest]:
        made: list[ReserveRequest] = maker.make(list(works), new_tokens(len(works)), make_one)
        for index, work in enumerate(works):
            if work.trace is not None:  # native code makes requests without it
                made[index] = replace(made[index], trace=work.trace)
        return made

    return make


def _make_many(
    space: KeySpace,
    lease: timedelta,
    owner: str,
    retention_of: Callable[[timedelta | None], timedelta],
    works: Sequence[Work],
) -> list[ReserveRequest]:
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
                alone=work.isolation is Isolation.ALONE,
            )
        )
    return made
