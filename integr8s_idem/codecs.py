"""Codecs, which extract events from messages.  Pure.

native        the body is the event as JSON, as written by `encode_event`
cloudevents   CloudEvents 1.0 on Kafka: attributes in headers (binary), or around `data` in the body (structured)
wrapped       `{"id": …, "type": …, "version": …, "source": …, "occurredAt": …, "data": {…}}`

A custom codec, for example for Avro or Protobuf, returns the fields of the event with `event_type` and `event_id`.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

from integr8s_idem.errors import UndecodableEventError

logger = logging.getLogger(__name__)

Headers: TypeAlias = Sequence[tuple[str, bytes]]
"""Headers of a Kafka message; a name may occur more than once."""

Envelope: TypeAlias = Literal["native", "cloudevents", "wrapped"]

JsonReader: TypeAlias = Callable[[bytes], Any]
"""A strict reader of I-JSON (RFC 7493) that raises `UndecodableEventError`."""


class Codec(Protocol):
    """Extracts the fields of an event from a message."""

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        """Return the fields of the event in `body`, by field name or alias.

        `event_type` selects the class, `event_id` identifies the event, `event_version` is `major.minor`; the class
        validates the other fields.

        Raises:
            UndecodableEventError: The message does not contain a valid event.  Other exceptions are treated the same.
        """
        ...


def header(headers: Headers, name: str) -> str | None:
    """Return the last header called `name`, ignoring case; `None` if it is missing or not valid UTF-8."""
    for known, value in reversed(headers):
        if known.lower() == name:
            try:
                # Kafka allows headers without a value, although the type does not.
                return (value or b"").decode()
            except UnicodeDecodeError:
                return None
    return None


class NativeCodec:
    """The body is the event."""

    def __init__(self, read: JsonReader) -> None:
        self._read = read

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        return _object(self._read(body), "the body")


class WrappedCodec:
    """The fields of the event are in `data`, and the common fields are in the object around it."""

    def __init__(self, read: JsonReader) -> None:
        self._read = read

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        envelope = _object(self._read(body), "the body")
        return {
            **_object(envelope.get("data", {}), "data"),
            **_given(
                event_id=envelope.get("id"),
                event_type=envelope.get("type"),
                event_version=envelope.get("version"),
                timestamp=envelope.get("occurredAt"),
            ),
            **_from(envelope.get("source")),
        }


_PREFIX: Final = "ce_"
_REQUIRED: Final = ("specversion", "id", "source", "type")


class CloudEventsCodec:
    """CloudEvents 1.0, Kafka protocol binding 1.0.2: binary and structured mode, with JSON as data.

    An id is unique only within its source, so `event_id` combines both.

    Some producers write structured mode with the content type of its data, such as `application/json`.  Without
    `ce_…` headers, a JSON object with a `specversion` is read as structured mode, regardless of its content type.
    """

    def __init__(self, read: JsonReader) -> None:
        self._read = read
        self._has_warned = False

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        kind = (header(headers, "content-type") or "").partition(";")[0].strip().lower()
        if kind.startswith("application/cloudevents"):
            attributes, data = self._structured(body, kind)
        elif any(name.lower().startswith(_PREFIX) for name, _ in headers):
            attributes, data = self._binary(body, headers)
        else:
            attributes, data = self._mislabeled(body, kind)
        for name in _REQUIRED:
            if not isinstance(attributes.get(name), str) or not attributes[name]:
                reason = "missing_id" if name == "id" else "malformed"
                raise UndecodableEventError(reason, f"the required CloudEvents attribute {name} is missing or empty")
        if attributes["specversion"] != "1.0":
            detail = f"specversion {attributes['specversion'][:80]!r} is not supported, only CloudEvents 1.0"
            raise UndecodableEventError("unsupported_version", detail)
        return {
            **_object(data, "data"),
            **_given(
                event_id=f"{attributes['source']}#{attributes['id']}",
                event_type=attributes["type"],
                timestamp=attributes.get("time"),
                aggregate_id=attributes.get("subject"),
            ),
            **_from(attributes["source"]),
        }

    def _structured(self, body: bytes, kind: str) -> tuple[Mapping[str, Any], Any]:
        if kind != "application/cloudevents+json":
            detail = f"{kind} is not supported: send one CloudEvent per message, as JSON"
            raise UndecodableEventError("malformed", detail)
        return self._with_data(_object(self._read(body), "the body"))

    def _with_data(self, attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
        if "data_base64" not in attributes:
            return attributes, attributes.get("data", {})
        try:
            return attributes, self._read(base64.b64decode(attributes["data_base64"], validate=True))
        except (binascii.Error, TypeError, ValueError) as error:
            raise UndecodableEventError("malformed", f"data_base64: {error}") from None

    def _binary(self, body: bytes, headers: Headers) -> tuple[Mapping[str, Any], Any]:
        attributes = {
            name.lower().removeprefix(_PREFIX): header(headers, name.lower())
            for name, _ in headers
            if name.lower().startswith(_PREFIX)
        }
        return attributes, self._read(body)

    def _mislabeled(self, body: bytes, kind: str) -> tuple[Mapping[str, Any], Any]:
        """Read structured mode with a wrong content type."""
        attributes = _object(self._read(body), "the body")
        if "specversion" not in attributes:
            raise UndecodableEventError(
                "malformed",
                "not a CloudEvent: there are no ce_… headers, the content-type is not application/cloudevents+json, "
                "and the body has no specversion",
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "received and read CloudEvents in structured mode with the content-type %.80r; the producer should "
                "send application/cloudevents+json. This is logged once",
                kind,
            )
        return self._with_data(attributes)


class IdFromHeader:
    """Wraps a codec and takes the event id from a header of the message."""

    def __init__(self, codec: Codec, name: str) -> None:
        self._codec = codec
        self._name = name.lower()

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        found = header(headers, self._name)
        if not found:
            raise UndecodableEventError("missing_id", f"the message has no header {self._name} with the event id")
        return {**self._codec.fields(body, headers), "event_id": found}


_CODECS: Final[Mapping[Envelope, Callable[[JsonReader], Codec]]] = {
    "native": NativeCodec,
    "cloudevents": CloudEventsCodec,
    "wrapped": WrappedCodec,
}


def codec_of(envelope: Envelope, read: JsonReader) -> Codec:
    """Return the codec for `envelope`."""
    return _CODECS[envelope](read)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UndecodableEventError("malformed", f"{what} is not a JSON object")
    return value


def _given(**fields: Any) -> dict[str, Any]:
    """Drop missing fields, so that the event class uses its defaults."""
    return {name: value for name, value in fields.items() if value is not None}


def _from(source: Any) -> dict[str, Any]:
    return {"metadata": {"service_name": source}} if isinstance(source, str) else {}
