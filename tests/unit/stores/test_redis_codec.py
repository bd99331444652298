"""Records as bytes: what goes in comes out, and nothing else is taken for a record."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem.records import (
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
    """As reserve.lua writes it."""
    wish = codec.encode_request(request)
    header = bytes((2, codec.PROCESSING, wish[0] + previous)) + attempt.to_bytes(2, "big") + fence.to_bytes(7, "big")
    return checked(header + (NOW_MS + 30_000).to_bytes(6, "big")) + wish[1:]


def settled(status: int, record: bytes, outcome: bytes) -> bytes:
    return stored.settled(status, record, outcome[0], outcome[1:], NOW_MS)


RESERVED = Reserved(key="k", token=b"t" * 16, attempt=1, fence=NOW_US, lease=LEASE)


def reservation_of(request: ReserveRequest) -> Reserved:
    return Reserved(key=request.key, token=request.token, attempt=1, fence=NOW_US, lease=LEASE)


def other(request: ReserveRequest) -> ReserveRequest:
    token = bytes(byte ^ 255 for byte in request.token)
    return ReserveRequest(key="k", token=token, lease=LEASE, retention=LEASE)


@given(request=_REQUESTS, attempt=_ATTEMPTS, fence=_FENCES, previous=st.sampled_from([0, 32, 64]))
def test_a_reservation_comes_back_to_its_owner(
    request: ReserveRequest, attempt: int, fence: int, previous: int
) -> None:
    verdict = codec.verdict_of(request, processing(request, attempt, fence, previous), NOW_US)

    assert isinstance(verdict, Reserved)
    assert (verdict.token, verdict.attempt, verdict.fence) == (request.token, attempt, fence)
    assert verdict.previous is {0: Previous.NONE, 32: Previous.RELEASED, 64: Previous.LAPSED}[previous]


@given(request=_REQUESTS, attempt=_ATTEMPTS)
def test_others_see_who_holds_it(request: ReserveRequest, attempt: int) -> None:
    verdict = codec.verdict_of(other(request), processing(request, attempt), NOW_US)

    assert verdict == InProgress(key="k", attempt=attempt, retry_after=LEASE, owner=request.owner)


@given(request=_REQUESTS, result=_RESULTS, dropped=st.booleans())
def test_a_result_comes_back_whole(request: ReserveRequest, result: StoredResult | None, dropped: bool) -> None:
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result, result_dropped=dropped)

    raw = settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))
    verdict = codec.verdict_of(other(request), raw, NOW_US)

    assert isinstance(verdict, Completed)
    assert (verdict.result, verdict.result_dropped, verdict.trace) == (result, dropped, request.trace)
    assert verdict.completed_at == codec.moment(NOW_MS)


@given(request=_REQUESTS, error=_ANY_TEXT)
def test_an_error_comes_back_whole(request: ReserveRequest, error: str) -> None:
    failure = Failure(reservation=reservation_of(request), ttl=LEASE, error=error)

    raw = settled(codec.FAILED, processing(request), codec.encode_failure(failure))
    verdict = codec.verdict_of(other(request), raw, NOW_US)

    assert isinstance(verdict, Failed)
    assert (verdict.error, verdict.trace) == (error, request.trace)


@pytest.mark.scenario(92)
@given(
    raw=st.binary(max_size=120)
    | st.builds(bytes.__add__, st.sampled_from([b"\1", b"\2", b"\3"]), st.binary(max_size=120))
)
def test_arbitrary_bytes_are_a_verdict_and_never_an_error(raw: bytes) -> None:
    request = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE)

    verdict = codec.verdict_of(request, raw, NOW_US)

    assert verdict.key == "k"
    assert isinstance(verdict, Corrupt) or raw[:1] in {b"\1", b"\2", b"\3"}


@pytest.mark.scenario(94)
@settings(max_examples=30)
@given(request=_REQUESTS, result=_RESULTS, error=_ANY_TEXT)
def test_one_flipped_bit_anywhere_makes_a_record_corrupt(
    request: ReserveRequest, result: StoredResult | None, error: str
) -> None:
    reserved = reservation_of(request)
    outcome = codec.encode_completion(Completion(reservation=reserved, ttl=LEASE, result=result))
    failure = codec.encode_failure(Failure(reservation=reserved, ttl=LEASE, error=error))
    sound = processing(request)

    for record in (sound, settled(codec.COMPLETED, sound, outcome), settled(codec.FAILED, sound, failure)):
        for raw in flips(record):
            assert isinstance(codec.verdict_of(other(request), raw, NOW_US), Corrupt)


@pytest.mark.parametrize("length", [16, 24, 40])
def test_no_damage_to_the_first_byte_behind_a_check_is_made_good_by_one_to_the_last_byte_of_it(length: int) -> None:
    """Two damaged bytes side by side are noticed, also where one check holds header, fingerprint and trace."""
    sound = crc32(bytes(length))

    assert all((crc32(bytes((byte,)) + bytes(length - 1)) ^ sound) >> 8 for byte in range(1, 256))


@settings(max_examples=30)
@given(request=_REQUESTS, result=_RESULTS, error=_ANY_TEXT)
def test_one_flipped_bit_makes_no_settled_record_count_as_held_and_hides_few_that_are(
    request: ReserveRequest, result: StoredResult | None, error: str
) -> None:
    reserved, held = reservation_of(request), processing(request)
    done = codec.encode_completion(Completion(reservation=reserved, ttl=LEASE, result=result))
    given_up = codec.encode_failure(Failure(reservation=reserved, ttl=LEASE, error=error))

    for record in (settled(codec.COMPLETED, held, done), settled(codec.FAILED, held, given_up)):
        assert not any(codec.holds_lease(raw, NOW_MS) for raw in flips(record))
    # Counting reads the first 18 bytes and no check: version, status and the end of the lease decide.
    hidden = {bit // 8 for bit, raw in enumerate(flips(held)) if not codec.holds_lease(raw, NOW_MS)}
    assert hidden <= {0, 1, *range(12, 18)}


@pytest.mark.scenario(92)
@given(request=_REQUESTS, result=_RESULTS, cut=st.integers(1, 30), put=st.binary(min_size=1, max_size=9))
def test_a_record_cut_short_or_with_something_behind_it_is_corrupt(
    request: ReserveRequest, result: StoredResult | None, cut: int, put: bytes
) -> None:
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result)
    raw = settled(codec.COMPLETED, processing(request), codec.encode_completion(completion))

    for damaged in (raw[:-cut], raw + put):
        assert isinstance(codec.verdict_of(other(request), damaged, NOW_US), Corrupt)


@pytest.mark.scenario(93)
@given(request=_REQUESTS, attempt=_ATTEMPTS, result=_RESULTS)
def test_records_of_the_earlier_formats_are_read_as_before(
    request: ReserveRequest, attempt: int, result: StoredResult | None
) -> None:
    held = processing(request, attempt)
    completion = Completion(reservation=reservation_of(request), ttl=LEASE, result=result)
    done = settled(codec.COMPLETED, held, codec.encode_completion(completion))

    for now, earlier in ((held, held), (done, settled_earlier(done))):
        for raw in (earlier, unchecked(earlier)):
            assert codec.parse(raw) == codec.parse(now)
            assert codec.holds_lease(raw, NOW_MS) == codec.holds_lease(now, NOW_MS)


@given(request=_REQUESTS, at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_a_damaged_record_is_a_verdict_and_never_an_error(
    request: ReserveRequest, at: int, byte: int, cut: int
) -> None:
    raw = bytearray(processing(request))
    raw[at % len(raw)] = byte

    verdict = codec.verdict_of(other(request), bytes(raw[: cut or None]), NOW_US)

    assert verdict.key == "k"


@pytest.mark.scenario(92, 93)
def test_every_way_of_being_unreadable_has_its_reason() -> None:
    good = processing(ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE))
    result = Completion(reservation=RESERVED, ttl=LEASE, result=StoredResult(b"r", "a/b"))
    done = settled(codec.COMPLETED, good, codec.encode_completion(result))
    # Without checks, so that what they would catch first is seen as well.
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


def test_another_fingerprint_is_a_reused_key_whoever_asks() -> None:
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
def test_parts_of_a_wrong_length_are_refused(part: dict[str, Any]) -> None:
    sound = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE)
    request = replace(sound, **part)

    with pytest.raises(ValueError, match="bytes"):
        codec.encode_request(request)


def test_a_content_type_with_a_zero_byte_is_refused() -> None:
    reserved = Reserved(key="k", token=b"t" * 16, attempt=1, fence=1, lease=LEASE)
    completion = Completion(reservation=reserved, ttl=LEASE, result=StoredResult(b"", "text/\0"))

    with pytest.raises(ValueError, match="content type"):
        codec.encode_completion(completion)


def test_lengths_of_time_fit_into_six_bytes() -> None:
    assert codec.milliseconds(timedelta(seconds=-1)) == 0
    assert codec.milliseconds(timedelta(microseconds=1_999)) == 1
    assert codec.life_ms(timedelta(0)) == 1
    assert NOW_MS + codec.milliseconds(timedelta.max) < 2**48


@given(sizes=st.lists(st.integers(0, 2 * MOST_BYTES), max_size=50) | st.just([10] * (2 * MOST_KEYS + 1)))
def test_a_batch_is_cut_in_order_into_bounded_calls(sizes: list[int]) -> None:
    parts = [sizes[part] for part in slices(sizes)]

    assert [size for part in parts for size in part] == sizes
    assert all(0 < len(part) <= MOST_KEYS for part in parts)
    assert all(len(part) == 1 or sum(part) <= MOST_BYTES for part in parts)


def test_nothing_as_a_result_takes_no_bytes_and_comes_back() -> None:
    request = ReserveRequest(key="k", token=b"t" * 16, lease=LEASE, retention=LEASE)
    nothing = Completion(reservation=RESERVED, ttl=LEASE, result=StoredResult(b"null"))
    none_kept = Completion(reservation=RESERVED, ttl=LEASE)

    kept, without = (
        settled(codec.COMPLETED, processing(request), codec.encode_completion(each)) for each in (nothing, none_kept)
    )

    assert len(kept) == len(without)
    assert [codec.parse(raw).result for raw in (kept, without)] == [StoredResult(b"null"), None]


def test_the_history_of_attempts_leaves_a_record_readable_by_version_1() -> None:
    """Written by a server for `svc@host:1` with a fingerprint: attempt 2, after one that lapsed while it ran alone."""
    raw = bytes.fromhex(
        "02014100020660e28e4c965701a204c013cd8fe9a0b86666666666666666666666666666666643744ff98d8edfbe68e96008a234511c"
        "088cd3ad03d8c0f473766340686f73743a31ff312c312c30"
    )

    stored = codec.parse(raw)

    layout, flags, tail = raw[0], raw[2], raw[22 + 16 + 8 :]
    assert (layout, flags & ~(codec.HAS_FINGERPRINT | codec.HAS_LAPSED)) == (2, 0), "what version 1 knows"
    assert crc32(tail).to_bytes(4, "big") == raw[42:46], "what version 1 checks"
    assert tail[16:].startswith(b"svc@host:1")
    assert (stored.attempt, stored.owner, stored.history) == (2, "svc@host:1", (1, 1, False))
