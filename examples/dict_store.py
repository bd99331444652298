"""A minimal custom store: a dictionary with a lock, for the threads and tasks of one process.

`docs/how-to/write-a-store.md` walks through it; `tests/contract/test_examples.py` runs the contract tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from integr8s_idem.records import (
    NOBODY,
    Completed,
    Completion,
    Failed,
    Failure,
    IdempotencyRecord,
    IdempotencyStatus,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoreHealth,
    TraceLink,
    Verdict,
    is_other_payload,
)
from integr8s_idem.stores import NO_DELAY

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PROCESSING = IdempotencyStatus.PROCESSING
LONGEST = timedelta(days=36_500)


@dataclass(frozen=True)
class Row:
    """The entry of a key: the record, and the token of its owner."""

    record: IdempotencyRecord
    token: bytes
    previous: Previous

    @property
    def expires_at(self) -> datetime:
        assert self.record.expires_at is not None
        return self.record.expires_at


class DictStore:
    """`IdempotencyRepository` in a dictionary."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._last_fence = 0

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        with self._lock:
            now = self._clock()
            return [self._reserve(request, now) for request in requests]

    def _reserve(self, request: ReserveRequest, now: datetime) -> Verdict:
        row = self._alive(request.key, now)
        if row is None:
            return self._take(request, now, None, Previous.NONE)
        record = row.record
        if is_other_payload(record.fingerprint, request.fingerprint):
            assert record.fingerprint is not None
            assert request.fingerprint is not None
            return KeyReused(key=request.key, stored=record.fingerprint, offered=request.fingerprint)
        if record.status is not PROCESSING:
            return outcome(record)
        if record.lease_until is not None and row.token == request.token:
            # A retry after a lost response: return the same reservation with a new lease.
            return self._keep(request, row, now)
        if record.lease_until is not None and record.lease_until > now:
            left = record.lease_until - now
            pending = Scheduled if record.is_scheduled else InProgress
            return pending(key=request.key, attempt=record.attempt, retry_after=left, owner=record.owner)
        released = record.lease_until is None or record.is_scheduled
        previous = Previous.RELEASED if released else Previous.LAPSED
        return self._take(request, now, record, previous)

    def _take(
        self, request: ReserveRequest, now: datetime, last: IdempotencyRecord | None, previous: Previous
    ) -> Reserved:
        # Greater than any earlier fence, even after deletion; based on the clock, so that it grows across restarts.
        self._last_fence = max(self._last_fence + 1, (now - EPOCH) // timedelta(microseconds=1))
        record = IdempotencyRecord(
            key=request.key,
            status=PROCESSING,
            attempt=1 if last is None else last.attempt + 1,
            fence=self._last_fence,
            fingerprint=request.fingerprint,
            owner=request.owner,
            trace=request.trace,
        )
        if last is not None:
            # The crash limit counts these: released attempts have not crashed.
            lapsed = previous is Previous.LAPSED
            record = replace(
                record, lapsed=last.lapsed + lapsed, lapsed_alone=last.lapsed_alone + (lapsed and last.alone)
            )
        trace = None if last is None else last.trace
        return self._keep(request, Row(record, request.token, previous), now, trace)

    def _keep(
        self, request: ReserveRequest, row: Row, now: datetime, previous_trace: TraceLink | None = None
    ) -> Reserved:
        lease = min(request.lease, LONGEST)
        # A record that expires before its lease would allow two owners of the key.
        expires_at = now + min(max(request.retention, lease), LONGEST)
        record = replace(row.record, lease_until=now + lease, expires_at=expires_at, alone=request.alone)
        row = replace(row, record=record)
        self._rows[request.key] = row
        return Reserved(
            key=request.key,
            token=row.token,
            attempt=row.record.attempt,
            fence=row.record.fence,
            lease=request.lease,
            previous=row.previous,
            lapsed=row.record.lapsed,
            lapsed_alone=row.record.lapsed_alone,
            trace=previous_trace,
        )

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._renew(reservation, now, now + min(lease, LONGEST)) for reservation in reservations]

    def _renew(self, reservation: Reserved, now: datetime, until: datetime) -> bool:
        row = self._owned(reservation, now)
        if row is None or row.record.lease_until is None:
            return False
        # The record outlives its lease, so that the attempt still counts.
        expires_at = row.expires_at if row.expires_at >= until else until + (until - now)
        self._write(row, replace(row.record, lease_until=until, expires_at=expires_at))
        return True

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        with self._lock:
            now = self._clock()
            if delay > NO_DELAY:
                return [self._schedule(reservation, now, delay, retention) for reservation in reservations]
            rows = [self._owned(reservation, now) for reservation in reservations]
            for row in rows:
                if row is not None:
                    self._write(row, replace(row.record, lease_until=None))
            return [row is not None for row in rows]

    def _schedule(self, reservation: Reserved, now: datetime, delay: timedelta, retention: timedelta) -> bool:
        if self._owned(reservation, now, by=NOBODY) is not None:
            return True  # a retry after a lost response: it is scheduled already
        row = self._owned(reservation, now)
        if row is None:
            return False
        until = now + min(delay, LONGEST)
        expires_at = max(row.expires_at, until + min(retention, LONGEST))
        record = replace(row.record, lease_until=until, expires_at=expires_at, is_scheduled=True)
        # Its owner has given it up, and can write no more.
        self._rows[record.key] = replace(row, record=record, token=NOBODY)
        return True

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return self._settle(completions, IdempotencyStatus.COMPLETED)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return self._settle(failures, IdempotencyStatus.FAILED)

    def _settle(self, outcomes: Sequence[Completion] | Sequence[Failure], status: IdempotencyStatus) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._settle_one(one, status, now) for one in outcomes]

    def _settle_one(self, one: Completion | Failure, status: IdempotencyStatus, now: datetime) -> bool:
        row = self._owned(one.reservation, now)
        if row is None:
            # A retry after a lost response: the fence shows that this owner settled the record.
            there = self._alive(one.reservation.key, now)
            return there is not None and (there.record.status, there.record.fence) == (status, one.reservation.fence)
        until = now + min(one.ttl, LONGEST)
        record = replace(row.record, status=status, lease_until=None, settled_at=now, expires_at=until, owner="")
        if isinstance(one, Completion):
            record = replace(record, result=one.result, result_dropped=one.result_dropped)
        else:
            record = replace(record, error=one.error)
        self._write(row, record)
        return True

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        with self._lock:
            now = self._clock()
            rows = [self._alive(key, now) for key in keys]
        return [None if row is None else row.record for row in rows]

    async def delete(self, keys: Sequence[str]) -> int:
        with self._lock:
            now = self._clock()
            return len([self._rows.pop(key) for key in set(keys) if self._alive(key, now)])

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        for record in self._under(prefix):
            yield record

    async def count_active(self, prefix: str) -> int:
        now = self._clock()
        return sum(record.lease_until is not None and record.lease_until > now for record in self._under(prefix))

    async def ping(self) -> StoreHealth:
        start = time.perf_counter()
        with self._lock:
            latency = timedelta(seconds=time.perf_counter() - start)
        return StoreHealth(kind="dict", version="1", latency=latency, warnings=("records are lost at exit",))

    def _alive(self, key: str, now: datetime) -> Row | None:
        row = self._rows.get(key)
        if row is not None and row.expires_at <= now:
            del self._rows[key]
            return None
        return row

    def _owned(self, reservation: Reserved, now: datetime, *, by: bytes | None = None) -> Row | None:
        """Return the row that this reservation still owns, even if its lease has ended; `by`: under another token."""
        row = self._alive(reservation.key, now)
        if row is None or row.record.status is not PROCESSING:
            return None
        return row if (row.token, row.record.fence) == (by or reservation.token, reservation.fence) else None

    def _write(self, row: Row, record: IdempotencyRecord) -> None:
        self._rows[record.key] = replace(row, record=record)

    def _under(self, prefix: str) -> list[IdempotencyRecord]:
        with self._lock:
            now = self._clock()
            rows = [self._alive(key, now) for key in list(self._rows) if key.startswith(prefix)]
        return [row.record for row in rows if row is not None]


def outcome(record: IdempotencyRecord) -> Completed | Failed:
    """Return the verdict for a key whose work is settled."""
    assert record.settled_at is not None
    if record.status is IdempotencyStatus.FAILED:
        return Failed(
            key=record.key,
            attempt=record.attempt,
            failed_at=record.settled_at,
            error=record.error,
            trace=record.trace,
        )
    return Completed(
        key=record.key,
        attempt=record.attempt,
        completed_at=record.settled_at,
        result=record.result,
        result_dropped=record.result_dropped,
        trace=record.trace,
    )
