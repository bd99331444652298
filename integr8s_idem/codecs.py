"""Codecs: how an event lies in a message.  Pure.

native        the event itself is the JSON of the body, as `encode_event` writes it
cloudevents   CloudEvents 1.0 on Kafka: attributes in headers (binary), or around `data` in the body (structured)
wrapped       `{"id": …, "type": …, "version": …, "source": …, "occurredAt": …, "data": {…}}`

A codec of one's own, for Avro or Protobuf, returns the fields of the event, with `event_type` and `event_id`.
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
"""Kafka's: a name may come more than once."""

Envelope: TypeAlias = Literal["native", "cloudevents", "wrapped"]

JsonReader: TypeAlias = Callable[[bytes], Any]
"""Reads I-JSON (RFC 7493), strictly.  Raises `UndecodableEventError`."""


class Codec(Protocol):
    """Reads what lies in a message."""

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        """The fields of the event in `body`, by the names under which its class reads them: aliases where it has some.

        `event_type` says which class it is, `event_id` names the event, `event_version` is `major.minor`; the rest is
        validated by the class.

        Raises:
            UndecodableEventError: Nothing of the kind is in it.  Any other exception counts as one, too.
        """
        ...


def header(headers: Headers, name: str) -> str | None:
    """The last header of that name, whatever its case; `None` if there is none, or if it is no UTF-8."""
    for known, value in reversed(headers):
        if known.lower() == name:
            try:
                return value.decode()
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
    """The event's own fields are in `data`, and what every event has is around it."""

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

    An id is unique within its source only, so `event_id` is made of both.

    Some producers write structured mode with the content type of its data, such as `application/json`.  Without headers
    `ce_…`, a JSON object that has a `specversion` is read as structured mode, whatever its content type.
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
                raise UndecodableEventError(reason, f"a CloudEvent has the attribute {name}, and this message has none")
        if attributes["specversion"] != "1.0":
            told = f"CloudEvents 1.0 are read, and this is {attributes['specversion'][:80]!r}"
            raise UndecodableEventError("unsupported_version", told)
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
            raise UndecodableEventError("malformed", f"{kind} is not read: one CloudEvent a message, as JSON")
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
        """Structured mode whose content type is that of something else."""
        attributes = _object(self._read(body), "the body")
        if "specversion" not in attributes:
            raise UndecodableEventError(
                "malformed",
                "not a CloudEvent: there are no headers ce_…, the content-type is not application/cloudevents+json, "
                "and the body has no specversion",
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "CloudEvents in structured mode arrive with the content-type %.80r; they are read. Have the producer "
                "send application/cloudevents+json. This is logged once",
                kind,
            )
        return self._with_data(attributes)


class IdFromHeader:
    """Another codec, whose events are named by a header of the message."""

    def __init__(self, codec: Codec, name: str) -> None:
        self._codec = codec
        self._name = name.lower()

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        found = header(headers, self._name)
        if not found:
            raise UndecodableEventError("missing_id", f"the message has no header {self._name}, which names its event")
        return {**self._codec.fields(body, headers), "event_id": found}


_CODECS: Final[Mapping[Envelope, Callable[[JsonReader], Codec]]] = {
    "native": NativeCodec,
    "cloudevents": CloudEventsCodec,
    "wrapped": WrappedCodec,
}


def codec_of(envelope: Envelope, read: JsonReader) -> Codec:
    """The codec of that name."""
    return _CODECS[envelope](read)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UndecodableEventError("malformed", f"{what} is no JSON object")
    return value


def _given(**fields: Any) -> dict[str, Any]:
    """Those that are there: for the others the event's class has its defaults."""
    return {name: value for name, value in fields.items() if value is not None}


def _from(source: Any) -> dict[str, Any]:
    return {"metadata": {"service_name": source}} if isinstance(source, str) else {}
