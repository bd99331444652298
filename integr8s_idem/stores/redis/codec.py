"""Encode and decode records.  Pure.

Lua assembles records from parts encoded here and from the server's clock; Python decodes them.  All
numbers are big-endian.

A record in processing, format 2:

    offset  bytes  content
         0      1  format: 2.  Formats above 3 belong to newer versions and are `Corrupt`
         1      1  status: 1 processing
         2      1  flags, see below
         3      2  attempt, 1 to 65 535
         5      7  fence in µs of the server's clock, below 2^53, the largest exact integer in Lua
        12      6  end of the lease, in ms since 1970; 0 once released
        18      4  check of the preceding 18 bytes: the XOR of their 32-bit words, the last two bytes as one word
        22     16  fingerprint, if its flag is set
         …     24  trace id (16) and span id (8), if their flag is set
         …      4  check of fingerprint and trace: their CRC-32
         …      4  check of everything that follows: its CRC-32
         …         token (16), owner in UTF-8
         …         if an earlier attempt lapsed, or this one runs alone: the byte 255, which is not valid in UTF-8, and
                   three decimal numbers separated by commas: attempts that lapsed, how many of them ran alone
                   in their process, and whether this one runs alone (0 or 1).  Versions without this history
                   read it as the end of the owner.  Later versions may append a comma and more: this one ignores it,
                   and a takeover removes it

A token of 16 zero bytes belongs to nobody: the work is scheduled, and to be tried again when the lease ends.  Until
then, the verdict is `Scheduled`; who takes the record over afterwards follows a released attempt.

A settled record, format 3, is compact, since millions of them are kept for days:

         0      1  format: 3
         1      1  32 times the status, 2 completed or 3 failed, and flags
         2      2  attempt
         4      7  fence
        11      5  time of settlement, in ms after the time of the fence
        16      4  check: the XOR of the four preceding 32-bit words and the CRC-32 of fingerprint and trace
        20     16  fingerprint, if its flag is set
         …     24  trace id and span id, if their flag is set
         …      4  failed, or with a result: check of everything that follows, its CRC-32
         …         completed: the content type in UTF-8 and a zero byte, unless it is JSON; the body
                   failed: the error in UTF-8

    flag  meaning
       1  has a fingerprint
       2  has a trace
       4  completed: has a result
       8  completed: the result is application/json; without flag 4, in format 3, it is `null` and takes no bytes
      16  completed: the result was dropped
      32  processing: the previous run was released
      64  processing: the previous run lapsed

Every single-bit error is detected, and so is nearly every other corruption.

The scripts receive these parts.  A *request* is the flags and everything from offset 22 of the new
processing record, without its history; its flag 128 means that the attempt runs alone.  An
*outcome* is the flags and everything after the trace of the new settled record: Lua copies
fingerprint and trace.  A *holder* is fence and token, which identify a reservation.  Durations
are six bytes of milliseconds.  Everything about one key is one argument, because the cost in the
driver grows with the number of arguments.

The answer to a reservation is the record after it.  A takeover replaces the trace of the previous attempt; if there is
one, the answer begins with it: a zero byte, which no record begins with, and the 24 bytes.

Settled records were also written in format 1, which had no checks, and in format 2.  Records in both formats can be
read, and taken over when their leases end.

A completed record without a result takes 20 to 60 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from integr8s_idem._util.longest_duration import LONGEST
from integr8s_idem.records import (
    JSON,
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
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoredResult,
    TraceLink,
    Verdict,
    is_other_payload,
)

SETTLED_FORMAT: Final = 3
FORMAT: Final = 2
UNCHECKED_FORMAT: Final = 1
PROCESSING: Final = 1
COMPLETED: Final = 2
FAILED: Final = 3

HAS_FINGERPRINT: Final = 1
HAS_TRACE: Final = 2
HAS_RESULT: Final = 4
IS_JSON: Final = 8
IS_DROPPED: Final = 16
WAS_RELEASED: Final = 32
HAS_LAPSED: Final = 64
RUNS_ALONE: Final = 128

HEADER_BYTES: Final = 18
TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16
TRACE_ID_BYTES: Final = 16
TRACE_BYTES: Final = 24
CHECK_BYTES: Final = 4

NULL: Final = b"null"
"""Result of a function that returns `None`, the most common result."""

_HEADER: Final = Struct(">BBBH7s6s")
_WORDS: Final = Struct(">IIIIHI")
_CHECKS: Final = Struct(">II")
_SETTLED: Final = Struct(">IIIII")
_FLAGS_OF: Final = {
    PROCESSING: HAS_FINGERPRINT | HAS_TRACE | WAS_RELEASED | HAS_LAPSED,
    COMPLETED: HAS_FINGERPRINT | HAS_TRACE | HAS_RESULT | IS_JSON | IS_DROPPED,
    FAILED: HAS_FINGERPRINT | HAS_TRACE,
}
_STATUS: Final = {
    PROCESSING: IdempotencyStatus.PROCESSING,
    COMPLETED: IdempotencyStatus.COMPLETED,
    FAILED: IdempotencyStatus.FAILED,
}
_NUMBER: Final = {status: number for number, status in _STATUS.items()}
_PREVIOUS: Final[Mapping[int, Previous]] = {
    0: Previous.NONE,
    WAS_RELEASED: Previous.RELEASED,
    HAS_LAPSED: Previous.LAPSED,
}
_FLAG_BYTES: Final = tuple(bytes((flags,)) for flags in range(256))
_HISTORY: Final = b"\xff"
"""First byte of the history of attempts."""
_PREVIOUS_TRACE: Final = b"\0"
"""First byte of an answer that begins with the trace of the previous attempt."""
_SETTLED_MARK: Final = bytes((SETTLED_FORMAT,))
_PROCESSING_MARK: Final = bytes((FORMAT,))
_PROCESSING_MARKS: Final = (bytes((UNCHECKED_FORMAT,)), _PROCESSING_MARK)
_DAMAGED: Final = "it is damaged: a checksum does not match"
_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
_LONGEST_MS: Final = LONGEST // _MILLISECOND


class UnreadableError(ValueError):
    """Bytes that are not a valid record; the message states why.  Internal to this package."""


def milliseconds(duration: timedelta) -> int:
    """Return whole milliseconds, from 0 to a century, which fit into six bytes."""
    return min(max(duration // _MILLISECOND, 0), _LONGEST_MS)


def life_ms(duration: timedelta) -> int:
    """Return whole milliseconds, at least 1: Redis rejects an expiry of 0."""
    return max(milliseconds(duration), 1)


@lru_cache(maxsize=64)
def encode_life(duration: timedelta) -> bytes:
    """Encode the lifetime of a record, at least a millisecond."""
    return life_ms(duration).to_bytes(6, "big")


@lru_cache(maxsize=64)
def encode_times(lease: timedelta, retention: timedelta) -> bytes:
    """Encode how long a reservation holds, and how long its record is kept."""
    lease_ms = milliseconds(lease)
    # If the record expired before its lease, the key could have two owners.
    retention_ms = max(life_ms(retention), lease_ms)
    return lease_ms.to_bytes(6, "big") + retention_ms.to_bytes(6, "big")


def encode_reserve(requests: Iterable[ReserveRequest]) -> list[bytes]:
    """Encode the argument of `reserve.lua` for each key: lease, retention and request."""
    lease = retention = None
    encoded, times = [], b""
    for request in requests:
        if request.lease is not lease or request.retention is not retention:  # usually the same objects in a batch
            lease, retention = request.lease, request.retention
            times = encode_times(lease, retention)
        encoded.append(times + encode_request(request))
    return encoded


def encode_request(request: ReserveRequest) -> bytes:
    """Encode flags, fingerprint, trace, checks, token and owner.

    Raises:
        ValueError: Token, fingerprint or trace have the wrong length.
    """
    flags = 0
    token = request.token
    fingerprint = request.fingerprint
    trace = request.trace
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
    extras = b""
    if request.alone:
        flags = RUNS_ALONE
    if trace is not None:
        flags |= HAS_TRACE
        extras = _trace_bytes(trace)
    if fingerprint is not None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        flags |= HAS_FINGERPRINT
        extras = fingerprint + extras
    tail = token + request.owner.encode("utf-8", "surrogatepass")
    return _FLAG_BYTES[flags] + extras + _CHECKS.pack(crc32(extras), crc32(tail)) + tail


def _trace_bytes(trace: TraceLink) -> bytes:
    packed = trace.trace_id + trace.span_id
    if len(trace.trace_id) != TRACE_ID_BYTES or len(packed) != TRACE_BYTES:
        raise ValueError("a trace has 16 bytes of trace id and 8 bytes of span id")
    return packed


def encode_holder(reservation: Reserved) -> bytes:
    """Encode fence and token, which identify a reservation."""
    return reservation.fence.to_bytes(7, "big") + reservation.token


def encode_seen(record: IdempotencyRecord) -> bytes:
    """Encode status, fence and end of the lease, which identify a record to a caller without its token."""
    lease_ms = (record.lease_until - _EPOCH) // _MILLISECOND if record.lease_until is not None else 0
    return b"%c%b%b" % (_NUMBER[record.status], record.fence.to_bytes(7, "big"), lease_ms.to_bytes(6, "big"))


def encode_completion(completion: Completion) -> bytes:
    """Encode flags, check and result.

    Raises:
        ValueError: The content type contains a zero byte.
    """
    flags = IS_DROPPED if completion.result_dropped else 0
    result = completion.result
    if result is None:
        return _FLAG_BYTES[flags]
    if result.content_type == JSON and result.body == NULL:
        return _FLAG_BYTES[flags | IS_JSON]
    if result.content_type == JSON:
        return _FLAG_BYTES[flags | HAS_RESULT | IS_JSON] + _checked(result.body)
    content_type = result.content_type.encode("utf-8", "surrogatepass")
    if b"\0" in content_type:
        raise ValueError(f"invalid content type: {result.content_type!r}")
    return _FLAG_BYTES[flags | HAS_RESULT] + _checked(b"%b\0%b" % (content_type, result.body))


def encode_failure(failure: Failure) -> bytes:
    """Encode flags, check and error."""
    return b"\0" + _checked(failure.error.encode("utf-8", "surrogatepass"))


def _checked(tail: bytes) -> bytes:
    return crc32(tail).to_bytes(CHECK_BYTES, "big") + tail


Parts: TypeAlias = tuple[int, int, int, int, int, bytes | None, TraceLink | None, bytes]
"""The fields of `Stored`."""


class Stored(NamedTuple):
    """The parts of a record."""

    status: int
    flags: int
    attempt: int
    fence: int
    time_ms: int
    fingerprint: bytes | None
    trace: TraceLink | None
    rest: bytes

    @property
    def token(self) -> bytes:
        return self.rest[:TOKEN_BYTES]

    @property
    def owner(self) -> str:
        # Used in messages only, so invalid UTF-8 in it does not make the record unreadable.
        return self.rest[TOKEN_BYTES:].partition(_HISTORY)[0].decode("utf-8", "replace")

    @property
    def history(self) -> tuple[int, int, bool]:
        """While processing: attempts that lapsed, how many of them ran alone, and whether this one runs alone."""
        _, mark, numbers = self.rest[TOKEN_BYTES:].partition(_HISTORY)
        if not mark:
            return 0, 0, False
        try:
            lapsed, lapsed_alone, alone = map(int, numbers.split(b",", 3)[:3])
        except ValueError as error:
            raise UnreadableError("its history is damaged") from error
        return lapsed, lapsed_alone, bool(alone)

    @property
    def error(self) -> str:
        return _text(self.rest, "error")

    @property
    def result(self) -> StoredResult | None:
        return _result(self.flags, self.rest)


def _result(flags: int, rest: bytes) -> StoredResult | None:
    if not flags & HAS_RESULT:
        return StoredResult(NULL) if flags & IS_JSON else None
    if flags & IS_JSON:
        return StoredResult(rest)
    content_type, separator, body = rest.partition(b"\0")
    if not separator:
        raise UnreadableError("its result has no content type")
    return StoredResult(body, _text(content_type, "content type"))


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"its {what} is not valid UTF-8") from error


def parse(raw: bytes) -> Stored:
    """Decode a record.

    Raises:
        UnreadableError: `raw` is not a valid record, or was written by a newer version.
    """
    return Stored._make(_parts_of(raw))


def _parts_of(raw: bytes) -> Parts:
    """Return the fields of `Stored`; for a verdict, making that object would take as long as reading them."""
    if raw[:1] == _SETTLED_MARK:
        return _settled_parts_of(raw)
    if raw[:1] not in _PROCESSING_MARKS:
        raise UnreadableError(_unknown_format(raw))
    if len(raw) < HEADER_BYTES:
        raise UnreadableError(f"it ends after {len(raw)} bytes")
    layout, status, flags, attempt, fence, time = _HEADER.unpack_from(raw)
    known = _FLAGS_OF.get(status)
    if known is None:
        raise UnreadableError(f"its status is {status}")
    time_ms = int.from_bytes(time, "big")
    if attempt == 0 or time_ms > _LAST_MS or not _are_valid_flags(flags, known):
        raise UnreadableError("its header is damaged")
    checks = 0 if layout == UNCHECKED_FORMAT else CHECK_BYTES
    fingerprint, trace, at = _extras(raw, flags, HEADER_BYTES + checks)
    least = TOKEN_BYTES if status == PROCESSING else 0
    if len(raw) < at + 2 * checks + least:
        raise UnreadableError(f"it ends after {len(raw)} bytes")
    rest = raw[at + 2 * checks :]
    if checks:
        _check(raw, at, rest)
    if rest and status == COMPLETED and not flags & HAS_RESULT:
        raise UnreadableError("it is longer than its header says")
    return status, flags, attempt, int.from_bytes(fence, "big"), time_ms, fingerprint, trace, rest


def _settled_parts_of(raw: bytes) -> Parts:
    if len(raw) < _SETTLED.size:
        raise UnreadableError(f"it ends after {len(raw)} bytes")
    first, second, third, fourth, check = _SETTLED.unpack_from(raw)
    status, flags, attempt = first >> 21 & 7, first >> 16 & 31, first & 0xFFFF
    if status != COMPLETED and status != FAILED:
        raise UnreadableError(f"its status is {status}")
    if attempt == 0 or flags & ~_FLAGS_OF[status]:
        raise UnreadableError("its header is damaged")
    fingerprint = trace = None
    at, extras_check = _SETTLED.size, 0
    if flags & (HAS_FINGERPRINT | HAS_TRACE):
        fingerprint, trace, at = _extras(raw, flags, at)
        extras_check = crc32(raw[_SETTLED.size : at])
    rest = b""
    if flags & HAS_RESULT or status == FAILED:
        rest = raw[at + CHECK_BYTES :]
        if raw[at : at + CHECK_BYTES] != crc32(rest).to_bytes(CHECK_BYTES, "big"):
            raise UnreadableError(_DAMAGED)
    elif len(raw) != at:
        raise UnreadableError(f"it has {len(raw)} bytes, but its header says {at}")
    if first ^ second ^ third ^ fourth ^ extras_check != check:
        raise UnreadableError(_DAMAGED)
    fence_us = second << 24 | third >> 8
    elapsed_ms = (third & 0xFF) << 32 | fourth
    return status, flags, attempt, fence_us, fence_us // 1000 + elapsed_ms, fingerprint, trace, rest


def _extras(raw: bytes, flags: int, at: int) -> tuple[bytes | None, TraceLink | None, int]:
    """Return fingerprint and trace, which begin at `at`, and the offset of their end."""
    fingerprint = trace = None
    if flags & HAS_FINGERPRINT:
        fingerprint = raw[at : at + FINGERPRINT_BYTES]
        at += FINGERPRINT_BYTES
    if flags & HAS_TRACE:
        trace = TraceLink(raw[at : at + TRACE_ID_BYTES], raw[at + TRACE_ID_BYTES : at + TRACE_BYTES])
        at += TRACE_BYTES
    return fingerprint, trace, at


def _check(raw: bytes, at: int, rest: bytes) -> None:
    first, second, third, fourth, last, check = _WORDS.unpack_from(raw)
    extras = raw[HEADER_BYTES + CHECK_BYTES : at]
    if first ^ second ^ third ^ fourth ^ last != check or (crc32(extras), crc32(rest)) != _CHECKS.unpack_from(raw, at):
        raise UnreadableError(_DAMAGED)


def _are_valid_flags(flags: int, known: int) -> bool:
    previous = WAS_RELEASED | HAS_LAPSED
    json_without_result = flags & (HAS_RESULT | IS_JSON) == IS_JSON
    return not flags & ~known and flags & previous != previous and not json_without_result


def _unknown_format(raw: bytes) -> str:
    if not raw:
        return "it is empty"
    if SETTLED_FORMAT < raw[0] < 32:
        return f"its format {raw[0]} is newer than this version supports ({SETTLED_FORMAT})"
    return "it was written by another program"


def verdict_of(request: ReserveRequest, answer: bytes, now_us: int) -> Verdict:
    """Return the verdict for `request`, given the answer of `reserve.lua`: the record after it."""
    key = request.key
    previous_trace, raw = _split(answer) if answer[:1] == _PREVIOUS_TRACE else (None, answer)
    try:
        parts = status, flags, attempt, _, time_ms, fingerprint, trace, rest = _parts_of(raw)
        offered = request.fingerprint
        if offered is not None and fingerprint is not None and is_other_payload(fingerprint, offered):
            return KeyReused(key=key, stored=fingerprint, offered=offered)
        if status == COMPLETED:
            return Completed(
                key=key,
                attempt=attempt,
                completed_at=moment(time_ms),
                result=_result(flags, rest),
                result_dropped=bool(flags & IS_DROPPED),
                trace=trace,
            )
        if status == FAILED:
            return Failed(key=key, attempt=attempt, failed_at=moment(time_ms), error=_text(rest, "error"), trace=trace)
    except UnreadableError as error:
        return Corrupt(key=key, reason=str(error))
    stored = Stored._make(parts)
    if stored.token == request.token:
        try:
            lapsed, lapsed_alone, _ = stored.history
        except UnreadableError as error:
            return Corrupt(key=key, reason=str(error))
        return Reserved(
            key=key,
            token=request.token,
            attempt=stored.attempt,
            fence=stored.fence,
            lease=request.lease,
            previous=_PREVIOUS[stored.flags & (WAS_RELEASED | HAS_LAPSED)],
            lapsed=lapsed,
            lapsed_alone=lapsed_alone,
            trace=previous_trace,
        )
    remaining = timedelta(microseconds=max(stored.time_ms * 1000 - now_us, 0))
    pending = Scheduled if stored.token == NOBODY else InProgress
    return pending(key=key, attempt=stored.attempt, retry_after=remaining, owner=stored.owner)


def _split(answer: bytes) -> tuple[TraceLink | None, bytes]:
    """Return the trace of the previous attempt, if `answer`, which begins with zero, has it, and the record."""
    record_at = 1 + TRACE_BYTES
    # A takeover writes the current format.  The record of another program may begin with zero, too.
    if answer[record_at : record_at + 1] != _PROCESSING_MARK:
        return None, answer
    trace_id, span_id = answer[1 : 1 + TRACE_ID_BYTES], answer[1 + TRACE_ID_BYTES : record_at]
    return TraceLink(trace_id, span_id), answer[record_at:]


def record_of(key: str, raw: bytes, now_us: int, life: int) -> IdempotencyRecord:
    """Decode a record; `life` is the answer of PTTL: ms, negative if it has no expiry.

    Raises:
        UnreadableError: `raw` is not a valid record.
    """
    stored = parse(raw)
    processing = stored.status == PROCESSING
    time = moment(stored.time_ms) if stored.time_ms or not processing else None
    lapsed, lapsed_alone, alone = stored.history if processing else (0, 0, False)
    return IdempotencyRecord(
        key=key,
        status=_STATUS[stored.status],
        attempt=stored.attempt,
        fence=stored.fence,
        lease_until=time if processing else None,
        settled_at=None if processing else time,
        expires_at=moment(now_us // 1000 + life) if life >= 0 else None,
        fingerprint=stored.fingerprint,
        owner=stored.owner if processing else "",
        result=stored.result,
        result_dropped=bool(stored.flags & IS_DROPPED),
        error=stored.error if stored.status == FAILED else "",
        trace=stored.trace,
        lapsed=lapsed,
        lapsed_alone=lapsed_alone,
        alone=alone,
        is_scheduled=processing and stored.time_ms > 0 and stored.token == NOBODY,
        seen_at=_EPOCH + timedelta(microseconds=now_us),
    )


def holds_lease(header: bytes, now_ms: int) -> bool:
    """Return whether a record that starts with `header` (18 bytes) has a lease now."""
    return header[:1] in _PROCESSING_MARKS and header[1:2] == b"\x01" and int.from_bytes(header[12:18], "big") > now_ms


def moment(ms: int) -> datetime:
    """Convert milliseconds since 1970 to an aware time in UTC."""
    ms = _LAST_MS if ms > _LAST_MS else ms  # faster than `min`, as are `//` and `%` than `divmod`
    return _EPOCH + timedelta(0, ms // 1_000, ms % 1_000 * 1_000)  # faster than with keywords
