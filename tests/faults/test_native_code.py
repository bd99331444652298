"""Native and Python code do the same with any input.  The native code must be built: `make speedups`."""

from __future__ import annotations

import sys
import zlib
from datetime import timedelta
from random import Random
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from integr8s_idem import events as wire
from integr8s_idem import keys
from integr8s_idem._util import speedups
from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.keys import event_keys
from integr8s_idem.keys.fingerprints import PlainFingerprints
from integr8s_idem.records import (
    JSON,
    Completed,
    Completion,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores.redis import batch_codec, codec
from tests.campaigns.figures import ViolationError
from tests.fuzz import native
from tests.fuzz.mutators import text
from tests.support.stored import checked, flips, settled

pytestmark = pytest.mark.skipif(
    speedups.native is None, reason=f"uses {speedups.LOADED.description}: run `make speedups` (needs cargo)"
)

SECOND = timedelta(seconds=1)


@pytest.mark.scenario(81, 86, 88, 92)
def test_no_fuzzed_input_tells_native_and_python_code_apart() -> None:
    figures = native.CAMPAIGN.run(0, native.CAMPAIGN.in_test)

    assert figures["inputs"] == native.CAMPAIGN.at_least
    assert figures["bodies_accepted"] > 1_000
    for kind in ("keys", "requests", "completions", "verdicts", "commands"):
        assert figures[kind] == native.CAMPAIGN.in_test, kind


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (wire, "_envelope_in", lambda fields: ("shipped", "1.0")),
        (PlainFingerprints, "make", lambda self, values: b"f" * 16),
        (event_keys._KeyMaker, "make", lambda self, event, generation: event_keys.KeyedWork(keys.Key("a", "b"), None)),
        (codec, "crc32", lambda data: zlib.crc32(data) ^ 1),
        (codec, "encode_life", lambda duration: b"123456"),
        (codec, "_result", lambda flags, rest: None),
        (hiredis, "pack_command", lambda command: b"*0"),
    ],
)
def test_a_difference_is_found_within_300_runs(
    module: Any, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)

    with pytest.raises(ViolationError):
        native.run(0, 300)


@given(st.builds(lambda seed: text(Random(seed), 6), st.integers(0)), st.text(), st.integers(), st.booleans())
def test_keys_and_fingerprints_are_equal(event_id: str, note: str, count: int, is_gift: bool) -> None:
    event = native.Shipped.model_construct(
        event_id=event_id, event_type="shipped", order_id=note[::-1], count=count, is_gift=is_gift, note=note
    )

    native.must_agree("keys", lambda: event_keys.KeyResolver().resolve("ship", event), event)


@given(
    st.lists(
        st.builds(
            ReserveRequest,
            key=st.text(),
            token=st.binary(min_size=16, max_size=16),
            lease=st.timedeltas(),
            retention=st.timedeltas(),
            fingerprint=st.none() | st.binary(min_size=16, max_size=16),
            owner=st.text(),
            alone=st.booleans(),
        )
    )
)
def test_requests_have_the_same_bytes(requests: list[ReserveRequest]) -> None:
    native.must_agree("requests", lambda: batch_codec.encode_requests(requests), requests)
    native.must_agree("verdicts", lambda: batch_codec.verdicts_of(requests, [7, *[0] * len(requests)]), requests)


def record_of(request: ReserveRequest, completion: Completion, now_ms: int) -> bytes:
    """Return the record of completed work as the scripts write it."""
    reserved, packed = completion.reservation, codec.encode_request(request)
    header = bytes((codec.FORMAT, codec.PROCESSING, packed[0])) + reserved.attempt.to_bytes(2, "big")
    held = checked(header + reserved.fence.to_bytes(7, "big") + bytes(6)) + packed[1:]
    outcome = codec.encode_completion(completion)
    return settled(codec.COMPLETED, held, outcome[0], outcome[1:], now_ms)


def must_agree_on(request: ReserveRequest, record: bytes) -> None:
    native.must_agree("verdicts", lambda: batch_codec.verdicts_of([request, request], [7, record, 0]), record)


FINGERPRINTS = st.sampled_from([None, b"f" * 16, b"\xff" * 16, b"\xff" * 4 + b"g" * 12])
TRACES = st.sampled_from([None, TraceLink(b"t" * 16, b"s" * 8)])
RESULTS = st.none() | st.builds(
    StoredResult, st.binary() | st.just(b"null"), st.sampled_from([JSON, JSON, "text/plain", "a\ud800"])
)


@given(
    st.builds(
        ReserveRequest,
        key=st.text(),
        token=st.just(b"k" * 16),
        lease=st.just(SECOND),
        retention=st.just(SECOND),
        fingerprint=FINGERPRINTS,
        trace=TRACES,
    ),
    FINGERPRINTS,
    st.builds(
        Completion,
        reservation=st.builds(
            Reserved,
            key=st.text(),
            token=st.just(b"k" * 16),
            attempt=st.sampled_from([0, 1, 2, 65_535]),
            fence=st.integers(0, 2**53),
            lease=st.just(SECOND),
        ),
        ttl=st.just(SECOND),
        result=RESULTS,
        result_dropped=st.booleans(),
    ),
    st.integers(0, 2**40),
)
def test_records_of_completed_work_have_the_same_verdicts(
    request: ReserveRequest, offered: bytes | None, completion: Completion, elapsed_ms: int
) -> None:
    record = record_of(request, completion, completion.reservation.fence // 1000 + elapsed_ms % 2**40)

    must_agree_on(replace(request, fingerprint=offered), record)


@pytest.mark.parametrize("result", [None, StoredResult(b"null"), StoredResult(b'{"a":1}'), StoredResult(b"x", "a/b")])
def test_damaged_records_of_completed_work_have_the_same_verdicts(result: StoredResult | None) -> None:
    reserved = Reserved(key="k", token=b"k" * 16, attempt=2, fence=10**15, lease=SECOND)
    request = ReserveRequest(
        key="k",
        token=b"k" * 16,
        lease=SECOND,
        retention=SECOND,
        fingerprint=b"f" * 16,
        trace=TraceLink(b"t" * 16, b"s" * 8),
    )
    record = record_of(request, Completion(reservation=reserved, ttl=SECOND, result=result), 10**12)

    for damaged in (*flips(record), *(record[:end] for end in range(len(record))), record + b"\0"):
        must_agree_on(request, damaged)


@given(st.none() | st.builds(StoredResult, st.binary(), st.sampled_from(["application/json", "text/plain"])))
def test_completions_have_the_same_bytes(result: StoredResult | None) -> None:
    reserved = Reserved(key="k", token=b"t" * 16, attempt=1, fence=2**53, lease=SECOND)
    completion = Completion(reservation=reserved, ttl=SECOND, result=result, result_dropped=True)

    native.must_agree("completions", lambda: batch_codec.encode_completions([completion]), completion)


HOSTILE = {
    "arrays": b"[" * 1_000_000,
    "objects": b'{"a":' * 200_000,
    "nested field": b'{"event_id":"1","event_type":"shipped","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "escaped surrogate": b'{"event_id":"1","event_type":"shipped","order_id":"\\ud800"}',
    "raw surrogate": b'{"event_id":"1","event_type":"shipped","order_id":"\xed\xa0\x80"}',
    "many digits": b'{"event_id":"1","event_type":"shipped","order_id":"1","count":' + b"9" * 1_000_000 + b"}",
    "many names": b"{%b}" % b",".join(b'"%d":0' % number for number in range(100_000)),
    "duplicate": b'{"event_id":"1","event_id":"2","event_type":"shipped","order_id":"1"}',
    "escaped duplicate": b'{"event_id":"1","event_\\u0069d":"2","event_type":"shipped","order_id":"1"}',
    "infinite": b'{"event_id":"1","event_type":"shipped","order_id":"1","x":1e999}',
    "byte order mark": b'\xef\xbb\xbf{"event_id":"1","event_type":"shipped","order_id":"1"}',
    "zero bytes": bytes(1_000),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_gets_the_same_error(body: bytes) -> None:
    errors = []
    for decoder in (native._NATIVE, native._PYTHON):
        with pytest.raises(UndecodableEventError) as refused:
            decoder.decode(body)
        errors.append((refused.value.reason, str(refused.value)))

    assert errors[0] == errors[1]


def test_objects_of_other_classes_are_left_to_python() -> None:
    find = speedups.native.EventClasses([("shipped", native.Shipped, "1")]).find  # type: ignore[union-attr]
    for body in (None, "{}", bytearray(b"{}"), 7, b""):
        assert find(body) is None

    for wrong in (None, 7, object(), "x"):
        native.must_agree("requests", lambda wrong=wrong: batch_codec.encode_requests([wrong]), wrong)  # type: ignore[misc]
        native.must_agree("completions", lambda wrong=wrong: batch_codec.encode_completions([wrong]), wrong)  # type: ignore[misc]


def test_no_reference_is_leaked_or_lost() -> None:
    event = native.Shipped(order_id="a", note="b")
    request = ReserveRequest(key="k", token=b"t" * 16, lease=SECOND, retention=10 * SECOND, fingerprint=b"f" * 16)
    done = Completion(reservation=Reserved(key="k", token=b"t" * 16, attempt=1, fence=1, lease=SECOND), ttl=SECOND)
    record = record_of(request, done, 10**12)
    shared = (
        SECOND,
        10 * SECOND,
        native.Shipped,
        keys.Key,
        ReserveRequest,
        Reserved,
        Completion,
        Completed,
        TraceLink,
        record,
        event,
        request,
    )

    def use_all() -> None:
        event_keys.KeyResolver().resolve("ship", event)
        native.scanned(wire.encode_event(event))
        batch_codec.encode_requests([request, request])
        verdicts = batch_codec.verdicts_of([request, request, request], [10**15, 0, 0, record])
        completions = [
            Completion(reservation=verdict, ttl=SECOND) for verdict in verdicts if isinstance(verdict, Reserved)
        ]
        assert len(batch_codec.encode_completions(completions)) == 2

    use_all()
    before = [sys.getrefcount(each) for each in shared]
    for _ in range(1_000):
        use_all()

    # Classes may be referenced by a few more caches.
    assert [sys.getrefcount(each) for each in shared] == pytest.approx(before, abs=20)
