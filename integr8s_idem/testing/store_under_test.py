"""The store under test, and helpers of the contract suite."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from integr8s_idem.records import (
    Completion,
    Failure,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository

LEASE = timedelta(seconds=30)
RETENTION = timedelta(seconds=900)
TTL = timedelta(seconds=3_600)
SLACK = timedelta(seconds=5)
"""Real time that may pass within a test."""
RESULT = StoredResult(b'{"receipt": 1}')

STATES = ("processing", "lapsed", "released", "completed", "failed")


@dataclass(frozen=True, slots=True)
class StoreUnderTest:
    """A store, and the operations that the suite needs in addition to the Protocol."""

    repository: IdempotencyRepository
    advance: Callable[[timedelta], Awaitable[None]]
    """Advances the time for all leases and expiries, by a virtual clock or by making the records older."""
    spoil: Callable[[str], Awaitable[None]] | None = None
    """Makes the record of a key unreadable; `None` if this store cannot contain unreadable records."""
    largest_result: int = 1_048_576
    """Maximum size of a stored result in bytes; larger results are marked as dropped."""


class SteppedClock:
    """A clock for stores that accept one; it only moves when it is advanced."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    async def advance(self, duration: timedelta) -> None:
        """For `StoreUnderTest.advance`."""
        self.now += duration


def new_key() -> str:
    return f"contract:{uuid.uuid4().hex}:work"


def new_trace() -> TraceLink:
    return TraceLink(os.urandom(16), os.urandom(8))


def wish(
    key: str,
    *,
    token: bytes | None = None,
    lease: timedelta = LEASE,
    retention: timedelta = RETENTION,
    fingerprint: bytes | None = None,
    owner: str = "",
    trace: TraceLink | None = None,
    alone: bool = False,
) -> ReserveRequest:
    return ReserveRequest(
        key=key,
        token=token or os.urandom(16),
        lease=lease,
        retention=retention,
        fingerprint=fingerprint,
        owner=owner,
        trace=trace,
        alone=alone,
    )


async def ask(store: StoreUnderTest, request: ReserveRequest) -> Verdict:
    (verdict,) = await store.repository.reserve([request])
    return verdict


async def take(store: StoreUnderTest, key: str, *, fingerprint: bytes | None = None) -> Reserved:
    verdict = await ask(store, wish(key, fingerprint=fingerprint))
    assert isinstance(verdict, Reserved)
    return verdict


async def complete(store: StoreUnderTest, reservation: Reserved, result: StoredResult | None = RESULT) -> bool:
    (answer,) = await store.repository.complete([Completion(reservation=reservation, ttl=TTL, result=result)])
    return answer


async def fail(store: StoreUnderTest, reservation: Reserved, error: str = "no such account") -> bool:
    (answer,) = await store.repository.fail([Failure(reservation=reservation, ttl=TTL, error=error)])
    return answer


async def lapse(store: StoreUnderTest) -> None:
    """Advance the time until leases have expired, but not the records."""
    await store.advance(LEASE + SLACK)


async def write(store: StoreUnderTest, verb: str, reservation: Reserved) -> bool:
    """Call one of the four write operations of an owner by name."""
    if verb == "complete":
        return await complete(store, reservation)
    if verb == "fail":
        return await fail(store, reservation)
    if verb == "renew":
        return (await store.repository.renew([reservation], LEASE))[0]
    return (await store.repository.release([reservation]))[0]


async def bring_into(store: StoreUnderTest, state: str, reservation: Reserved) -> None:
    """Bring the record of a reservation into one of `STATES`."""
    if state == "lapsed":
        await lapse(store)
    elif state != "processing":
        verb = {"released": "release", "completed": "complete", "failed": "fail"}[state]
        assert await write(store, verb, reservation)
