"""Encoding of events, and the reasons why messages are undecodable."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.errors import ApplicationError, EventError, UndecodableEventError
from integr8s_idem.events import (
    BaseEvent,
    EventDecoder,
    EventMetadata,
    derived_event_id,
    encode_event,
    event_headers,
    event_type_of,
    new_event_id,
)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    amount: float = 0.0
    extra: Any = None


DECODER = EventDecoder([OrderPlaced])
GOOD: dict[str, Any] = {
    "event_type": "order_placed",
    "event_id": "1",
    "order_id": "7",
    "timestamp": "2030-01-01T00:00:00Z",
}


def body(**changes: object) -> bytes:
    return json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not ...}).encode()


def rejection_of(message: bytes | None) -> UndecodableEventError:
    with pytest.raises(UndecodableEventError) as caught:
        DECODER.decode(message)
    return caught.value


def test_an_encoded_event_is_decoded_to_an_equal_event() -> None:
    event = OrderPlaced(order_id="7", amount=3.5, metadata=EventMetadata(user_id="bob"), extra={"a": [1, None]})

    assert DECODER.decode(encode_event(event)) == event


@pytest.mark.scenario(81, 82, 83)
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "empty"),
        (b"", "empty"),
        (b"{", "malformed"),
        (b"[]", "malformed"),
        (b"null", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"\xef\xbb\xbf" + body(), "malformed"),
        (body() + b"{}", "malformed"),
        (body().decode().encode("utf-16"), "malformed"),
        (body()[:-1], "malformed"),
        (body()[:-1] + b', "extra": "\xed\xa0\x80"}', "malformed"),
        (body()[:-1] + b', "extra": "\\ud800"}', "malformed"),
        (body()[:-1] + b', "extra": "\x00"}', "malformed"),
        (body(extra=...)[:-1] + b', "extra": ' + b"[" * 250 + b"]" * 250 + b"}", "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"a":' * 100_000, "malformed"),
        (body(event_id="\ud800"), "malformed"),
        (body(event_id=...), "missing_id"),
        (body(event_id=""), "missing_id"),
        (body(event_id=7), "missing_id"),
        (body(event_id="x" * 1_025), "invalid"),
        (body(event_id=None), "missing_id"),
        (body(event_type="\ud800"), "unknown_type"),
        (body(event_type=...), "unknown_type"),
        (body(event_type=None), "unknown_type"),
        (body(event_type="order_eaten"), "unknown_type"),
        (body(event_version="2.0"), "unsupported_version"),
        (body(event_version=1), "unsupported_version"),
        (body(order_id=...), "invalid"),
        (body(order_id=7), "invalid"),
        (body(amount=float("nan")), "malformed"),
        (body(extra=[float("-inf")]), "malformed"),
        (body(extra=...)[:-1] + b', "extra": [1e999]}', "malformed"),
        (body(timestamp="2030-01-01T00:00:00"), "invalid"),
    ],
    ids=str,
)
def test_an_undecodable_message_is_rejected_with_a_reason(message: bytes | None, reason: str) -> None:
    assert rejection_of(message).reason == reason


def test_a_newer_minor_version_and_unknown_fields_are_read() -> None:
    event = DECODER.decode(body(event_version="1.7", brand_new=True))

    assert isinstance(event, OrderPlaced)
    assert event.order_id == "7"


@pytest.mark.scenario(81)
@pytest.mark.parametrize(
    "more",
    [
        ', "event_id": "2"}',
        ', "event_id": "1"}',
        ', "event\\u005fid": "2"}',
        ', "order_id": "8"}',
        ', "metadata": {"user_id": "a", "user_id": "b"}}',
        ', "extra": [{"a": 1, "a": 1}]}',
        ', "unknown": {"a": {"b": 1, "b": 2}}}',
    ],
)
def test_a_duplicate_name_in_an_object_is_malformed(more: str) -> None:
    error = rejection_of(body()[:-1] + more.encode())

    assert (error.reason, error.detail) == ("malformed", "an object contains a duplicate name")


def test_the_same_name_in_several_objects_is_accepted() -> None:
    extra = [{"order_id": 1}, {"order_id": {"order_id": 2}}]

    event = DECODER.decode(body(extra=extra))

    assert isinstance(event, OrderPlaced)
    assert event.extra == extra


@pytest.mark.scenario(81)
def test_an_integer_of_a_million_digits_is_malformed() -> None:
    huge = body()[:-1] + b', "extra": ' + b"9" * 1_000_000 + b"}"

    assert rejection_of(huge).reason == "malformed"


def test_a_rejection_does_not_show_the_payload() -> None:
    error = rejection_of(body(order_id=["4111-1111-1111-1111"]))

    assert "4111" not in str(error)
    assert "order_id" in str(error)


def test_an_unknown_event_type_is_reported_with_the_handled_types() -> None:
    error = rejection_of(body(event_type="x" * 10_000))

    assert "handled here: order_placed" in error.detail
    assert len(error.detail) < 300


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_decoding_arbitrary_bytes_raises_only_undecodable_event_error(message: bytes) -> None:
    with pytest.raises(UndecodableEventError):
        DECODER.decode(message)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(st.dictionaries(st.sampled_from([*OrderPlaced.model_fields, "other"]), anything))
def test_any_json_is_an_event_or_undecodable(changes: dict[str, object]) -> None:
    try:
        event = DECODER.decode(json.dumps({**GOOD, **changes}).encode())
    except UndecodableEventError:
        return

    assert isinstance(event, OrderPlaced)


def test_an_id_is_generated_for_a_new_event_but_not_for_a_decoded_one() -> None:
    assert OrderPlaced(order_id="7").event_id != OrderPlaced(order_id="7").event_id
    assert rejection_of(body(event_id=...)).reason == "missing_id"


def test_new_ids_sort_by_time() -> None:
    ids = [new_event_id() for _ in range(100)]

    assert ids == sorted(ids)
    assert len(set(ids)) == 100


def test_derived_ids_are_stable_and_differ_by_key_and_index() -> None:
    assert derived_event_id("a", 0) == derived_event_id("a", 0)
    assert len({derived_event_id(key, index) for key in ("a", "b") for index in range(3)}) == 6
    assert derived_event_id("k", 0) == "c796abd9-cb3e-5701-bfb2-1ffb776784c1"


def test_headers_carry_type_id_and_correlation_as_bytes() -> None:
    event = OrderPlaced(order_id="7", event_id="é", metadata=EventMetadata(correlation_id="c"))

    assert dict(event_headers(event)) == {
        "event_type": b"order_placed",
        "event_id": b"\xc3\xa9",
        "correlation_id": b"c",
    }


def test_an_event_class_without_event_type_is_rejected() -> None:
    class Nameless(BaseEvent):
        pass

    with pytest.raises(ApplicationError, match="Nameless does not define event_type"):
        event_type_of(Nameless)


def test_events_are_immutable() -> None:
    event = OrderPlaced(order_id="7")

    with pytest.raises(ValueError, match="frozen"):
        event.order_id = "8"  # type: ignore[misc]  # frozen on purpose


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_an_event_with_nan_or_infinity_cannot_be_published(number: float) -> None:
    event = OrderPlaced(order_id="NaN", extra=[{"a": number}])

    with pytest.raises(EventError, match="OrderPlaced cannot be published"):
        encode_event(event)


def test_strings_such_as_nan_and_infinity_can_be_published() -> None:
    event = OrderPlaced(order_id="NaN", extra=["Infinity", "-Infinity"])

    assert DECODER.decode(encode_event(event)) == event
