"""Messages of released versions are read by the current code, and the current code writes nothing else.

Dead letters are replayed, and services are deployed and rolled back, while messages of both versions are in the topics.
No broker takes part: the messages are in memory.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from integr8s_idem.config import ReplaySettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import EventDecoder
from integr8s_idem.worker.dead_letters import dead_letter_fields, own_headers, record_key_of, replay_of
from integr8s_idem.worker.replay_policy import ReplayPolicy
from integr8s_idem.worker.retry_copies import copy_of
from tests.golden.files import previous_version, read, versions
from tests.golden.messages import EVENTS, FAILED_AT, GROUP, HANDLER, RECORD, Placed, Shipped, messages, record_of
from tests.support.fake_consumer import FakeRecord
from tests.support.replays import SIGNED

ADVICE: Final = (
    "Workers of the previous minor version read these messages beside those of this one, and after a rollback.  If "
    "they ignore the change, list it in READABLE with the reason; otherwise only read the new form now: see "
    "CONTRIBUTING.md, Formats of records."
)

READABLE: Final[dict[str, str]] = {}
"""Messages with another form than in the previous minor version, which reads them, and why it can."""


@pytest.fixture(params=versions())
def golden(request: pytest.FixtureRequest) -> dict[str, FakeRecord]:
    """The messages of a version."""
    found: dict[str, Any] = read(request.param, "kafka")["messages"]
    return {name: record_of(one) for name, one in found.items()}


@pytest.mark.scenario(140)
def test_this_version_writes_only_messages_that_the_previous_minor_version_reads() -> None:
    known, written = read(previous_version(), "kafka")["messages"], messages()

    different = [
        f"{name}: {written.get(name)} instead of {one}"
        for name, one in known.items()
        if written.get(name) != one and name not in READABLE
    ]
    assert not different, "\n".join([*different, ADVICE])


def test_events_are_decoded(golden: dict[str, FakeRecord]) -> None:
    decoder = EventDecoder([Placed, Shipped])

    for name, event in EVENTS.items():
        assert decoder.decode(golden[name].value, golden[name].headers) == event, name
        assert dict(golden[name].headers)["event_id"] == event.event_id.encode()
    shipped = decoder.decode(golden["published event with 2 parcels"].value)
    assert isinstance(shipped, Shipped)
    assert shipped.parcels == (1, 2)
    assert (shipped.metadata.correlation_id, shipped.metadata.service_name) == ("c-1", "billing")


@pytest.mark.scenario(140)
def test_dead_letters_are_read_and_replayed(golden: dict[str, FakeRecord]) -> None:
    dead_letter = golden["dead letter"]
    fields = {name: value.decode() for name, value in dead_letter_fields(dead_letter).items()}

    assert fields["failed-at"].isdigit()
    assert {name: fields[name] for name in ("reason", "error-class", "group", "handler", "attempts")} == {
        "reason": "handler_failed",
        "error-class": "PermanentError",
        "group": GROUP,
        "handler": HANDLER,
        "attempts": "5",
    }
    assert fields["error-message"] == "PermanentError: no such account: Zoë \N{SNOWMAN}"
    assert (fields["topic"], fields["partition"], fields["offset"]) == ("golden.golden_placed", "3", "41")
    assert record_key_of(dead_letter) == RECORD
    assert own_headers(dead_letter) == own_headers(golden["event"])
    assert replay_of(dead_letter, SIGNED) == _sent(golden["signed replay of a dead letter"])
    assert replay_of(golden["dead letter of a replay"]).headers[-3][1] == b"2"
    assert FAILED_AT in dict(dead_letter.headers)


@pytest.mark.scenario(140)
@pytest.mark.parametrize("name", ["copy", "signed copy", "signed copy of a copy"])
def test_copies_in_retry_topics_are_verified_and_decoded(golden: dict[str, FakeRecord], name: str) -> None:
    record, secrets = golden[name], () if name == "copy" else SIGNED.replay.keys

    copy = copy_of(record, secrets)
    event = EventDecoder([Placed, Shipped]).decode(record.value, copy.origin.headers)

    assert event == EVENTS["event"]
    copy.check(event.event_id)
    assert (copy.group, copy.handler, copy.generation, copy.attempt, copy.aborted) == (GROUP, HANDLER, 2, 1, 1)
    assert (copy.origin.topic, copy.origin.partition, copy.origin.offset) == ("golden.golden_placed", 3, 41)
    assert [name for name, _ in copy.origin.headers] == [
        "event_type",
        "event_id",
        "correlation_id",
        "traceparent",
        "own",
    ]


def test_a_copy_without_key_body_and_headers_is_verified(golden: dict[str, FakeRecord]) -> None:
    copy = copy_of(golden["signed copy without key, body and headers"], SIGNED.replay.keys)

    assert (copy.attempt, copy.origin.key, copy.origin.headers) == (12, None, [])


def _sent(record: FakeRecord) -> tuple[Any, ...]:
    return (record.topic, record.key, record.value, list(record.headers))


@pytest.mark.parametrize("name", ["body", "body and headers", "body, headers and key"])
def test_shortened_dead_letters_are_not_replayed(golden: dict[str, FakeRecord], name: str) -> None:
    shortened = golden[f"dead letter without {name}"]

    assert dead_letter_fields(shortened)["body-bytes"] == str(len(golden["event"].value or b"")).encode()
    assert record_key_of(shortened) == RECORD
    with pytest.raises(ApplicationError, match="does not contain the whole message"):
        replay_of(shortened)


@pytest.mark.scenario(140)
@pytest.mark.parametrize(("name", "generation"), [("dead letter", 1), ("dead letter of a replay", 2)])
def test_signed_replays_are_honored(golden: dict[str, FakeRecord], name: str, generation: int) -> None:
    policy = ReplayPolicy(GROUP, SIGNED.replay)
    honored = policy.judge(golden[f"signed replay of a {name}"])

    assert (honored.generation, honored.only, honored.refused) == (generation, HANDLER, "")
    assert honored.fits("e-1")
    assert not honored.fits("e-2")
    assert ReplayPolicy("audit", SIGNED.replay).judge(golden[f"signed replay of a {name}"]).is_for_others
    assert policy.judge(golden[f"replay of a {name}"]).refused == "unsigned"
    claim = ReplayPolicy(GROUP, ReplaySettings()).judge(golden[f"replay of a {name}"]).unproven
    assert claim is not None
    assert (claim.generation, claim.handler) == (generation, HANDLER.encode())


def test_a_signed_replay_of_an_unreadable_message_is_honored(golden: dict[str, FakeRecord]) -> None:
    """Its signature covers its headers, since the id of its event is unknown."""
    replay = golden["signed replay of a dead letter of an unreadable message"]

    honored = ReplayPolicy(GROUP, SIGNED.replay).judge(replay)

    assert (honored.generation, honored.only, honored.refused) == (1, None, "")
