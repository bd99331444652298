from __future__ import annotations

import pytest
from pydantic import ValidationError

from integr8s_idem.events import EventDecoder, EventMetadata, encode_event
from integr8s_idem.keys.fingerprints import content_hash
from services.events import CreatePodCommand, ExecutionEvent, ExecutionRequested, ResultStored


def test_the_kafka_key_is_the_execution_id() -> None:
    event = ExecutionRequested(execution_id="e1", script="print()")

    assert event.aggregate_id == "e1"


def test_an_event_about_two_executions_is_refused() -> None:
    with pytest.raises(ValidationError, match="differ"):
        ResultStored(execution_id="e1", aggregate_id="e2", status="completed")


def test_events_survive_encoding_and_decoding() -> None:
    event = ExecutionRequested(execution_id="e1", script="print('ä')", metadata=EventMetadata(user_id="ann"))

    assert EventDecoder([ExecutionRequested]).decode(encode_event(event)) == event


@pytest.mark.parametrize(
    "invalid",
    [
        {"execution_id": ""},
        {"execution_id": "a b"},
        {"script": ""},
        {"script": "print()\x00"},
        {"timeout_seconds": 0},
        {"timeout_seconds": float("inf")},
        {"cpu_limit": -1},
        {"memory_limit_mb": 1},
        {"priority": 11},
        {"metadata": {"user_id": "\x00"}},
    ],
    ids=str,
)
def test_an_invalid_request_is_refused(invalid: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExecutionRequested.model_validate({"execution_id": "e1", "script": "print()"} | invalid)


def test_two_commands_of_one_saga_have_the_same_content_hash() -> None:
    first = CreatePodCommand(execution_id="e1", saga_id="s1", script="print()")
    second = CreatePodCommand(execution_id="e1", saga_id="s1", script="print()")

    assert first.event_id != second.event_id
    assert content_hash(first) == content_hash(second)


def test_every_event_has_its_own_type() -> None:
    types = [event.model_fields["event_type"].default for event in ExecutionEvent.__subclasses__()]

    assert len(set(types)) == len(types) == 11
