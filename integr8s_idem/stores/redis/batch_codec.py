"""Encode and decode whole batches, by native code if it is installed.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from integr8s_idem._util import speedups
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores.redis import codec

ABSENT: Final = 0
OTHER_TYPE: Final = 1
ASK_AGAIN: Final = 2
OTHER_TYPE_REASON: Final = "the key holds another Redis type"


@lru_cache(maxsize=2)
def _codec_of(native: Any) -> Any:
    return native.RedisCodec(
        request=ReserveRequest,
        reserved=Reserved,
        completion=Completion,
        completed=Completed,
        result=StoredResult,
        trace=TraceLink,
        encode_times=codec.encode_times,
        encode_life=codec.encode_life,
        moment=codec.moment,
    )


def encode_requests(requests: Sequence[ReserveRequest]) -> list[bytes]:
    """Encode the argument of `reserve.lua` for each key."""
    if speedups.native is None:
        return codec.encode_reserve(requests)
    encoded: list[bytes] = _codec_of(speedups.native).encode_requests(list(requests), _encode_request)
    return encoded


def _encode_request(request: ReserveRequest) -> bytes:
    return codec.encode_reserve((request,))[0]


def encode_completions(completions: Sequence[Completion]) -> list[bytes]:
    """Encode the argument of `settle.lua` for each key."""
    if speedups.native is None:
        return list(map(_encode_completion, completions))
    encoded: list[bytes] = _codec_of(speedups.native).encode_completions(list(completions), _encode_completion)
    return encoded


def _encode_completion(completion: Completion) -> bytes:
    holder = codec.encode_holder(completion.reservation)
    return codec.encode_life(completion.ttl) + holder + codec.encode_completion(completion)


def verdicts_of_runs(
    requests: Sequence[ReserveRequest], runs: Sequence[tuple[Sequence[int], list[Any]]]
) -> list[Verdict | None]:
    """Return the verdicts of runs of `reserve.lua`, each with the indexes of its requests, in the order of requests."""
    if len(runs) == 1:
        return verdicts_of(requests, runs[0][1])
    verdicts: list[Verdict | None] = [None] * len(requests)
    for positions, answer in runs:
        part = [requests[position] for position in positions]
        for position, verdict in zip(positions, verdicts_of(part, answer), strict=True):
            verdicts[position] = verdict
    return verdicts


def verdicts_of(requests: Sequence[ReserveRequest], answer: list[Any]) -> list[Verdict | None]:
    """Return the verdict on each request, given the answer of `reserve.lua`; `None` if it must be sent again."""
    now_us, *answers = answer
    verdict_of = _verdict if speedups.native is None else _quick_verdict
    verdicts: list[Verdict | None] = []
    for request, each in zip(requests, answers, strict=True):  # faster than a comprehension, which is a call
        if each == ABSENT:
            new = Reserved(key=request.key, token=request.token, attempt=1, fence=now_us, lease=request.lease)
            verdicts.append(new)
        else:
            verdicts.append(verdict_of(request, each, now_us))
    return verdicts


def _quick_verdict(request: ReserveRequest, answer: Any, now_us: int) -> Verdict | None:
    return _codec_of(speedups.native).completed(request, answer) or _verdict(request, answer, now_us)


def _verdict(request: ReserveRequest, answer: Any, now_us: int) -> Verdict | None:
    if answer == ASK_AGAIN:
        return None
    if answer == OTHER_TYPE:
        return Corrupt(key=request.key, reason=OTHER_TYPE_REASON)
    return codec.verdict_of(request, answer, now_us)
