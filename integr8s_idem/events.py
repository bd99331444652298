"""Events and their encoding as Kafka messages.

body      the event as JSON
headers   event_type, event_id, correlation_id, and headers of the tracer (traceparent), for routing
key       aggregate_id, so that the events of one aggregate stay in order
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isinf
from typing import Annotated, Any, Final, NamedTuple, NoReturn, TypeVar, get_args

import jiter
import uuid_utils
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from integr8s_idem._util import speedups
from integr8s_idem.codecs import Codec, Headers
from integr8s_idem.errors import ApplicationError, EventError, UndecodableEventError

MAX_ID_LENGTH: Final = 1024
"""Longest event id, in characters; longer ids are rejected, while long keys are hashed."""

DERIVED_IDS: Final = uuid.UUID("6f9b7a52-54c1-5d0b-9f0e-3f3d1f0f6c1e")
"""Namespace of derived event ids; it must not change, or reruns would publish different ids."""

EventId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH)]
_TYPE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,150}")
EventT = TypeVar("EventT", bound="BaseEvent")


def new_event_id() -> str:
    """Return a UUIDv7 (RFC 9562): unique, and roughly ordered by the producer's clock."""
    return str(uuid_utils.uuid7())


def derived_event_id(key: str, index: int) -> str:
    """Return the id of the `index`-th event published by the work with `key`: the same in every rerun (UUIDv5)."""
    return str(uuid.uuid5(DERIVED_IDS, f"{key}#{index}"))


def _now() -> datetime:
    return datetime.now(UTC)


class EventMetadata(BaseModel):
    """The publisher of an event and the user it acted for.  Ignored when events are compared."""

    model_config = ConfigDict(frozen=True)

    service_name: str = ""
    service_version: str = ""
    correlation_id: str = ""
    """Shared by all events that result from one request."""
    user_id: str | None = None


class BaseEvent(BaseModel):
    """Base class of events.  Subclasses define `event_type` as a `Literal`:

    class OrderPlaced(BaseEvent):
        event_type: Literal["order_placed"] = "order_placed"
        order_id: str
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    event_id: EventId = Field(default_factory=new_event_id)
    """Generated once, by the producer.  Messages without an id are rejected."""
    event_type: str
    event_version: str = "1.0"
    """`major.minor`; consumers accept every minor version of the major version they know."""
    timestamp: AwareDatetime = Field(default_factory=_now)
    """Time of the event, by the producer's clock; informational."""
    aggregate_id: str | None = None
    """The entity the event is about; also the Kafka key."""
    metadata: EventMetadata = Field(default_factory=EventMetadata)


def event_type_of(event: type[BaseEvent]) -> str:
    """Return the `event_type` that a subclass defines.

    Raises:
        ApplicationError: It does not define one, or one that is not valid in a topic name.
    """
    field = event.model_fields["event_type"]
    event_type, choices = field.default, get_args(field.annotation)
    if not isinstance(event_type, str) or (choices and choices != (event_type,)):
        raise ApplicationError(f'{event.__name__} does not define event_type; add event_type: Literal["…"] = "…"')
    if not _TYPE_NAME.fullmatch(event_type):
        raise ApplicationError(
            f"{event.__name__} has the event_type {event_type[:80]!r}, which is not valid in a topic name: "
            "use at most 150 letters, digits, '.', '_' and '-'"
        )
    return event_type


def encode_event(event: BaseEvent) -> bytes:
    """Encode `event` as the body of a message: JSON in UTF-8.

    Raises:
        EventError: It contains NaN or infinity, which are not valid JSON.
    """
    body = event.__pydantic_serializer__.to_json(event)
    if b"NaN" in body or b"Infinity" in body:
        _reject_invalid_numbers(event, body)
    return body


def _reject_invalid_numbers(event: BaseEvent, body: bytes) -> None:
    try:
        _STRICT_JSON.decode(body.decode())
    except ValueError as error:
        raise EventError(f"{type(event).__name__} cannot be published: {error}") from None


def event_headers(event: BaseEvent) -> list[tuple[str, bytes]]:
    """Return the message headers of `event`, without those of a tracer."""
    headers = [("event_type", event.event_type), ("event_id", event.event_id)]
    if event.metadata.correlation_id:
        headers.append(("correlation_id", event.metadata.correlation_id))
    return [(name, value.encode("utf-8", "backslashreplace")) for name, value in headers]


@dataclass(frozen=True, slots=True)
class Message:
    """An encoded event, ready to be published."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    event_id: str
    event_type: str


_FIRST_VERSION: Final = "1.0"
"""Version of messages without one."""


class _Envelope(BaseModel):
    """The fields that are read before the class of an event is known."""

    model_config = ConfigDict(strict=True)

    event_type: str
    event_id: EventId
    event_version: str = _FIRST_VERSION


class _KnownEvent(NamedTuple):
    """An event class and the version it reads."""

    event: type[BaseEvent]
    version: str


_ENVELOPE_REASONS: Final[Mapping[tuple[int | str, ...], str]] = {
    ("event_type",): "unknown_type",
    ("event_id",): "missing_id",
    ("event_version",): "unsupported_version",
}
_OTHER_REASONS: Final = {"string_too_long": "invalid", "string_unicode": "malformed"}


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("an object contains a duplicate name")
    return table


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError("a number is too large")
    return number


_WITHOUT_FLOATS: Final = frozenset({str, int, bool, type(None)})

_STRICT_JSON: Final = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_names, parse_constant=_reject_constant, parse_float=_finite
)


class EventDecoder:
    """Decodes message bodies into events of known classes.

    Bodies must be I-JSON (RFC 7493), so that all readers see the same event: UTF-8 without a byte order mark,
    unique names in each object, no NaN or infinity, no lone surrogates.
    """

    def __init__(self, events: Iterable[type[BaseEvent]], codec: Codec | None = None) -> None:
        """
        Args:
            events: The known classes.
            codec: Extracts the fields of an event from a message; by default the body is the event as JSON.
        """
        self._events = {event_type_of(event): _KnownEvent(event, _version_of(event)) for event in events}
        self._codec = codec
        known = [(name, each.event, each.version.split(".", 1)[0]) for name, each in self._events.items()]
        self._find: Any = speedups.native.EventClasses(known).find if speedups.native else None

    def decode(self, body: bytes | None, headers: Headers = ()) -> BaseEvent:
        """Decode the event in a message.

        Raises:
            UndecodableEventError: With one of the reasons `empty`, `malformed`, `missing_id`,
                `unknown_type`, `unsupported_version`, `invalid`.
        """
        if not body:
            raise UndecodableEventError("empty", "the message has no body")
        if self._codec is None:
            event = (self._find is not None and self._find(body)) or self._class_for(read_json(body))
            return _validated(event.__pydantic_validator__.validate_json, body)
        fields = _fields_in(self._codec, body, headers)
        return _validated(self._class_for(fields).__pydantic_validator__.validate_python, fields)

    def _class_for(self, fields: object) -> type[BaseEvent]:
        event_type, version = _envelope_in(fields)
        known = self._events.get(event_type)
        if known is None:
            names = ", ".join(sorted(self._events)) or "none"
            raise UndecodableEventError(
                "unknown_type", f"event_type {event_type[:80]!r} is not one of the types handled here: {names}"
            )
        if version != known.version:
            _check_major(known, version)
        return known.event


InputT = TypeVar("InputT")


def _validated(validate: Callable[[InputT], BaseEvent], given: InputT) -> BaseEvent:
    try:
        return validate(given)
    except ValidationError as error:
        reason = "malformed" if _first(error)["type"] == "json_invalid" else "invalid"
        raise UndecodableEventError(reason, _first_mistake(error)) from None


def _fields_in(codec: Codec, body: bytes, headers: Headers) -> dict[str, Any]:
    try:
        return dict(codec.fields(body, headers))
    except UndecodableEventError:
        raise
    except Exception as error:  # a custom codec may raise anything on invalid input
        raise UndecodableEventError("malformed", f"{type(error).__name__}: {str(error)[:200]}") from error


def _envelope_in(fields: object) -> tuple[str, str]:
    """Return type and version of the event in `fields`."""
    if type(fields) is dict:
        event_type, event_id = fields.get("event_type"), fields.get("event_id")
        version = fields.get("event_version", _FIRST_VERSION)
        if type(event_type) is type(event_id) is type(version) is str and (
            0 < len(event_id) <= MAX_ID_LENGTH and event_id.isascii()
        ):
            return event_type, version
    # The fast check did not pass: let pydantic validate the fields or report the error.
    envelope = _checked_envelope(fields)
    return envelope.event_type, envelope.event_version


def _checked_envelope(fields: object) -> _Envelope:
    try:
        return _Envelope.model_validate(fields)
    except ValidationError as error:
        first = _first(error)
        reason = _OTHER_REASONS.get(first["type"]) or _ENVELOPE_REASONS.get(first["loc"], "malformed")
        raise UndecodableEventError(reason, _first_mistake(error)) from None


def read_json(body: bytes) -> Any:
    """Read I-JSON strictly.

    Raises:
        UndecodableEventError: `body` is not valid I-JSON.
    """
    try:
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
        is_valid = _is_finite(value)
    except (ValueError, TypeError, RecursionError):
        is_valid = False
    return value if is_valid else _read_carefully(body)


def _is_finite(value: Any) -> bool:
    """Return whether no number in `value` has overflowed: jiter reads 1e999 as infinity."""
    kind = type(value)
    if kind is float:
        return not isinf(value)
    if kind is not dict and kind is not list:
        return True
    for inner in value.values() if kind is dict else value:
        if type(inner) not in _WITHOUT_FLOATS and not _is_finite(inner):
            return False
    return True


def _read_carefully(body: bytes) -> Any:
    """Read a body that jiter rejected, which usually raises an error with the reason."""
    try:
        return _STRICT_JSON.decode(body.decode())
    except UnicodeDecodeError as error:
        raise UndecodableEventError("malformed", f"invalid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UndecodableEventError("malformed", f"invalid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise UndecodableEventError("malformed", "the JSON is nested too deeply") from None
    except ValueError as error:  # from the hooks above, or from Python for an integer with too many digits
        raise UndecodableEventError("malformed", str(error)) from None


def _version_of(event: type[BaseEvent]) -> str:
    """Return the version of `event` that is supported."""
    return str(event.model_fields["event_version"].default)


def _check_major(known: _KnownEvent, version: str) -> None:
    if version.split(".", 1)[0] != known.version.split(".", 1)[0]:
        raise UndecodableEventError(
            "unsupported_version",
            f"{known.event.__name__} is supported in version {known.version}, not {version[:80]!r}",
        )


def _first(error: ValidationError) -> ErrorDetails:
    return error.errors(include_url=False, include_input=False, include_context=False)[0]


def _first_mistake(error: ValidationError) -> str:
    """Return place and message of the first error, without the input, which may be confidential."""
    first = _first(error)
    where = ".".join(str(part) for part in first["loc"])[:200]
    more = error.error_count() - 1
    return f"{where + ': ' if where else ''}{first['msg']}" + (f" (and {more} more)" if more else "")
