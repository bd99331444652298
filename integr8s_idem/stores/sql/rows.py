"""Convert rows to verdicts and records."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from integr8s_idem._util.longest_duration import limited
from integr8s_idem.records import (
    NOBODY,
    Completed,
    Completion,
    Corrupt,
    Failed,
    Failure,
    IdempotencyRecord,
    IdempotencyStatus,
    InProgress,
    KeyReused,
    Pending,
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoredResult,
    TraceLink,
    Verdict,
    is_other_payload,
)
from integr8s_idem.stores.sql.schema import COMPLETED, FAILED, PROCESSING

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PREVIOUS: Final = (Previous.NONE, Previous.RELEASED, Previous.LAPSED)
_STATUS: Final = {
    PROCESSING: IdempotencyStatus.PROCESSING,
    COMPLETED: IdempotencyStatus.COMPLETED,
    FAILED: IdempotencyStatus.FAILED,
}
_NUMBER: Final = {status: number for number, status in _STATUS.items()}
_NUMBERS: Final = (
    "attempt",
    "fence",
    "previous",
    "lease_until",
    "settled_at",
    "expires_at",
    "lapsed",
    "lapsed_alone",
    "history_fence",
)
_UNREADABLE: Final = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""Errors raised by values that this code never writes."""

LOCKED_RETRY_AFTER: Final = timedelta(seconds=1)
"""Delay before the next request for a row that a transaction locks."""

_MAX_TIME: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The latest valid time."""


def escaped(text: str) -> str:
    """Escape `text` for all databases: PostgreSQL rejects NUL, and drivers reject lone surrogates."""
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return text.encode("unicode_escape").decode("ascii")


def unescaped(stored: str) -> str:
    return stored.encode("ascii").decode("unicode_escape")


@lru_cache(maxsize=256)  # lengths come from settings, so there are few
def microseconds(length: timedelta) -> int:
    """Return a duration in microseconds, limited to a range from zero to a century."""
    return limited(length) // timedelta(microseconds=1)


def verdict_of(request: ReserveRequest, row: Any, now: int) -> Verdict:
    """Return the verdict on `request` for the row after `reserve`."""
    try:
        return _verdict(request, row, now)
    except _UNREADABLE as error:
        return Corrupt(key=request.key, reason=_mismatch(error))


def _verdict(request: ReserveRequest, row: Any, now: int) -> Verdict:
    fault = _fault(row)
    if fault:
        return Corrupt(key=request.key, reason=fault)
    stored, offered = row.fingerprint, request.fingerprint
    if stored is not None and offered is not None and is_other_payload(bytes(stored), offered):
        return KeyReused(key=request.key, stored=bytes(stored), offered=offered)
    if row.status == PROCESSING and row.lease_until is not None and bytes(row.token) == request.token:
        lapsed, lapsed_alone, _ = _history(row)
        return Reserved(
            key=request.key,
            token=request.token,
            attempt=row.attempt,
            fence=row.fence,
            lease=request.lease,
            previous=_PREVIOUS[row.previous],
            lapsed=lapsed,
            lapsed_alone=lapsed_alone,
            trace=_trace(row.previous_trace),
        )
    if row.status == PROCESSING:
        left = timedelta(microseconds=max(0, (row.lease_until or now) - now))
        pending = Scheduled if _is_scheduled(row) else InProgress
        return pending(key=request.key, attempt=row.attempt, retry_after=left, owner=unescaped(row.owner))
    if row.status == FAILED:
        return Failed(
            key=request.key,
            attempt=row.attempt,
            failed_at=_moment(row.settled_at),
            error=unescaped(row.error),
            trace=_trace(row.trace),
        )
    return Completed(
        key=request.key,
        attempt=row.attempt,
        completed_at=_moment(row.settled_at),
        result=_result(row),
        result_dropped=bool(row.result_dropped),
        trace=_trace(row.trace),
    )


def _is_scheduled(row: Any) -> bool:
    return row.status == PROCESSING and row.lease_until is not None and bytes(row.token) == NOBODY


def _history(row: Any) -> tuple[int, int, bool]:
    """Return the number of lapsed attempts, how many of those ran alone, and whether the current attempt does."""
    if row.status != PROCESSING or row.history_fence != row.fence:
        return 0, 0, False
    return row.lapsed, row.lapsed_alone, bool(row.alone)


def newly_reserved(request: ReserveRequest, row: Any) -> Reserved | None:
    """Return the reservation if the statement that returned `row` has inserted it, and otherwise `None`.

    Such a row needs no checks, because all its values come from that statement.
    """
    if row.fence != row.read_at or row.token != request.token or row.attempt != 1:
        return None
    return Reserved(key=request.key, token=request.token, attempt=1, fence=row.fence, lease=request.lease)


def is_final(verdict: Verdict, row: Any, now: int) -> bool:
    """Whether `verdict` needs no takeover or renewal, for a row that was left unchanged or has just been inserted."""
    if isinstance(verdict, Reserved):
        # The lease of an older reservation must be renewed.
        return bool(row.fence == now)
    if isinstance(verdict, Corrupt):
        return True
    lapsed = isinstance(verdict, Pending) and not verdict.retry_after
    return bool(row.expires_at > now) and not lapsed


def in_progress_elsewhere(request: ReserveRequest) -> InProgress:
    """Return the verdict on a row that a transaction locks, whose attempt is not visible."""
    return InProgress(key=request.key, attempt=1, retry_after=LOCKED_RETRY_AFTER, owner="an open transaction")


def record_of(row: Any) -> IdempotencyRecord | Corrupt:
    """Convert a row to a record."""
    try:
        return _record(row)
    except _UNREADABLE as error:
        return Corrupt(key=row.key, reason=_mismatch(error))


def _record(row: Any) -> IdempotencyRecord | Corrupt:
    fault = _fault(row)
    if fault:
        return Corrupt(key=row.key, reason=fault)
    processing = row.status == PROCESSING
    lapsed, lapsed_alone, alone = _history(row)
    return IdempotencyRecord(
        key=row.key,
        status=_STATUS[row.status],
        attempt=row.attempt,
        fence=row.fence,
        lease_until=_moment(row.lease_until) if processing and row.lease_until is not None else None,
        settled_at=None if processing else _moment(row.settled_at),
        expires_at=_moment(row.expires_at),
        fingerprint=None if row.fingerprint is None else bytes(row.fingerprint),
        owner=unescaped(row.owner) if processing else "",
        result=_result(row),
        result_dropped=bool(row.result_dropped),
        error=unescaped(row.error),
        trace=_trace(row.trace),
        lapsed=lapsed,
        lapsed_alone=lapsed_alone,
        alone=alone,
        is_scheduled=_is_scheduled(row),
        seen_at=_moment(row.read_at),
    )


def seen_version(record: IdempotencyRecord) -> tuple[str, int, int, int]:
    """Return key, status, fence and end of the lease, which identify the version of a row without its token."""
    lease_until = 0 if record.lease_until is None else (record.lease_until - _EPOCH) // timedelta(microseconds=1)
    return record.key, _NUMBER[record.status], record.fence, lease_until


def reservation_parameters(request: ReserveRequest) -> dict[str, Any]:
    """Return the parameters of one row for `reserve`."""
    lease, trace = microseconds(request.lease), request.trace
    return {
        "key": request.key,
        "token": request.token,
        "lease": lease,
        # If a record expired before its lease, the key could have two owners.
        "retention": max(lease, microseconds(request.retention)),
        "fingerprint": request.fingerprint,
        "owner": escaped(request.owner),
        "trace": None if trace is None else trace.trace_id + trace.span_id,
        "alone": request.alone,
    }


def _fault(row: Any) -> str:
    if row.status not in _STATUS:
        return f"its status {row.status} is unknown to this version"
    if row.status != PROCESSING and row.settled_at is None:
        return "it is settled, but settled_at is missing"
    for name in _NUMBERS:
        found = getattr(row, name)
        if found is not None and not (isinstance(found, int) and 0 <= found <= _MAX_TIME):
            return f"its {name} is invalid: {found!r:.40}"
    return ""


def _mismatch(error: Exception) -> str:
    return f"its columns do not hold a valid record ({type(error).__name__}: {error})"


def _result(row: Any) -> StoredResult | None:
    return None if row.result is None else StoredResult(bytes(row.result), unescaped(row.content_type))


def _trace(raw: bytes | None) -> TraceLink | None:
    return None if raw is None else TraceLink(bytes(raw[:16]), bytes(raw[16:]))


def _moment(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


def outcome_parameters(outcome: Completion | Failure) -> dict[str, Any]:
    """Return the parameters of one row for `complete` and `fail`."""
    reservation = outcome.reservation
    result, dropped, error = None, False, ""
    if isinstance(outcome, Completion):
        result, dropped = outcome.result, outcome.result_dropped
    else:
        error = outcome.error
    return {
        "of_key": reservation.key,
        "of_fence": reservation.fence,
        "of_token": reservation.token,
        "ttl": microseconds(outcome.ttl),
        "of_result": None if result is None else result.body,
        "of_content_type": None if result is None else escaped(result.content_type),
        "of_result_dropped": dropped,
        "of_error": escaped(error),
    }
