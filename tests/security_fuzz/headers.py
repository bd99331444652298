"""Replay headers: unsigned ones have no effect, signed ones have exactly the signed effect."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from pydantic import SecretStr

from integr8s_idem.config import ReplaySettings
from integr8s_idem.worker.dead_letters import GENERATION, REPLAY_GROUP, REPLAY_HANDLER, REPLAY_SIGNATURE
from integr8s_idem.worker.replay_policy import ReplayDecision, ReplayPolicy
from integr8s_idem.worker.replay_signatures import ReplayClaim, signature_of
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import damaged, text
from tests.support.fake_consumer import FakeRecord

GROUP: Final = "billing"
SECRET: Final = "0123456789abcdef" * 4
_NAMES: Final = (GENERATION, REPLAY_GROUP, REPLAY_HANDLER, REPLAY_SIGNATURE)
_SETTINGS: Final = (
    ReplaySettings(secret=(SecretStr(SECRET),)),
    ReplaySettings(secret=(SecretStr("f" * 64), SecretStr(SECRET))),
    ReplaySettings(secret=(SecretStr(SECRET),), unsigned="failed_only"),
    ReplaySettings(unsigned="refuse"),
    ReplaySettings(unsigned="failed_only"),
)
_VALUES: Final = (b"", b"0", b"1", b"2", b"-1", b"01", b"999", b"1000", b"9" * 50, b"billing", b"analytics", b"charge")


def forged(random: Random) -> Figures:
    """Judge a message with headers forged without the secret."""
    headers = [(random.choice(_NAMES), _value(random)) for _ in range(random.randint(1, 5))]
    record = FakeRecord("orders", 0, 1, b"k", random.choice((b"{}", None, b"", random.randbytes(20))), headers)
    judged = ReplayPolicy(GROUP, random.choice(_SETTINGS)).judge(record)
    _changes_nothing(judged)
    return Figures(forged_headers=1, refused_headers=bool(judged.refused))


def _value(random: Random) -> bytes:
    if random.random() < 0.6:
        return random.choice(_VALUES)
    return text(random).encode("utf-8", "backslashreplace") if random.random() < 0.5 else random.randbytes(32)


def _changes_nothing(judged: ReplayDecision) -> None:
    assert judged.generation == 0, judged
    assert judged.only is None, judged
    assert not judged.is_for_others, judged


def signed(random: Random) -> Figures:
    """Judge a signed replay, and the replay with one part changed."""
    claim = ReplayClaim(
        "orders", random.choice((b"", b"billing", b"analytics")), random.choice((b"", b"charge")), b"", 1
    )
    record = _signed(random, claim)
    settings = random.choice(_SETTINGS[:3])
    judged = ReplayPolicy(GROUP, settings).judge(record)
    if claim.group == b"analytics":
        assert judged.is_for_others, judged
    else:
        assert (judged.generation, judged.only) == (1, claim.handler.decode() or None), judged
    changed = _changed(random, record)
    again = ReplayPolicy(GROUP, settings).judge(changed)
    # Of a repeated header only one value counts, so a change of the other one is harmless.
    is_the_same = (changed.topic, changed.value, _own(changed)) == (record.topic, record.value, _own(record))
    if not is_the_same or again != judged:
        _changes_nothing(again)
    return Figures(signed_replays=1)


def _signed(random: Random, claim: ReplayClaim) -> FakeRecord:
    value, own = random.randbytes(random.randint(1, 40)), [("trace", random.randbytes(4))]
    signature = signature_of(claim, value, own, SECRET.encode())
    signed_headers = [
        (GENERATION, b"%d" % claim.generation),
        (REPLAY_GROUP, claim.group),
        (REPLAY_HANDLER, claim.handler),
        (REPLAY_SIGNATURE, signature),
    ]
    return FakeRecord(claim.topic, 0, 1, b"k", value, [*own, *(each for each in signed_headers if each[1])])


def _changed(random: Random, record: FakeRecord) -> FakeRecord:
    assert record.value is not None
    headers = list(record.headers)
    at = random.randrange(len(headers))
    match random.randrange(4):
        case 0:
            return replace(record, value=damaged(random, record.value))
        case 1:
            return replace(record, topic="refunds")
        case 2:
            name, value = headers[at]
            headers[at] = name, random.choice((damaged(random, value), random.choice(_VALUES)))
        case _:
            headers.insert(0, (random.choice((*_NAMES, "trace")), random.choice(_VALUES)))
    return replace(record, headers=headers)


def _own(record: FakeRecord) -> list[tuple[str, bytes]]:
    return [(name, value) for name, value in record.headers if name not in _NAMES]
