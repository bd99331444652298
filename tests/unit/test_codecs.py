"""Envelopes other than the native one: CloudEvents 1.0, wrapped events, custom codecs."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

import pytest

from integr8s_idem import BaseEvent
from integr8s_idem.codecs import CloudEventsCodec, Codec, Headers, IdFromHeader, NativeCodec, WrappedCodec, header
from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import EventDecoder, encode_event, read_json


class OrderPlaced(BaseEvent):
    event_type: Literal["order.placed"] = "order.placed"
    order_id: str
    amount: Decimal = Decimal(0)


CLOUD, WRAPPED, NATIVE = CloudEventsCodec(read_json), WrappedCodec(read_json), NativeCodec(read_json)
DATA = {"order_id": "7", "amount": "30.00"}
ATTRIBUTES = {
    "specversion": "1.0",
    "id": "a1",
    "source": "/shop",
    "type": "order.placed",
    "time": "2026-11-21T10:00:00Z",
    "subject": "order-7",
}
STRUCTURED = [("content-type", b"application/cloudevents+json; charset=UTF-8")]


def _decoded(codec: Codec, body: bytes, headers: Headers = ()) -> OrderPlaced:
    event = EventDecoder([OrderPlaced], codec).decode(body, headers)
    assert isinstance(event, OrderPlaced)
    return event


def _binary(**changes: str | None) -> list[tuple[str, bytes]]:
    attributes = {**ATTRIBUTES, **changes}
    found = [(f"ce_{name}", value.encode()) for name, value in attributes.items() if value is not None]
    return [*found, ("content-type", b"application/json")]


def _structured(**changes: Any) -> bytes:
    fields = {**ATTRIBUTES, "data": DATA, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def _check(event: OrderPlaced) -> None:
    assert (event.event_id, event.order_id, event.amount) == ("/shop#a1", "7", Decimal("30.00"))
    assert event.timestamp == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert (event.aggregate_id, event.metadata.service_name) == ("order-7", "/shop")


def test_a_cloud_event_in_binary_mode_is_read() -> None:
    _check(_decoded(CLOUD, json.dumps(DATA).encode(), _binary()))


def test_a_cloud_event_in_structured_mode_is_read() -> None:
    _check(_decoded(CLOUD, _structured(), STRUCTURED))


@pytest.mark.parametrize("label", ["application/json", "Application/JSON; charset=utf-8", "text/plain", None])
def test_structured_mode_is_recognized_by_its_specversion_with_any_content_type(label: str | None) -> None:
    headers = [] if label is None else [("content-type", label.encode())]
    _check(_decoded(CloudEventsCodec(read_json), _structured(), headers))
    encoded = base64.b64encode(json.dumps(DATA).encode()).decode()
    _check(_decoded(CloudEventsCodec(read_json), _structured(data=None, data_base64=encoded), headers))


def test_each_codec_logs_a_wrong_content_type_once(caplog: pytest.LogCaptureFixture) -> None:
    codec, headers = CloudEventsCodec(read_json), [("content-type", b"application/json\n" + b"x" * 500)]
    for _ in range(3):
        _check(_decoded(codec, _structured(), headers))

    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "application/cloudevents+json" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


def test_correctly_labeled_messages_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    codec = CloudEventsCodec(read_json)
    _decoded(codec, _structured(), STRUCTURED)
    _decoded(codec, json.dumps(DATA).encode(), _binary())
    with pytest.raises(UndecodableEventError):
        _decoded(codec, b"{}", [("content-type", b"application/json")])
    assert caplog.records == []


def test_binary_mode_headers_take_precedence_over_a_body_in_structured_mode() -> None:
    class Envelope(BaseEvent):
        event_type: Literal["order.placed"] = "order.placed"
        specversion: str
        data: dict[str, str]

    body = _structured(id="inner", source="/inner")
    event = EventDecoder([Envelope], CloudEventsCodec(read_json)).decode(body, _binary())
    assert isinstance(event, Envelope)
    assert (event.event_id, event.specversion, event.data) == ("/shop#a1", "1.0", DATA)
    # One header selects binary mode; missing attributes are not read from the body.
    with pytest.raises(UndecodableEventError, match="attribute specversion is missing"):
        _decoded(CloudEventsCodec(read_json), body, [("ce_id", b"a1"), ("content-type", b"application/json")])


def test_data_in_base64_is_read() -> None:
    encoded = base64.b64encode(json.dumps(DATA).encode()).decode()
    _check(_decoded(CLOUD, _structured(data=None, data_base64=encoded), STRUCTURED))


def test_header_names_are_compared_without_case() -> None:
    headers = [(name.upper(), value) for name, value in _binary()]
    _check(_decoded(CLOUD, json.dumps(DATA).encode(), headers))


def test_the_same_id_from_two_sources_means_two_events() -> None:
    body = json.dumps(DATA).encode()
    ids = {_decoded(CLOUD, body, _binary(source=source)).event_id for source in ("/shop", "/till")}
    assert len(ids) == 2


def test_optional_attributes_may_be_missing() -> None:
    event = _decoded(CLOUD, json.dumps(DATA).encode(), _binary(time=None, subject=None))
    assert event.aggregate_id is None


def test_data_does_not_override_attributes() -> None:
    body = json.dumps({**DATA, "event_id": "mine", "event_type": "other"}).encode()
    assert _decoded(CLOUD, body, _binary()).event_id == "/shop#a1"


@pytest.mark.parametrize(
    ("body", "headers", "reason"),
    [
        (b"{}", [], "malformed"),
        (b"not json", [("content-type", b"application/json")], "malformed"),
        (b"[]", [("content-type", b"application/json")], "malformed"),
        (b'{"specversion": 1}', [("content-type", b"application/json")], "malformed"),
        (_structured(specversion="0.3"), [("content-type", b"application/json")], "unsupported_version"),
        (_structured(id=None), [("content-type", b"application/json")], "missing_id"),
        (_structured(data=[1]), [("content-type", b"application/json")], "malformed"),
        (b"{}", _binary(id=None), "missing_id"),
        (b"{}", _binary(id=""), "missing_id"),
        (b"{}", _binary(source=None), "malformed"),
        (b"{}", _binary(specversion="0.3"), "unsupported_version"),
        (b"{}", _binary(type="order.lost"), "unknown_type"),
        (b"{}", _binary(), "invalid"),
        (b"[]", _binary(), "malformed"),
        (b"not json", _binary(), "malformed"),
        (b'{"order_id": "7", "order_id": "8"}', _binary(), "malformed"),
        (b"not json", STRUCTURED, "malformed"),
        (_structured(id=7), STRUCTURED, "missing_id"),
        (_structured(data=[1]), STRUCTURED, "malformed"),
        (_structured(data=None, data_base64="%"), STRUCTURED, "malformed"),
        (_structured(data=None, data_base64=7), STRUCTURED, "malformed"),
        (b"[]", [("content-type", b"application/cloudevents-batch+json")], "malformed"),
        (b"x", [("content-type", b"application/cloudevents+avro")], "malformed"),
        (b"{}", [("ce_id", b"\xff"), ("ce_type", b"a"), ("ce_source", b"b"), ("ce_specversion", b"1.0")], "missing_id"),
        (b"", _binary(), "empty"),
    ],
)
def test_an_invalid_cloud_event_is_rejected_with_a_reason(body: bytes, headers: Headers, reason: str) -> None:
    with pytest.raises(UndecodableEventError) as caught:
        _decoded(CLOUD, body, headers)
    assert caught.value.reason == reason


def test_a_wrapped_event_is_read() -> None:
    body = {
        "id": "evt-1",
        "type": "order.placed",
        "version": "1",
        "source": "order-service",
        "occurredAt": "2025-10-13T10:00:00Z",
        "data": DATA,
    }
    event = _decoded(WRAPPED, json.dumps(body).encode())
    assert (event.event_id, event.order_id, event.event_version) == ("evt-1", "7", "1")
    assert event.timestamp == datetime(2025, 10, 13, 10, tzinfo=UTC)
    assert event.metadata.service_name == "order-service"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"type": "order.placed", "data": DATA}, "missing_id"),
        ({"id": "1", "data": DATA}, "unknown_type"),
        ({"id": "1", "type": "order.placed", "version": "2", "data": DATA}, "unsupported_version"),
        ({"id": "1", "type": "order.placed", "data": "x"}, "malformed"),
        ({"id": "1", "type": "order.placed"}, "invalid"),
        ([], "malformed"),
    ],
)
def test_an_invalid_wrapped_event_is_rejected_with_a_reason(body: object, reason: str) -> None:
    with pytest.raises(UndecodableEventError) as caught:
        _decoded(WRAPPED, json.dumps(body).encode())
    assert caught.value.reason == reason


def test_a_header_can_contain_the_event_id() -> None:
    codec = IdFromHeader(NATIVE, "Message-Id")
    event = OrderPlaced(order_id="7")
    read = _decoded(codec, encode_event(event), [("message-id", b"first"), ("MESSAGE-ID", b"m-1")])
    assert (read.event_id, read.order_id) == ("m-1", "7")
    with pytest.raises(UndecodableEventError, match="no header message-id"):
        _decoded(codec, encode_event(event))


class PackedCodec:
    """A custom codec for a binary format."""

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        number, cents = struct.unpack("!iq", body)
        return {
            "event_id": f"packed-{number}",
            "event_type": "order.placed",
            "order_id": str(number),
            "amount": Decimal(cents) / 100,
        }


def test_a_custom_codec_can_read_any_format() -> None:
    event = _decoded(PackedCodec(), struct.pack("!iq", 7, 3000))
    assert (event.event_id, event.order_id, event.amount) == ("packed-7", "7", Decimal(30))


def test_an_error_of_a_codec_makes_the_message_undecodable() -> None:
    with pytest.raises(UndecodableEventError, match="error: unpack requires") as caught:
        _decoded(PackedCodec(), b"short")
    assert caught.value.reason == "malformed"


def test_a_header_without_a_value_is_empty() -> None:
    headers: Any = [("Id", None)]

    assert header(headers, "id") == ""
