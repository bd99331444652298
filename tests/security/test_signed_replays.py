"""Signed replays: what a signature covers, replays for other groups, and the rotation of secrets.

Broker and store are in memory.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.config import KafkaSettings, ReplaySettings, Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import encode_event
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.dead_letters import replay_of
from integr8s_idem.worker.replay_signatures import ReplayClaim, signature_of
from tests.security.test_replay_headers import DEAD, OrderPlaced, Till, consumed, put
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.replays import OTHER_SECRET, SECRET, SIGNED, TRUSTED, signed_by

pytestmark = pytest.mark.scenario(124, 126)

Headers = list[tuple[str, Any]]


class Failed:
    """An order whose charge failed, and whose dead letter is replayed."""

    def __init__(self, replay: ReplaySettings = SIGNED.replay, **service: Any) -> None:
        self.broker = FakeBroker()
        self.till = Till()
        self.event = OrderPlaced()
        self.replay = replay
        self._service = service

    async def dead_letter(self) -> FakeRecord:
        self.till.broken = {"charge"}
        put(self.broker, self.event)
        await self.consumed()
        self.till.broken = set()
        return self.broker.values(DEAD)[0]

    async def consumed(self) -> None:
        await consumed(self.till, self.broker, replay=self.replay, **self._service)

    @property
    def charged(self) -> int:
        """Return how often its handler has run."""
        return self.till.runs.count("charge 1")


@virtual_time
async def test_a_signed_replay_published_repeatedly_runs_once() -> None:
    failed = Failed()
    topic, key, value, headers = replay_of(await failed.dead_letter(), SIGNED)
    for _ in range(3):
        failed.broker.put(topic, value, key=key, headers=headers)

    await failed.consumed()

    assert failed.charged == 2
    assert failed.till.runs.count("mail 1") == 1
    assert failed.till.refused() == 0


def changed(headers: Headers, name: str, value: bytes) -> Headers:
    return [(each, value if each == name else text) for each, text in headers]


FORGERIES: dict[str, Any] = {
    "generation": lambda headers: changed(headers, "idempotency-generation", b"2"),
    "group": lambda headers: changed(headers, "idempotency-replay-group", b"shipping"),
    "no group": lambda headers: changed(headers, "idempotency-replay-group", b""),
    "handler": lambda headers: changed(headers, "idempotency-replay-handler", b"mail"),
    "no handler": lambda headers: changed(headers, "idempotency-replay-handler", b""),
    "event": lambda headers: changed(headers, "idempotency-replay-event", b"0" * 64),
    "no event": lambda headers: changed(headers, "idempotency-replay-event", b""),
    "no signature": lambda headers: changed(headers, "idempotency-replay-signature", b""),
    "half a signature": lambda headers: changed(
        headers, "idempotency-replay-signature", dict(headers)["idempotency-replay-signature"][:32]
    ),
    "non-ASCII signature": lambda headers: changed(headers, "idempotency-replay-signature", b"\xff" * 64),
    "a later header": lambda headers: [*headers, ("idempotency-generation", b"5")],
    "a later signature": lambda headers: [*headers, ("idempotency-replay-signature", b"0" * 64)],
}


@pytest.mark.parametrize("forgery", FORGERIES)
@virtual_time
async def test_a_signature_is_invalid_for_other_headers(forgery: str) -> None:
    failed = Failed()
    topic, key, value, headers = replay_of(await failed.dead_letter(), SIGNED)
    failed.broker.put(topic, value, key=key, headers=FORGERIES[forgery](headers))

    await failed.consumed()

    assert failed.charged == 1
    assert failed.till.refused() == 1
    assert [dict(dead_letter.headers)["idempotency-dlq-reason"] for dead_letter in failed.broker.values(DEAD)] == [
        b"handler_failed",
        b"previously_failed",
    ]


@virtual_time
async def test_a_signature_is_invalid_for_another_payload() -> None:
    failed = Failed()
    topic, key, _, headers = replay_of(await failed.dead_letter(), SIGNED)
    forged = encode_event(failed.event.model_copy(update={"order_id": "forged"}))
    failed.broker.put(topic, forged, key=key, headers=headers)

    await failed.consumed()

    assert failed.till.refused("bad_signature") == 1
    assert not any("forged" in run for run in failed.till.runs)


@virtual_time
async def test_a_signature_is_invalid_for_another_topic() -> None:
    failed = Failed(topics=("order_placed", "orders_of_others"))
    dead_letter = await failed.dead_letter()
    _, key, value, headers = replay_of(dead_letter, SIGNED, to="orders_of_others")
    failed.broker.put("order_placed", value, key=key, headers=headers)

    await failed.consumed()

    assert failed.till.refused("bad_signature") == 1
    assert failed.charged == 1


@pytest.mark.parametrize("has_event_hash", [True, False])
@virtual_time
async def test_a_signature_is_invalid_for_another_event_id_in_a_header(has_event_hash: bool) -> None:
    """With an id header, the signed body does not contain the id."""
    failed = Failed(event_id_header="order-id")
    body = encode_event(failed.event)
    failed.till.broken = {"charge"}
    failed.broker.put("order_placed", body, headers=[("order-id", b"first")])
    failed.broker.put("order_placed", body, headers=[("order-id", b"second")])
    await failed.consumed()
    first, _ = failed.broker.values(DEAD)
    failed.till.broken = set()
    if not has_event_hash:
        old = [(name, text) for name, text in first.headers if name != "idempotency-dlq-event-hash"]
        first = dataclasses.replace(first, headers=old)
    topic, key, value, headers = replay_of(first, SIGNED)
    failed.broker.put(topic, value, key=key, headers=changed(headers, "order-id", b"second"))

    await failed.consumed()
    refused = failed.till.refused("other_event" if has_event_hash else "bad_signature")
    failed.broker.put(topic, value, key=key, headers=headers)
    await failed.consumed()

    assert refused == 1
    assert failed.charged == 3


@virtual_time
async def test_a_signature_with_another_secret_is_invalid() -> None:
    failed = Failed()
    topic, key, value, headers = replay_of(await failed.dead_letter(), signed_by(OTHER_SECRET))
    failed.broker.put(topic, value, key=key, headers=headers)

    await failed.consumed()

    assert failed.charged == 1
    assert failed.till.refused("bad_signature") == 1


@virtual_time
async def test_of_several_secrets_the_first_signs_and_all_verify() -> None:
    failed = Failed(signed_by(OTHER_SECRET, SECRET).replay)
    dead_letter = await failed.dead_letter()
    old, new = replay_of(dead_letter, SIGNED), replay_of(dead_letter, signed_by(OTHER_SECRET))
    both = replay_of(dead_letter, signed_by(OTHER_SECRET, SECRET))
    failed.broker.put(old.topic, old.value, key=old.key, headers=old.headers)

    await failed.consumed()

    assert failed.charged == 2
    assert new.headers == both.headers != old.headers


@pytest.mark.parametrize("body", [None, b"not an event of billing"])
@virtual_time
async def test_a_signed_replay_for_another_group_is_skipped_counted_and_logged(
    body: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broker, till, event = FakeBroker(), Till(), OrderPlaced()
    fields = {"reason": b"handler_failed", "topic": b"order_placed", "group": b"shipping", "handler": b"charge"}
    headers = [(f"idempotency-dlq-{name}", text) for name, text in fields.items()]
    dead_letter = FakeRecord(DEAD, 0, 0, None, body or encode_event(event), headers)
    topic, key, value, signed = replay_of(dead_letter, SIGNED)
    broker.put(topic, value, key=key, headers=signed)

    await consumed(till, broker, replay=SIGNED.replay)

    assert till.runs == []
    assert broker.values(DEAD) == []
    assert till.here.observer.counts[Signal.REPLAY_FOR_OTHERS] == 1
    assert "order_placed[0]@0 skipped: it is a replay for another consumer group" in caplog.text


@virtual_time
async def test_with_a_secret_an_unsigned_replay_of_failed_work_is_refused_by_default() -> None:
    for unsigned, runs in ((None, 1), ("refuse", 1), ("failed_only", 2), ("trust", 2)):
        failed = Failed(ReplaySettings.model_validate({"secret": SECRET, "unsigned": unsigned}))
        topic, key, value, headers = replay_of(await failed.dead_letter())
        failed.broker.put(topic, value, key=key, headers=headers)

        await failed.consumed()

        assert (failed.charged, failed.till.refused()) == (runs, runs == 1), unsigned


@virtual_time
async def test_with_the_policy_trust_every_header_is_honored() -> None:
    broker, till, event = FakeBroker(), Till(), OrderPlaced()
    put(broker, event)
    put(broker, event, ("idempotency-generation", b"1"), ("idempotency-replay-handler", b"mail"))
    put(broker, OrderPlaced(), ("idempotency-replay-group", b"shipping"))
    put(broker, OrderPlaced(), ("idempotency-generation", b"one"))

    await consumed(till, broker, replay=TRUSTED)

    assert sorted(till.runs) == ["charge 1", "mail 1", "mail 1"]
    assert till.here.observer.counts[Signal.REPLAY_FOR_OTHERS] == 1
    assert [dict(dead_letter.headers)["idempotency-dlq-reason"] for dead_letter in broker.values(DEAD)] == [b"invalid"]


FIELD = st.binary(max_size=12)
CLAIMS = st.builds(
    ReplayClaim, st.text(max_size=6), FIELD, FIELD, st.just(b"") | FIELD, st.integers(min_value=0, max_value=999)
)
HEADERS = st.lists(st.tuples(st.text(max_size=4), FIELD), max_size=3)


@given(CLAIMS, CLAIMS, FIELD, FIELD, HEADERS, HEADERS)
def test_messages_have_equal_signatures_only_if_all_signed_parts_are_equal(
    one: ReplayClaim, other: ReplayClaim, value: bytes, other_value: bytes, headers: Headers, other_headers: Headers
) -> None:
    def signed(claim: ReplayClaim, value: bytes, headers: Headers) -> bytes:
        return signature_of(claim, value, headers, SECRET.encode())

    same = one == other and value == other_value and (one.event != b"" or headers == other_headers)

    assert (signed(one, value, headers) == signed(other, other_value, other_headers)) == same


@given(FIELD, FIELD)
def test_bytes_cannot_move_between_signed_fields(left: bytes, right: bytes) -> None:
    text = left + right
    signatures = {
        signature_of(ReplayClaim("t", text[:at], text[at:]), b"", (), SECRET.encode()) for at in range(len(text) + 1)
    }

    assert len(signatures) == len(text) + 1


def forged_dead_letter(**fields: bytes) -> FakeRecord:
    headers = {"reason": b"handler_failed", "topic": b"order_placed", "group": b"billing", **fields}
    return FakeRecord(DEAD, 0, 0, b"k", b"{}", [(f"idempotency-dlq-{name}", text) for name, text in headers.items()])


def test_a_dead_letter_cannot_choose_where_it_is_replayed_to() -> None:
    forged = forged_dead_letter(topic=b"payroll_secret")

    assert replay_of(forged, SIGNED).topic == "order_placed"
    assert replay_of(forged, SIGNED, to="order_placed_again").topic == "order_placed_again"


@pytest.mark.parametrize("topic", ["order_placed", ".dlq", "order_placed.dlq2", ""])
def test_a_topic_without_a_source_topic_requires_a_destination(topic: str) -> None:
    dead_letter = dataclasses.replace(forged_dead_letter(), topic=topic)

    with pytest.raises(ApplicationError, match="dlq replay --to TOPIC"):
        replay_of(dead_letter, SIGNED)
    assert replay_of(dead_letter, SIGNED, to="order_placed").topic == "order_placed"


def test_the_dead_letter_suffix_is_taken_from_the_settings() -> None:
    settings = Settings(kafka=KafkaSettings(dead_letter_suffix="-dead"))

    assert (
        replay_of(dataclasses.replace(forged_dead_letter(), topic="shop.orders-dead"), settings).topic == "shop.orders"
    )
