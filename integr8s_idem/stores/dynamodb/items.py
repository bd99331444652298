"""Convert records to DynamoDB items and back.

Times are microseconds since 1970, by DynamoDB's clock.  `status` is 1 processing, 2 completed, 3 failed; `previous` is
0 none, 1 released, 2 lapsed; `lease_until` is 0 once released or settled.  `lapsed` and `lapsed_alone` count earlier
attempts, and `alone` says that the current one runs alone; they are omitted if 0 or false.

An item in processing whose `token` is 16 zero bytes belongs to nobody: the work is scheduled, and to be tried again
when `lease_until` has passed.  Later versions may add attributes, which this one ignores.

`purge_at` is the TTL attribute of the table: whole seconds, an hour after `expires_at`.  Until then, a deleted record
stays as a tombstone of key and fence, so that no fence is used twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from integr8s_idem._util.longest_duration import limited
from integr8s_idem.records import (
    NOBODY,
    Completed,
    Failed,
    IdempotencyRecord,
    IdempotencyStatus,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoredResult,
    TraceLink,
    is_other_payload,
)
from integr8s_idem.stores.dynamodb.clock import SECOND

Item: TypeAlias = Mapping[str, Mapping[str, Any]]
"""An item in the format of the driver: `{"attempt": {"N": "1"}}`."""

PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

PURGE_DELAY: Final = 3_600 * SECOND
"""Delay between expiry and deletion, longer than any clock difference that AWS accepts, so that fences always grow."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TIME: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The latest valid time."""
_PREVIOUS: Final = (Previous.NONE, Previous.RELEASED, Previous.LAPSED)
_STATUS: Final = {
    PROCESSING: IdempotencyStatus.PROCESSING,
    COMPLETED: IdempotencyStatus.COMPLETED,
    FAILED: IdempotencyStatus.FAILED,
}
_NUMBER: Final = {status: number for number, status in _STATUS.items()}


class UnreadableError(Exception):
    """An item is not a valid record; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parsed item."""

    key: str
    status: int
    attempt: int
    fence: int
    token: bytes
    lease_until: int
    expires_at: int
    previous: Previous
    settled_at: int = 0
    fingerprint: bytes | None = None
    owner: str = ""
    trace: TraceLink | None = None
    result: StoredResult | None = None
    result_dropped: bool = False
    error: str = ""
    lapsed: int = 0
    lapsed_alone: int = 0
    alone: bool = False


def number(value: int) -> dict[str, str]:
    return {"N": str(value)}


def text(value: str) -> dict[str, str]:
    """Return a string attribute; lone surrogates, which JSON cannot contain, are escaped."""
    return {"S": value.encode("utf-8", "backslashreplace").decode("utf-8")}


def microseconds(length: timedelta) -> int:
    """Return a duration in microseconds, limited to a range from zero to a century."""
    return limited(length) // timedelta(microseconds=1)


def purge_at(expires_at: int) -> dict[str, str]:
    return number((expires_at + PURGE_DELAY) // SECOND + 1)


def times_of(request: ReserveRequest, now: int) -> dict[str, dict[str, str]]:
    """Return the end of the lease and of the record, for a new or renewed reservation."""
    lease = microseconds(request.lease)
    # If a record expired before its lease, the key could have two owners.
    expires_at = now + max(lease, microseconds(request.retention))
    return {
        "lease_until": number(now + lease),
        "expires_at": number(expires_at),
        "purge_at": purge_at(expires_at),
    }


def item_of(request: ReserveRequest, reserved: Reserved, now: int) -> dict[str, Any]:
    """Return the item of a new reservation."""
    item: dict[str, Any] = {
        "key": {"S": request.key},
        "status": number(PROCESSING),
        "attempt": number(reserved.attempt),
        "fence": number(reserved.fence),
        "token": {"B": request.token},
        "previous": number(_PREVIOUS.index(reserved.previous)),
        **times_of(request, now),
        **_history(reserved.lapsed, reserved.lapsed_alone, request.alone),
    }
    if request.fingerprint is not None:
        item["fingerprint"] = {"B": request.fingerprint}
    if request.owner:
        item["owner"] = text(request.owner)
    if request.trace is not None:
        item["trace"] = {"B": request.trace.trace_id + request.trace.span_id}
    return item


def renewed_item(request: ReserveRequest, item: Item, now: int) -> dict[str, Any]:
    """Return the item of an existing reservation with a new lease, for its owner."""
    kept = {name: value for name, value in item.items() if name != "alone"}
    return {**kept, **times_of(request, now), **_history(0, 0, request.alone)}


def _history(lapsed: int, lapsed_alone: int, alone: bool) -> dict[str, dict[str, Any]]:
    """Return the attributes about crashed attempts, which most records do not have."""
    found: dict[str, dict[str, Any]] = {}
    if lapsed:
        found["lapsed"] = number(lapsed)
    if lapsed_alone:
        found["lapsed_alone"] = number(lapsed_alone)
    if alone:
        found["alone"] = {"BOOL": True}
    return found


def has_expired(item: Item, now: int) -> bool:
    """Whether a record has expired, even if the rest of it is corrupt; an empty item counts as expired."""
    if not item:
        return True
    try:
        return int(item["expires_at"]["N"]) <= now
    except (KeyError, ValueError):
        return False


def fence_of(item: Item) -> int:
    """Return the last fence of an expired record; 0 for none."""
    try:
        return int(item["fence"]["N"])
    except (KeyError, ValueError):
        return 0


def entry_of(item: Item) -> Entry:
    """Parse an item.

    Raises:
        UnreadableError: The item is not a record, or has a format that this version does not know.
    """
    try:
        entry = _entry(item)
    except (KeyError, ValueError, IndexError) as error:
        raise UnreadableError(f"its attributes are not a valid record ({type(error).__name__}: {error})") from error
    if entry.status not in _STATUS:
        raise UnreadableError(f"its status {entry.status} is unknown to this version")
    if entry.status != PROCESSING and not entry.settled_at:
        raise UnreadableError("it is settled, but settled_at is missing")
    return entry


def _entry(item: Item) -> Entry:
    def optional(name: str, kind: str) -> Any:
        return item[name][kind] if name in item else None

    result, trace = optional("result", "B"), optional("trace", "B")
    return Entry(
        key=item["key"]["S"],
        status=_number(item, "status"),
        attempt=_number(item, "attempt"),
        fence=_number(item, "fence"),
        token=bytes(item["token"]["B"]),
        lease_until=_number(item, "lease_until"),
        expires_at=_number(item, "expires_at"),
        previous=_PREVIOUS[_number(item, "previous")],
        settled_at=_number(item, "settled_at") if "settled_at" in item else 0,
        fingerprint=optional("fingerprint", "B"),
        owner=optional("owner", "S") or "",
        trace=None if trace is None else TraceLink(trace[:16], trace[16:]),
        result=None if result is None else StoredResult(result, item["content_type"]["S"]),
        result_dropped=bool(optional("result_dropped", "BOOL")),
        error=optional("error", "S") or "",
        lapsed=_number(item, "lapsed") if "lapsed" in item else 0,
        lapsed_alone=_number(item, "lapsed_alone") if "lapsed_alone" in item else 0,
        alone=bool(optional("alone", "BOOL")),
    )


def _number(item: Item, name: str) -> int:
    value = int(item[name]["N"])
    if not 0 <= value <= _MAX_TIME:
        raise ValueError(f"{name} is {value}")
    return value


def holds(entry: Entry, reserved: Reserved, now: int, *, by: bytes | None = None) -> bool:
    """Whether the reservation still owns the record, with another token if `by` is given."""
    is_owner = (entry.status, entry.fence, entry.token) == (PROCESSING, reserved.fence, by or reserved.token)
    return is_owner and entry.expires_at > now


def existing_verdict(
    request: ReserveRequest, entry: Entry, now: int
) -> InProgress | Scheduled | Completed | Failed | KeyReused | None:
    """Return the verdict of an existing record on `request`; `None` if the key can be reserved."""
    stored, offered = entry.fingerprint, request.fingerprint
    if stored is not None and offered is not None and is_other_payload(stored, offered):
        return KeyReused(key=request.key, stored=stored, offered=offered)
    if entry.status != PROCESSING:
        return _outcome(entry)
    if entry.lease_until <= now or entry.token == request.token:
        return None
    left = timedelta(microseconds=entry.lease_until - now)
    pending = Scheduled if entry.token == NOBODY else InProgress
    return pending(key=request.key, attempt=entry.attempt, retry_after=left, owner=entry.owner)


def _outcome(entry: Entry) -> Completed | Failed:
    settled_at = _moment(entry.settled_at)
    if entry.status == FAILED:
        return Failed(key=entry.key, attempt=entry.attempt, failed_at=settled_at, error=entry.error, trace=entry.trace)
    return Completed(
        key=entry.key,
        attempt=entry.attempt,
        completed_at=settled_at,
        result=entry.result,
        result_dropped=entry.result_dropped,
        trace=entry.trace,
    )


def record_of(entry: Entry, now: int) -> IdempotencyRecord:
    """Convert an entry to a record, read at `now`."""
    processing = entry.status == PROCESSING
    return IdempotencyRecord(
        key=entry.key,
        status=_STATUS[entry.status],
        attempt=entry.attempt,
        fence=entry.fence,
        lease_until=_moment(entry.lease_until) if processing and entry.lease_until else None,
        settled_at=None if processing else _moment(entry.settled_at),
        expires_at=_moment(entry.expires_at),
        fingerprint=entry.fingerprint,
        owner=entry.owner,
        result=entry.result,
        result_dropped=entry.result_dropped,
        error=entry.error,
        trace=entry.trace,
        lapsed=entry.lapsed if processing else 0,
        lapsed_alone=entry.lapsed_alone if processing else 0,
        alone=processing and entry.alone,
        is_scheduled=processing and entry.lease_until > 0 and entry.token == NOBODY,
        seen_at=_moment(now),
    )


def seen_version(record: IdempotencyRecord) -> dict[str, int]:
    """Return status, fence and end of the lease, which identify the version of an item without its token."""
    lease_until = 0 if record.lease_until is None else (record.lease_until - _EPOCH) // timedelta(microseconds=1)
    return {"status": _NUMBER[record.status], "fence": record.fence, "lease_until": lease_until}


def _moment(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
