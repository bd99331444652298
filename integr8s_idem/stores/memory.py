"""Records in the memory of this process, for tests and first steps; they are lost on exit."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from integr8s_idem._util.longest_duration import limited
from integr8s_idem.diagnostics import Code, StoreWarning
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
    StoredResult,
    StoreHealth,
    TraceLink,
    Verdict,
    is_other_payload,
)
from integr8s_idem.stores import NO_DELAY, Surveyed

__all__ = ["MemoryIdempotencyRepository"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SWEEP_EVERY: Final = 1_024


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One record; `lease_until` is `None` once the reservation was released."""

    status: IdempotencyStatus
    attempt: int
    fence: int
    token: bytes
    lease_until: datetime | None
    expires_at: datetime
    previous: Previous
    fingerprint: bytes | None
    owner: str
    trace: TraceLink | None
    settled_at: datetime | None = None
    result: StoredResult | None = None
    result_dropped: bool = False
    error: str = ""
    lapsed: int = 0
    lapsed_alone: int = 0
    alone: bool = False


class MemoryIdempotencyRepository:
    """`IdempotencyRepository` in a dictionary, for the asyncio tasks of one process.

    Every method is atomic, since none of them awaits before it returns.  It is not thread-safe.

    Args:
        clock: Returns the store's time, with a time zone; by default the wall clock in UTC.
    """

    def __init__(self, *, clock: Callable[[], datetime] | None = None) -> None:
        self._clock = clock or _utc_now
        self._entries: dict[str, _Entry] = {}
        # Fences must increase after deletions, even if the clock does not advance.
        self._highest_fence = 0
        self._until_sweep = _SWEEP_EVERY

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        now = self._clock()
        self._sweep(now, len(requests))
        return [self._reserve(request, now) for request in requests]

    def _reserve(self, request: ReserveRequest, now: datetime) -> Verdict:
        entry = self._living(request.key, now)
        if entry is None:
            return self._take(request, now, None, Previous.NONE)
        stored, offered = entry.fingerprint, request.fingerprint
        if stored is not None and offered is not None and is_other_payload(stored, offered):
            return KeyReused(key=request.key, stored=stored, offered=offered)
        if entry.status is not IdempotencyStatus.PROCESSING:
            return _outcome(request.key, entry)
        released = entry.lease_until is None
        if entry.token == request.token and not released:
            # The caller's own reservation: the answer to an earlier call was lost.
            entry.lease_until = now + limited(request.lease)
            entry.expires_at = now + _life(request)
            entry.alone = request.alone
            return _reserved(request, entry)
        if entry.lease_until is not None and entry.lease_until > now:
            remaining = entry.lease_until - now
            verdict = Scheduled if entry.token == NOBODY else InProgress
            return verdict(key=request.key, attempt=entry.attempt, retry_after=remaining, owner=entry.owner)
        is_free = released or entry.token == NOBODY
        previous = Previous.RELEASED if is_free else Previous.LAPSED
        return self._take(request, now, entry, previous)

    def _take(self, request: ReserveRequest, now: datetime, last: _Entry | None, previous: Previous) -> Reserved:
        # This is higher than the fence of the last attempt, too.
        fence = max(self._highest_fence + 1, (now - _EPOCH) // _MICROSECOND)
        self._highest_fence = fence
        has_lapsed = previous is Previous.LAPSED
        entry = self._entries[request.key] = _Entry(
            status=IdempotencyStatus.PROCESSING,
            attempt=1 if last is None else last.attempt + 1,
            fence=fence,
            token=request.token,
            lease_until=now + limited(request.lease),
            expires_at=now + _life(request),
            previous=previous,
            fingerprint=request.fingerprint,
            owner=request.owner,
            trace=request.trace,
            lapsed=0 if last is None else last.lapsed + has_lapsed,
            lapsed_alone=0 if last is None else last.lapsed_alone + (has_lapsed and last.alone),
            alone=request.alone,
        )
        return _reserved(request, entry, None if last is None else last.trace)

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        now = self._clock()
        return [self._renew(reservation, now, limited(lease)) for reservation in reservations]

    def _renew(self, reservation: Reserved, now: datetime, lease: timedelta) -> bool:
        entry = self._held(reservation, now)
        if entry is None or entry.lease_until is None:
            return False
        entry.lease_until = now + lease
        if entry.expires_at < entry.lease_until:
            # Keep the record longer than its lease, so that the attempt is still counted.
            entry.expires_at = now + 2 * lease
        return True

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        now = self._clock()
        return [self._complete(completion, now) for completion in completions]

    def _complete(self, completion: Completion, now: datetime) -> bool:
        entry, answer = self._settle(completion.reservation, IdempotencyStatus.COMPLETED, completion.ttl, now)
        if entry is not None:
            entry.result = completion.result
            entry.result_dropped = completion.result_dropped
        return answer

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        now = self._clock()
        return [self._fail(failure, now) for failure in failures]

    def _fail(self, failure: Failure, now: datetime) -> bool:
        entry, answer = self._settle(failure.reservation, IdempotencyStatus.FAILED, failure.ttl, now)
        if entry is not None:
            entry.error = failure.error
        return answer

    def _settle(
        self, reservation: Reserved, status: IdempotencyStatus, ttl: timedelta, now: datetime
    ) -> tuple[_Entry | None, bool]:
        """Return the entry if this call settled it, and whether its outcome is from this reservation."""
        entry = self._held(reservation, now)
        if entry is None:
            existing = self._living(reservation.key, now)
            return None, existing is not None and existing.status is status and existing.fence == reservation.fence
        entry.status = status
        entry.settled_at = now
        entry.expires_at = now + limited(ttl)
        entry.lease_until = None
        entry.owner = ""
        return entry, True

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        now = self._clock()
        if delay > NO_DELAY:
            return [self._schedule(reservation, now, delay, retention) for reservation in reservations]
        return [self._release(reservation, now) for reservation in reservations]

    def _schedule(self, reservation: Reserved, now: datetime, delay: timedelta, retention: timedelta) -> bool:
        if self._held(reservation, now, by=NOBODY) is not None:
            return True  # by an earlier call, whose answer was lost
        entry = self._held(reservation, now)
        if entry is None:
            return False
        entry.token = NOBODY
        entry.lease_until = now + limited(delay)
        entry.expires_at = max(entry.expires_at, now + limited(limited(delay) + limited(retention)))
        return True

    def _release(self, reservation: Reserved, now: datetime) -> bool:
        entry = self._held(reservation, now)
        if entry is None:
            return False
        entry.lease_until = None
        return True

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        now = self._clock()
        entries = [(key, self._living(key, now)) for key in keys]
        return [None if entry is None else _record(key, entry, now) for key, entry in entries]

    async def delete(self, keys: Sequence[str]) -> int:
        now = self._clock()
        existing = {key for key in keys if self._living(key, now) is not None}
        for key in existing:
            del self._entries[key]
        return len(existing)

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        for key in [key for key in self._entries if key.startswith(prefix)]:
            now = self._clock()
            entry = self._living(key, now)
            if entry is not None:
                yield _record(key, entry, now)

    async def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        async for record in self.scan(prefix):
            yield Surveyed([record] if all(part in record.key for part in holding) else [], 1)

    async def size(self) -> int:
        return len(self._entries)

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        now = self._clock()
        return [self._end_lease(record, now) for record in seen]

    def _end_lease(self, record: IdempotencyRecord, now: datetime) -> bool:
        entry = self._if_unchanged(record, now)
        if entry is None or entry.status is not IdempotencyStatus.PROCESSING:
            return False
        entry.lease_until = None
        return True

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        now = self._clock()
        return [self._forget(record, now) for record in seen]

    def _forget(self, record: IdempotencyRecord, now: datetime) -> bool:
        if self._if_unchanged(record, now) is None:
            return False
        del self._entries[record.key]
        return True

    async def count_active(self, prefix: str) -> int:
        now = self._clock()
        return sum(
            key.startswith(prefix)
            and entry.status is IdempotencyStatus.PROCESSING
            and entry.lease_until is not None
            and entry.lease_until > now
            and entry.expires_at > now
            for key, entry in self._entries.items()
        )

    async def ping(self) -> StoreHealth:
        start = time.perf_counter()
        self._clock()
        return StoreHealth(
            kind="memory",
            version="",
            latency=timedelta(seconds=time.perf_counter() - start),
            warnings=(
                StoreWarning(
                    Code.STORE_NOT_PERSISTENT,
                    "records are kept in this process only",
                    "they are lost when it exits",
                    "use Redis",
                ),
            ),
        )

    def _living(self, key: str, now: datetime) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= now:
            del self._entries[key]
            return None
        return entry

    def _held(self, reservation: Reserved, now: datetime, *, by: bytes | None = None) -> _Entry | None:
        """Return the entry if this reservation still owns it, with another token if `by` is given."""
        entry = self._living(reservation.key, now)
        if entry is None or entry.status is not IdempotencyStatus.PROCESSING:
            return None
        return entry if (entry.token, entry.fence) == (by or reservation.token, reservation.fence) else None

    def _if_unchanged(self, record: IdempotencyRecord, now: datetime) -> _Entry | None:
        """Return the entry if it has not changed since `record` was read."""
        entry = self._living(record.key, now)
        if entry is None or (entry.status, entry.fence, entry.lease_until) != (
            record.status,
            record.fence,
            record.lease_until,
        ):
            return None
        return entry

    def _sweep(self, now: datetime, requests: int) -> None:
        """Delete expired entries, at a cost proportional to the number of requests."""
        self._until_sweep -= requests
        if self._until_sweep > 0:
            return
        self._entries = {key: entry for key, entry in self._entries.items() if entry.expires_at > now}
        self._until_sweep = max(_SWEEP_EVERY, len(self._entries))


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _life(request: ReserveRequest) -> timedelta:
    # If the record expired before its lease, the key could have two owners.
    return limited(max(request.retention, request.lease))


def _reserved(request: ReserveRequest, entry: _Entry, trace: TraceLink | None = None) -> Reserved:
    """Return the verdict; `trace` is that of the previous attempt, which a repeated request no longer finds."""
    return Reserved(
        key=request.key,
        token=entry.token,
        attempt=entry.attempt,
        fence=entry.fence,
        lease=request.lease,
        previous=entry.previous,
        lapsed=entry.lapsed,
        lapsed_alone=entry.lapsed_alone,
        trace=trace,
    )


def _outcome(key: str, entry: _Entry) -> Completed | Failed:
    assert entry.settled_at is not None
    if entry.status is IdempotencyStatus.FAILED:
        return Failed(key=key, attempt=entry.attempt, failed_at=entry.settled_at, error=entry.error, trace=entry.trace)
    return Completed(
        key=key,
        attempt=entry.attempt,
        completed_at=entry.settled_at,
        result=entry.result,
        result_dropped=entry.result_dropped,
        trace=entry.trace,
    )


def _record(key: str, entry: _Entry, now: datetime) -> IdempotencyRecord:
    processing = entry.status is IdempotencyStatus.PROCESSING
    return IdempotencyRecord(
        key=key,
        status=entry.status,
        attempt=entry.attempt,
        fence=entry.fence,
        lease_until=entry.lease_until,
        settled_at=entry.settled_at,
        expires_at=entry.expires_at,
        fingerprint=entry.fingerprint,
        owner=entry.owner,
        result=entry.result,
        result_dropped=entry.result_dropped,
        error=entry.error,
        trace=entry.trace,
        lapsed=entry.lapsed if processing else 0,
        lapsed_alone=entry.lapsed_alone if processing else 0,
        alone=processing and entry.alone,
        is_scheduled=processing and entry.token == NOBODY and entry.lease_until is not None,
        seen_at=now,
    )
