"""Any bytes in a record or result lead to a verdict or the library's error, never to another record."""

from __future__ import annotations

import math
from datetime import timedelta
from random import Random
from typing import Any

from msgspec.structs import replace
from pydantic import BaseModel

from integr8s_idem.engine.results import decode_result, encode_result
from integr8s_idem.errors import ResultDecodeError
from integr8s_idem.records import (
    JSON,
    Completion,
    Corrupt,
    Failure,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores.redis import codec
from tests.campaigns.figures import Figures
from tests.fuzz.claims import must
from tests.fuzz.mutators import damaged, flipped, text, value
from tests.support.stored import checked, settled

NOW_US = 1_893_456_000_000_000
_LEASE = timedelta(seconds=30)


class Receipt(BaseModel):
    number: int
    paid: bool = True
    tags: list[str] = []


_TYPES: tuple[Any, ...] = (Any, Receipt, int, list[Receipt], dict[str, int] | None)


def request(random: Random) -> ReserveRequest:
    return ReserveRequest(
        key="k",
        token=random.randbytes(16),
        lease=_LEASE,
        retention=_LEASE,
        fingerprint=random.choice((None, random.randbytes(16))),
        owner=text(random)[:128],
        trace=random.choice((None, TraceLink(random.randbytes(16), random.randbytes(8)))),
    )


def stored(random: Random, request_to_store: ReserveRequest) -> bytes:
    """Return a record as the scripts write it, in one of its three states."""
    reserved = Reserved(key="k", token=request_to_store.token, attempt=1, fence=NOW_US, lease=_LEASE)
    packed = codec.encode_request(request_to_store)
    status = random.randint(1, 3)
    flags = packed[0] + random.choice((0, 32, 64))
    attempt, fence = random.randint(1, 65_535), NOW_US + random.randint(-(10**9), 10**9)
    now_ms = NOW_US // 1000 + random.randint(-(10**6), 10**6)
    header = bytes((2, codec.PROCESSING, flags)) + attempt.to_bytes(2, "big") + fence.to_bytes(7, "big")
    held = checked(header + now_ms.to_bytes(6, "big")) + packed[1:]
    if status != codec.PROCESSING:
        body = random.choice(
            (None, StoredResult(random.randbytes(random.randint(0, 300)), random.choice((JSON, "a/b"))))
        )
        outcome = (
            codec.encode_completion(Completion(reservation=reserved, ttl=_LEASE, result=body))
            if status == codec.COMPLETED
            else codec.encode_failure(Failure(reservation=reserved, ttl=_LEASE, error=text(random)))
        )
        return settled(status, held, outcome[0], outcome[1:], now_ms)
    return held


def recorded(random: Random) -> Figures:
    """Reserve a key with a damaged record."""
    request_to_store = request(random)
    raw = stored(random, request_to_store)
    asks = random.choice((request_to_store, request(random)))
    sound = codec.verdict_of(asks, raw, NOW_US)
    assert not isinstance(sound, Corrupt), sound
    bit = random.randrange(8 * len(raw))
    at = random.randrange(len(raw))
    for must_show in (flipped(raw, bit), raw[:at], raw + random.randbytes(random.randint(1, 8)), _burst(random, raw)):
        verdict = codec.verdict_of(asks, must_show, NOW_US)
        assert isinstance(verdict, Corrupt), f"{raw.hex()} damaged to {must_show.hex()} is {verdict}"
    codec.holds_lease(must_show, NOW_US // 1000)
    # The answer to a takeover begins with the trace of the previous attempt.
    trace = random.randbytes(24)
    verdict = codec.verdict_of(asks, b"\0" + trace + raw, NOW_US)
    if raw[0] == codec.FORMAT:
        trace_link = TraceLink(trace[:16], trace[16:])
        assert verdict == (replace(sound, trace=trace_link) if isinstance(sound, Reserved) else sound), verdict
    else:
        assert isinstance(verdict, Corrupt), verdict
    for must_show in (flipped(raw, bit), raw[:at]):
        assert isinstance(codec.verdict_of(asks, b"\0" + trace + must_show, NOW_US), Corrupt), must_show.hex()
    # Any other damage: any verdict is allowed.
    assert codec.verdict_of(asks, damaged(random, raw), NOW_US).key == "k"
    assert codec.verdict_of(asks, b"\1" + damaged(random, raw)[1:], NOW_US).key == "k"
    return Figures(records=1)


def _burst(random: Random, raw: bytes) -> bytes:
    """Change two adjacent bytes, but not the format: format 1 would be a valid older record."""
    at = random.randrange(1, len(raw) - 1)
    noise = random.randint(1, 2**16 - 1).to_bytes(2, "big")
    return raw[:at] + bytes(a ^ b for a, b in zip(raw[at : at + 2], noise, strict=True)) + raw[at + 2 :]


def resulted(random: Random) -> Figures:
    """Encode and decode a result, and decode the damaged bytes."""
    given = value(random)
    try:
        sound = encode_result(given)
    except ValueError:
        return Figures(no_result=1)
    same = decode_result("k", sound)
    assert repr(same) == repr(given) or _holds_extremes(given), f"{given!a} comes back as {same!a}"
    body = damaged(random, sound.body) if random.random() < 0.6 else sound.body
    spoiled = StoredResult(body, random.choice((JSON, JSON, JSON, "text/plain")))
    try:
        decode_result("k", spoiled, random.choice((Any, *_TYPES)))
    except ResultDecodeError as error:
        must(len(str(error)) < 2_000, error)
        return Figures(undecodable_results=1)
    return Figures(results=1)


def _holds_extremes(given: object) -> bool:
    """Return whether the value has numbers that pydantic's JSON does not preserve exactly."""
    if isinstance(given, dict):
        return any(_holds_extremes(item) for item in given.values())
    if isinstance(given, list):
        return any(_holds_extremes(item) for item in given)
    return isinstance(given, float) and not math.isfinite(given)
