"""Encoding of records in Redis: records survive a round trip, and damage is detected."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from integr8s_idem.records import (
    NOBODY,
    Completed,
    Completion,
    Corrupt,
    Failed,
    Failure,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores.redis import codec
from integr8s_idem.stores.redis.batches import MOST_BYTES, MOST_KEYS, slices
from tests.support import stored
from tests.support.stored import checked, flips, settled_earlier, unchecked

LEASE = timedelta(seconds=30)
NOW_US = 1_800_000_000_000_000
NOW_MS = NOW_US // 1000

_TRACES = st.none() | st.builds(TraceLink, st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8))
_REQUESTS = st.builds(
    ReserveRequest,
    key=st.just("k"),
    token=st.binary(min_size=16, max_size=16),
    lease=st.just(LEASE),
    retention=st.just(LEASE),
    fingerprint=st.none() | st.binary(min_size=16, max_size=16),
    owner=st.text(max_size=20),
    trace=_TRACES,
)
_ANY_TEXT = st.text(st.characters(codec=None), max_size=30)
_CONTENT_TYPES = st.just("application/json") | st.text(st.characters(exclude_characters="\0"), max_size=20)
_RESULTS = st.none() | st.builds(StoredResult, st.binary(max_size=50), _CONTENT_TYPES)
_ATTEMPTS = st.integers(1, 65_535)
_FENCES = st.integers(0, 2**53 - 1)


def processing(request: ReserveRequest, attempt: int = 1, fence: int = NOW_US, previous: int = 0) -> bytes:
    """Return a record as reserve.lua writes it."""
    encoded = codec.encode_request(request)
    header = bytes((2, codec.PROCESSING, encoded[0] + previous)) + attempt.to_bytes(2, "big") + fence.to_bytes(7, "big")
    return checked(header + (NOW_MS + 30_000).to_bytes(6, "big")) + encoded[1:]


def settled(status: int, record: bytes, outcome: bytes) -> bytes:
    return stored.settled(status, record, outcome[0], outcome[1:], NOW_MS)


RESERVED = Reserved(key="k", token=b"t" * 16, attempt=1, fence=NOW_US, lease=LEASE)


def reservation_of(request: ReserveRequest) -> Reserved:
    return Reserved(key=request.key, token=request.token, attempt=1, fence=NOW_US, lease=LEASE)


def duplicate_of(request: ReserveRequest) -> ReserveRequest:
    token = bytes(byte ^ 255 for byte in request.token)
    return ReserveRequest(key="k", token=token, lease=LEASE, retention=LEASE)


@given(request=_REQUESTS, attempt=_ATTEMPTS, fence=_FENCES, previous=st.sampled_from([0, 32, 64]))
def test_an_owner_gets_its_reservation_again(request: ReserveRequest, attempt: int, fence: int, previous: int) -> None:
    verdict = codec.verdict_of(request, processing(request, attempt, fence, previous), NOW_US)

    assert isinstance(verdict, Reserved)
    assert (verdict.token, verdict.attempt, verdict.fence) == (request.token, attempt, fence)
    assert verdict.previous is {0: Previous.NONE, 32: Previous.RELEASED, 64: Previous.LAPSED}[previous]


@given(request=_REQUESTS, previous=st.sampled_from([32, 64]), trace=st.binary(min_size=24, max_size=24))
def test_a_takeover_gets_the_trace_of_the_previous_attempt(
    request: ReserveRequest, previous: int, trace: bytes
) -> None:
    record = processing(request, 2, previous=previous)
    link = TraceLink(trace[:16], trace[16:])

    untraced = codec.verdict_of(request, record, NOW_US)
    traced = codec.verdict_of(request, b"\0" + trace + record, NOW_US)

    assert isinstance(untraced, Reserved)
    assert untraced.trace is None
    assert traced == replace(untraced, trace=link)


@given(request=_REQUESTS, trace=st.binary(min_size=24, max_size=24))
def test_only_an_intact_record_follows_the_trace_of_the_previous_attempt(request: ReserveRequest, trace: bytes) -> None:
    record = processing(request, 2, previous=64)

    assert isinstance(codec.verdict_of(request, b"\0", NOW_US), Corrupt)
    for raw in (b"", record[:-1], record + b"x", unchecked(record), *flips(record)):
        assert isinstance(codec.verdict_of(request, b"\0" + trace + raw, NOW_US), Corrupt)


@given(request=_REQUESTS, attempt=_ATTEMPTS)
def test_a_duplicate_sees_the_owner_of_a_reservation(request: ReserveRequest, attempt: int) -> None:
    verdict = codec.verdict_of(duplicate_of(request), processing(request, attempt), NOW_US)

    expected = Scheduled if request.token == NOBODY else InProgress
    assert verdict == expected(key="k", attempt=attempt, retry_after=LEASE, owner=request.owner)


@given(request=_REQUESTS, attempt=_ATTEMPTS)
def test_everybody_sees_when_scheduled_work_is_due(request: ReserveRequest, attempt: int) -> None:
    record = processing(replace(request, token=NOBODY), attempt)

    verdict = codec.verdict_of(duplicate_of(request), record, NOW_US)

    assert verdict == Scheduled(key="k", attempt=attempt, retry_after=LEASE, owner=request.owner)


@given(request=_REQUESTS, result=_RESULTS, dropped=st.booleans())
def test_a_result_is_decoded_completely(request: ReserveRequest, result: StoredResult | None, dropped: bool) -> None:
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result, result_dropped=dropped)

    raw = settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))
    verdict = codec.verdict_of(duplicate_of(request), raw, NOW_US)

    assert isinstance(verdict, Completed)
    assert (verdict.result, verdict.result_dropped, verdict.trace) == (result, dropped, request.trace)
    assert verdict.completed_at == codec.moment(NOW_MS)


@given(request=_REQUESTS, error=_ANY_TEXT)
def test_an_error_is_decoded_completely(request: ReserveRequest, error: str) -> None:
    failure = Failure(reservation=reservation_of(request), ttl=LEASE, error=error)

    raw = settled(codec.FAILED, processing(request), codec.encode_failure(failure))
    verdict = codec.verdict_of(duplicate_of(request), raw, NOW_US)

    assert isinstance(verdict, Failed)
    assert (verdict.error, verdict.trace) == (error, request.trace)


@pytest.mark.scenario(92)
@given(
    raw=st.binary(max_size=120)
    | st.builds(bytes.__add__, st.sampled_from([b"\1", b"\2", b"\3"]), st.binary(max_size=120))
)
def test_arbitrary_bytes_decode_to_a_verdict_without_an_exception(raw: bytes) -> None:
    request = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE)

    verdict = codec.verdict_of(request, raw, NOW_US)

    assert verdict.key == "k"
    assert isinstance(verdict, Corrupt) or raw[:1] in {b"\1", b"\2", b"\3"}


@pytest.mark.scenario(94)
@settings(max_examples=30)
@given(request=_REQUESTS, result=_RESULTS, error=_ANY_TEXT)
def test_a_flipped_bit_makes_a_record_corrupt(request: ReserveRequest, result: StoredResult | None, error: str) -> None:
    reserved = reservation_of(request)
    outcome = codec.encode_completion(Completion(reservation=reserved, ttl=LEASE, result=result))
    failure = codec.encode_failure(Failure(reservation=reserved, ttl=LEASE, error=error))
    held = processing(request)

    for record in (held, settled(codec.COMPLETED, held, outcome), settled(codec.FAILED, held, failure)):
        for raw in flips(record):
            assert isinstance(codec.verdict_of(duplicate_of(request), raw, NOW_US), Corrupt)


@pytest.mark.parametrize("length", [16, 24, 40])
def test_a_checksum_detects_damage_to_itself_and_to_the_next_byte(length: int) -> None:
    """Damage to two adjacent bytes is detected, even where one checksum covers header, fingerprint and trace."""
    intact = crc32(bytes(length))

    assert all((crc32(bytes((byte,)) + bytes(length - 1)) ^ intact) >> 8 for byte in range(1, 256))


@settings(max_examples=30)
@given(request=_REQUESTS, result=_RESULTS, error=_ANY_TEXT)
def test_a_flipped_bit_never_makes_a_settled_record_active(
    request: ReserveRequest, result: StoredResult | None, error: str
) -> None:
    reserved, held = reservation_of(request), processing(request)
    done = codec.encode_completion(Completion(reservation=reserved, ttl=LEASE, result=result))
    given_up = codec.encode_failure(Failure(reservation=reserved, ttl=LEASE, error=error))

    for record in (settled(codec.COMPLETED, held, done), settled(codec.FAILED, held, given_up)):
        assert not any(codec.holds_lease(raw, NOW_MS) for raw in flips(record))
    # Counting reads only the first 18 bytes, without checksums: format, status and the end of the lease decide.
    hidden = {bit // 8 for bit, raw in enumerate(flips(held)) if not codec.holds_lease(raw, NOW_MS)}
    assert hidden <= {0, 1, *range(12, 18)}


@pytest.mark.scenario(92)
@given(request=_REQUESTS, result=_RESULTS, cut=st.integers(1, 30), extra=st.binary(min_size=1, max_size=9))
def test_a_truncated_or_extended_record_is_corrupt(
    request: ReserveRequest, result: StoredResult | None, cut: int, extra: bytes
) -> None:
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result)
    raw = settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))

    for damaged in (raw[:-cut], raw + extra):
        assert isinstance(codec.verdict_of(duplicate_of(request), damaged, NOW_US), Corrupt)


@pytest.mark.scenario(93)
@given(request=_REQUESTS, attempt=_ATTEMPTS, result=_RESULTS)
def test_records_of_earlier_formats_are_readable(
    request: ReserveRequest, attempt: int, result: StoredResult | None
) -> None:
    held = processing(request, attempt)
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result)
    done = settled(codec.COMPLETED, held, codec.encode_completion(completion))

    for current, earlier in ((held, held), (done, settled_earlier(done))):
        for raw in (earlier, unchecked(earlier)):
            assert codec.parse(raw) == codec.parse(current)
            assert codec.holds_lease(raw, NOW_MS) == codec.holds_lease(current, NOW_MS)


@given(request=_REQUESTS, at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_a_damaged_record_decodes_to_a_verdict_without_an_exception(
    request: ReserveRequest, at: int, byte: int, cut: int
) -> None:
    raw = bytearray(processing(request))
    raw[at % len(raw)] = byte

    verdict = codec.verdict_of(duplicate_of(request), bytes(raw[: cut or None]), NOW_US)

    assert verdict.key == "k"


@pytest.mark.scenario(92, 93)
def test_a_corrupt_record_is_reported_with_its_reason() -> None:
    good = processing(ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE))
    result = Completion(reservation=RESERVED, ttl=LEASE, result=StoredResult(b"r", "a/b"))
    done = settled(codec.COMPLETED, good, codec.encode_completion(result))
    # Without checksums, which would otherwise detect the damage first.
    bare = unchecked(good)
    reasons = {
        b"": "it is empty",
        b'{"status": 1}': "it was written by another program",
        b"\4" + good[1:]: "its format 4 is newer than this version supports (3)",
        done[:9]: "it ends after 9 bytes",
        b"\3" + good[1:]: "its status is 0",
        done[:1] + b"\x20" + done[2:]: "its status is 1",
        done[:1] + b"\x64" + done[2:]: "its header is damaged",
        done[:1] + b"\x48" + done[2:]: "it has 29 bytes, but its header says 20",
        done[:2] + b"\0\0" + done[4:]: "its header is damaged",
        done[:3] + b"\7" + done[4:]: "it is damaged: a checksum does not match",
        done[:-1] + b"x": "it is damaged: a checksum does not match",
        done[:1] + b"\x40" + done[2:]: "it has 29 bytes, but its header says 20",
        good[:9]: "it ends after 9 bytes",
        good[:40]: "it ends after 40 bytes",
        good[:1] + b"\7" + good[2:]: "its status is 7",
        good[:3] + b"\0\0" + good[5:]: "its header is damaged",
        good[:4] + b"\7" + good[5:]: "it is damaged: a checksum does not match",
        good + b"x": "it is damaged: a checksum does not match",
        bare[:1] + b"\2\4" + bare[3:18] + b"text/plain": "its result has no content type",
        bare[:1] + b"\2\0" + bare[3:18] + b"x": "it is longer than its header says",
        bare[:1] + b"\3\0" + bare[3:18] + b"\xff": "its error is not valid UTF-8",
    }

    request = ReserveRequest(key="k", token=b"u" * 16, lease=LEASE, retention=LEASE)
    seen = {raw: codec.verdict_of(request, raw, NOW_US) for raw in reasons}

    assert seen == {raw: Corrupt(key="k", reason=reason) for raw, reason in reasons.items()}


def test_another_fingerprint_is_a_reused_key_even_for_the_owner() -> None:
    request = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE, fingerprint=b"a" * 16)
    offered = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE, fingerprint=b"b" * 16)

    verdict = codec.verdict_of(offered, processing(request), NOW_US)

    assert verdict == KeyReused(key="k", stored=b"a" * 16, offered=b"b" * 16)


def test_a_completed_record_with_fingerprint_and_trace_takes_60_bytes() -> None:
    trace = TraceLink(b"i" * 16, b"s" * 8)
    request = ReserveRequest(
        key="k", token=b"t" * 16, lease=LEASE, retention=LEASE, fingerprint=b"f" * 16, trace=trace, owner="o" * 128
    )
    completion = Completion(reservation=reservation_of(request), ttl=LEASE)

    raw = settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))

    assert len(raw) == 60


@pytest.mark.parametrize(
    "part",
    [{"token": b"short"}, {"fingerprint": b"short"}, {"trace": TraceLink(b"", b"s" * 24)}],
    ids=["token", "fingerprint", "trace"],
)
def test_parts_with_a_wrong_length_are_refused(part: dict[str, Any]) -> None:
    request = replace(ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE), **part)

    with pytest.raises(ValueError, match="bytes"):
        codec.encode_request(request)


def test_a_content_type_with_a_zero_byte_is_refused() -> None:
    reserved = Reserved(key="k", token=b"t" * 16, attempt=1, fence=1, lease=LEASE)
    completion = Completion(reservation=reserved, ttl=LEASE, result=StoredResult(b"", "text/\0"))

    with pytest.raises(ValueError, match="content type"):
        codec.encode_completion(completion)


def test_durations_fit_into_six_bytes() -> None:
    assert codec.milliseconds(timedelta(seconds=-1)) == 0
    assert codec.milliseconds(timedelta(microseconds=1_999)) == 1
    assert codec.life_ms(timedelta(0)) == 1
    assert NOW_MS + codec.milliseconds(timedelta.max) < 2**48


@given(sizes=st.lists(st.integers(0, 2 * MOST_BYTES), max_size=50) | st.just([10] * (2 * MOST_KEYS + 1)))
def test_a_batch_is_split_in_order_into_limited_calls(sizes: list[int]) -> None:
    parts = [sizes[part] for part in slices(sizes)]

    assert [size for part in parts for size in part] == sizes
    assert all(0 < len(part) <= MOST_KEYS for part in parts)
    assert all(len(part) == 1 or sum(part) <= MOST_BYTES for part in parts)


def test_a_null_result_takes_no_bytes_and_differs_from_no_result() -> None:
    request = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE)
    null = Completion(reservation=RESERVED, ttl=LEASE, result=StoredResult(b"null"))
    no_result = Completion(reservation=RESERVED, ttl=LEASE)

    with_null, without = (
        settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))
        for completion in (null, no_result)
    )

    assert len(with_null) == len(without)
    assert [codec.parse(raw).result for raw in (with_null, without)] == [StoredResult(b"null"), None]


def test_version_1_can_read_a_record_with_a_history_of_attempts() -> None:
    """A record with a fingerprint, written for `svc@host:1`: attempt 2, after an attempt that lapsed while alone."""
    raw = bytes.fromhex(
        "02014100020660e28e4c965701a204c013cd8fe9a0b86666666666666666666666666666666643744ff98d8edfbe68e96008a234511c"
        "088cd3ad03d8c0f473766340686f73743a31ff312c312c30"
    )

    stored = codec.parse(raw)

    layout, flags, tail = raw[0], raw[2], raw[22 + 16 + 8 :]
    assert (layout, flags & ~(codec.HAS_FINGERPRINT | codec.HAS_LAPSED)) == (2, 0), "flags that version 1 knows"
    assert crc32(tail).to_bytes(4, "big") == raw[42:46], "the checksum that version 1 verifies"
    assert tail[16:].startswith(b"svc@host:1")
    assert (stored.attempt, stored.owner, stored.history) == (2, "svc@host:1", (1, 1, False))
