"""Events and their form on the wire: a JSON body, and headers for those who only route.

body      the event as JSON
headers   event_type, event_id, correlation_id, and what the tracer adds (traceparent)
key       aggregate_id, so that the events of one aggregate keep their order
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

from integr8s_idem.codecs import Codec, Headers
from integr8s_idem.errors import ApplicationError, EventError, UndecodableEventError

MAX_ID_LENGTH: Final = 1024
"""Characters of an event id; a key longer than a store likes is hashed, an id longer than this is a mistake."""

DERIVED_IDS: Final = uuid.UUID("6f9b7a52-54c1-5d0b-9f0e-3f3d1f0f6c1e")
"""Namespace of the ids derived from an incoming key; changing it would make old events new."""

EventId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH)]
_TYPE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,150}")
EventT = TypeVar("EventT", bound="BaseEvent")


def new_event_id() -> str:
    """A UUIDv7 (RFC 9562): unique, and roughly ordered by the producer's clock."""
    return str(uuid_utils.uuid7())


def derived_event_id(key: str, index: int) -> str:
    """The id of the `index`-th event that the work named `key` publishes: the same at every rerun (UUIDv5)."""
    return str(uuid.uuid5(DERIVED_IDS, f"{key}#{index}"))


def _now() -> datetime:
    return datetime.now(UTC)


class EventMetadata(BaseModel):
    """Who published an event, and in whose name.  Not part of what makes two events the same work."""

    model_config = ConfigDict(frozen=True)

    service_name: str = ""
    service_version: str = ""
    correlation_id: str = ""
    """Shared by all events that follow from one request."""
    user_id: str | None = None


class BaseEvent(BaseModel):
    """What a producer published.  Subclasses pin `event_type` with a `Literal`:

    class OrderPlaced(BaseEvent):
        event_type: Literal["order_placed"] = "order_placed"
        order_id: str
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    event_id: EventId = Field(default_factory=new_event_id)
    """Made once, by the producer.  A message without one is refused, never given one."""
    event_type: str
    event_version: str = "1.0"
    """`major.minor`; a reader accepts any minor of the major it knows."""
    timestamp: AwareDatetime = Field(default_factory=_now)
    """When it happened, by the producer's clock.  Decides nothing here."""
    aggregate_id: str | None = None
    """What the event is about; also the Kafka key."""
    metadata: EventMetadata = Field(default_factory=EventMetadata)


def event_type_of(event: type[BaseEvent]) -> str:
    """The `event_type` that a subclass pins.

    Raises:
        ApplicationError: It pins none, so no topic and no decoder can be found for it.
    """
    told = event.model_fields["event_type"]
    pinned, choices = told.default, get_args(told.annotation)
    if not isinstance(pinned, str) or (choices and choices != (pinned,)):
        raise ApplicationError(f'{event.__name__} pins no event_type; write event_type: Literal["…"] = "…" in it')
    if not _TYPE_NAME.fullmatch(pinned):
        raise ApplicationError(
            f"{event.__name__} has the event_type {pinned[:80]!r}, which makes no topic: "
            "use letters, digits, '.', '_' and '-', at most 150"
        )
    return pinned


def encode_event(event: BaseEvent) -> bytes:
    """The body of `event` on the wire: JSON in UTF-8.

    Raises:
        EventError: It holds NaN or infinity, which no reader would take.
    """
    body = event.__pydantic_serializer__.to_json(event)
    if b"NaN" in body or b"Infinity" in body:
        _refuse_no_numbers(event, body)
    return body


def _refuse_no_numbers(event: BaseEvent, body: bytes) -> None:
    try:
        _STRICT_JSON.decode(body.decode())
    except ValueError as error:
        raise EventError(f"{type(event).__name__} cannot be published: {error}") from None


def event_headers(event: BaseEvent) -> list[tuple[str, bytes]]:
    """The headers of `event` on the wire, without those of a tracer."""
    headers = [("event_type", event.event_type), ("event_id", event.event_id)]
    if event.metadata.correlation_id:
        headers.append(("correlation_id", event.metadata.correlation_id))
    return [(name, value.encode("utf-8", "backslashreplace")) for name, value in headers]


@dataclass(frozen=True, slots=True)
class Message:
    """An event as it goes to the broker."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    event_id: str
    event_type: str


_FIRST_VERSION: Final = "1.0"
"""Of a message that tells none."""


class _Envelope(BaseModel):
    """What must be known before the class of an event is."""

    model_config = ConfigDict(strict=True)

    event_type: str
    event_id: EventId
    event_version: str = _FIRST_VERSION


class _Kind(NamedTuple):
    """Events of one class."""

    event: type[BaseEvent]
    version: str


_ENVELOPE_REASONS: Final[Mapping[tuple[int | str, ...], str]] = {
    ("event_type",): "unknown_type",
    ("event_id",): "missing_id",
    ("event_version",): "unsupported_version",
}
_OTHER_REASONS: Final = {"string_too_long": "invalid", "string_unicode": "malformed"}


def _with_names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return table


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError("a number is larger than any reader can hold")
    return number


_STRICT_JSON: Final = json.JSONDecoder(
    object_pairs_hook=_with_names_once, parse_constant=_no_number, parse_float=_finite
)


class EventDecoder:
    """Turns message bodies into events of known classes.  Never guesses.

    Bodies are I-JSON (RFC 7493), as canonical forms presume: UTF-8 without a byte order mark, every name
    once in its object, no NaN or infinity, no lone surrogates.  Two readers of such a body see one event.
    """

    def __init__(self, events: Iterable[type[BaseEvent]], codec: Codec | None = None) -> None:
        """`codec`: how an event lies in a message, if the body is not simply the event."""
        self._events = {event_type_of(event): _Kind(event, _version_of(event)) for event in events}
        self._codec = codec

    def decode(self, body: bytes | None, headers: Headers = ()) -> BaseEvent:
        """The event in a message.

        Raises:
            UndecodableEventError: With one of the reasons `empty`, `malformed`, `missing_id`,
                `unknown_type`, `unsupported_version`, `invalid`.
        """
        if not body:
            raise UndecodableEventError("empty", "the message has no body")
        if self._codec is None:
            event = self._class_for(read_json(body))
            return _validated(event.__pydantic_validator__.validate_json, body)
        fields = _fields_in(self._codec, body, headers)
        return _validated(self._class_for(fields).__pydantic_validator__.validate_python, fields)

    def _class_for(self, fields: object) -> type[BaseEvent]:
        event_type, version = _envelope_in(fields)
        kind = self._events.get(event_type)
        if kind is None:
            known = ", ".join(sorted(self._events)) or "none"
            raise UndecodableEventError(
                "unknown_type", f"event_type {event_type[:80]!r} is not one of those handled here: {known}"
            )
        if version != kind.version:
            _check_major(kind, version)
        return kind.event


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
    except Exception as error:  # a codec is the user's code, and what it reads is anybody's
        raise UndecodableEventError("malformed", f"{type(error).__name__}: {str(error)[:200]}") from error


def _envelope_in(fields: object) -> tuple[str, str]:
    """Type and version of the event in `fields`."""
    if type(fields) is dict:
        event_type, event_id = fields.get("event_type"), fields.get("event_id")
        version = fields.get("event_version", _FIRST_VERSION)
        if type(event_type) is type(event_id) is type(version) is str and _is_plain_id(event_id):
            return event_type, version
    # Not plainly right: pydantic says what is wrong, or that nothing is.
    envelope = _checked_envelope(fields)
    return envelope.event_type, envelope.event_version


def _is_plain_id(event_id: str) -> bool:
    return 0 < len(event_id) <= MAX_ID_LENGTH and event_id.isascii()


def _checked_envelope(fields: object) -> _Envelope:
    try:
        return _Envelope.model_validate(fields)
    except ValidationError as error:
        first = _first(error)
        reason = _ENVELOPE_REASONS.get(first["loc"], "malformed")
        if first["type"] in _OTHER_REASONS:
            reason = _OTHER_REASONS[first["type"]]
        raise UndecodableEventError(reason, _first_mistake(error)) from None


def read_json(body: bytes) -> Any:
    """I-JSON, strictly.

    Raises:
        UndecodableEventError: It is none.
    """
    try:
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
        sound = _all_finite((value,))
    except (ValueError, TypeError, RecursionError):
        sound = False
    return value if sound else _read_carefully(body)


def _all_finite(values: Iterable[Any]) -> bool:
    """Whether no number has overflowed: jiter takes 1e999 for infinity."""
    for value in values:
        kind = type(value)
        if kind is str:  # as most are
            continue
        if kind is float and isinf(value):
            return False
        if kind is dict and not _all_finite(value.values()):
            return False
        if kind is list and not _all_finite(value):
            return False
    return True


def _read_carefully(body: bytes) -> Any:
    """What is to be said of a body that jiter does not vouch for: as a rule, why it is no I-JSON."""
    try:
        return _STRICT_JSON.decode(body.decode())
    except UnicodeDecodeError as error:
        raise UndecodableEventError("malformed", f"no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UndecodableEventError("malformed", f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise UndecodableEventError("malformed", "it is nested too deeply") from None
    except ValueError as error:  # ours, or Python's about an integer of too many digits
        raise UndecodableEventError("malformed", str(error)) from None


def _version_of(event: type[BaseEvent]) -> str:
    """The version in which `event` is read."""
    return str(event.model_fields["event_version"].default)


def _check_major(kind: _Kind, version: str) -> None:
    if version.split(".", 1)[0] != kind.version.split(".", 1)[0]:
        raise UndecodableEventError(
            "unsupported_version", f"{kind.event.__name__} is read in version {kind.version}, this is {version[:80]!r}"
        )


def _first(error: ValidationError) -> ErrorDetails:
    return error.errors(include_url=False, include_input=False, include_context=False)[0]


def _first_mistake(error: ValidationError) -> str:
    """Where and what, without the input: a payload may hold what no log should."""
    first = _first(error)
    where = ".".join(str(part) for part in first["loc"])[:200]
    more = error.error_count() - 1
    return f"{where + ': ' if where else ''}{first['msg']}" + (f" (and {more} more)" if more else "")
