"""Hashes and fingerprints of payloads, made from canonical JSON (RFC 8785).

A fingerprint has 16 bytes, of one of two kinds, which the first bit distinguishes:

    0   127 bits of a digest: of bytes that every version of the code reads alike, such as the body of a request
    1   the 31 bits of a field set (`integr8s_idem.keys.field_sets`), then 96 bits of a digest of these fields

`integr8s_idem.records.is_other_payload` compares them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
import rfc8785
from pydantic import BaseModel

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.events import BaseEvent
from integr8s_idem.keys.field_sets import FIELD_SET_BYTES, field_set_of

__all__ = ["canonical_json", "content_hash", "fingerprint_of"]

_to_json: Final = msgspec.json.Encoder().encode
"""Writes JSON without spaces, in the order of the fields.  Three times as fast as pydantic's writer."""

VOLATILE_FIELDS: Final = frozenset({"event_id", "timestamp", "metadata"})
"""Fields that may differ between events that request the same work."""


FINGERPRINT_BYTES: Final = 16
"""Enough, since fingerprints are compared only within one key, and records stay small."""


_MARKED: Final = b"\x80"
"""The lowest first byte of a fingerprint with a field set."""


def payload_of(event: BaseEvent, fields: Iterable[str] | None = None) -> dict[str, object]:
    """Return the fields that are equal in all deliveries of the same work, as plain JSON values."""
    if fields is not None:
        return event.model_dump(mode="json", include=set(fields))
    return event.model_dump(mode="json", exclude=set(VOLATILE_FIELDS))


def content_hash(event: BaseEvent, fields: Iterable[str] | None = None) -> str:
    """Return the SHA-256 of the payload, in hex.  The event type is part of the key, not of the hash."""
    return hashlib.sha256(canonical_json(payload_of(event, fields))).hexdigest()


def fingerprint_of(event: BaseEvent) -> bytes:
    """Return the fingerprint of the payload: the set of its fields, and a digest of their values.

    If you give it to a manager, it is compared whole.  Give the event itself instead, so that versions of its class
    that differ in a field can be deployed side by side.
    """
    plain = plain_fingerprints(type(event))
    made = None if plain is None else plain.make(event.__dict__)
    if made is not None:
        return made
    return fingerprint_of_fields(event_field_set(type(event)), canonical_json(payload_of(event)))


@lru_cache(maxsize=1_024)
def event_field_set(event: type[BaseEvent]) -> bytes:
    """Return the name of the set of fields that `fingerprint_of` covers."""
    return field_set_of(event, VOLATILE_FIELDS)


class PlainFingerprints:
    """Makes the fingerprints of one class of events, whose fields are `plain_names`, like `fingerprint_of`."""

    __slots__ = ("_field_set", "_names")

    def __init__(self, field_set: bytes, names: tuple[str, ...]) -> None:
        self._field_set = field_set
        self._names = names

    def make(self, values: Mapping[str, Any]) -> bytes | None:
        """Return the fingerprint of these fields; `None` if the JSON form of a value may depend on the writer."""
        payload = {}
        for name in self._names:
            payload[name] = value = values[name]
            kind = type(value)
            if kind is str or kind is bool or value is None:
                continue
            if kind is not int or abs(value) > _SAFE_INTEGER:
                return None
        try:
            return fingerprint_of_fields(self._field_set, _to_json(payload))
        except (TypeError, ValueError):  # such as a lone surrogate
            return None


@lru_cache(maxsize=1_024)
def plain_fingerprints(event: type[BaseEvent]) -> PlainFingerprints | None:
    """Return what makes the fingerprints of plain events of a class; `None` if its fields are not plain."""
    names = plain_names(event)
    return PlainFingerprints(event_field_set(event), names) if names else None


@lru_cache(maxsize=1_024)
def plain_names(event: type[BaseEvent]) -> tuple[str, ...]:
    """Return the fields of a payload in canonical order if pydantic dumps them unchanged, else no fields.

    The fields of such a class are strings, integers, booleans or `None`, without custom serializers.  Their
    payload does not need `model_dump`, which saves time.
    """
    schema: Any = event.__pydantic_core_schema__
    fields: Any = schema.get("schema", {})
    has_custom_dump = event.model_dump is not BaseModel.model_dump or event.model_config.get("serialize_by_alias")
    if has_custom_dump or not _is_plain(schema, "model") or not _is_plain(fields, "model-fields"):
        return ()
    if fields.get("computed_fields") or fields.get("extras_schema") or event.model_config.get("extra") == "allow":
        return ()
    names = sorted(set(fields["fields"]) - VOLATILE_FIELDS)
    plain = all(name.isascii() and _is_plain_field(fields["fields"][name]) for name in names)
    return tuple(names) if plain else ()


def _is_plain(schema: Mapping[str, Any], kind: str) -> bool:
    return schema.get("type") == kind and "serialization" not in schema


def _is_plain_field(field: Mapping[str, Any]) -> bool:
    if any(name.startswith("serialization") for name in field):
        return False
    schema: Any = field["schema"]
    while schema.get("type") in {"default", "nullable"} and "serialization" not in schema:
        schema = schema["schema"]
    return any(_is_plain(schema, kind) for kind in ("str", "int", "bool", "literal"))


def fingerprint(payload: bytes) -> bytes:
    """Return the fingerprint of bytes that do not depend on the version of the code."""
    return without_field_set(hashlib.sha256(payload).digest()[:FINGERPRINT_BYTES])


def fingerprint_of_fields(field_set: bytes, payload: bytes) -> bytes:
    """Return the fingerprint of `payload`, the values of the fields that `field_set` names."""
    return field_set + hashlib.sha256(payload).digest()[: FINGERPRINT_BYTES - FIELD_SET_BYTES]


def given_fingerprint(given: bytes | BaseEvent | None) -> bytes | None:
    """Return the fingerprint for what a caller gives: an event, or 16 bytes, which are compared whole.

    Bytes whose first bit is 0 are the fingerprint.  A digest of others is, and its first bit is 0, so that the
    fingerprint in a record may be given again.
    """
    if given is None or isinstance(given, bytes):
        # The store rejects another length.
        return fingerprint(given) if given and len(given) == FINGERPRINT_BYTES and given >= _MARKED else given
    return fingerprint_of(given)


def without_field_set(digest: bytes) -> bytes:
    """Return `digest` with the first bit 0."""
    return bytes((digest[0] & 0x7F,)) + digest[1:]


def canonical_json(value: object) -> bytes:
    """Return the RFC 8785 form of plain JSON values.

    RFC 8785 excludes integers beyond ±(2^53 - 1), but events contain them (64-bit ids).  Such
    integers are written as marked strings, and the whole value gets a prefix, so
    that it differs from every other value.

    Raises:
        InvalidKeyError: The value contains NaN, infinity or a value that is not valid JSON.
    """
    try:
        return _to_json(_in_canonical_order(value))
    except (TypeError, ValueError, RecursionError):
        return _rfc8785_json(value)


def _in_canonical_order(value: Any) -> Any:
    """Return an equal value whose JSON from any writer is its RFC 8785 form.

    Raises:
        TypeError: There may be none, since writers differ in some numbers, and sort orders in some names.
    """
    kind = type(value)
    if kind is dict:
        table = {}
        for name in sorted(value):
            if type(name) is not str or not name.isascii():
                raise TypeError
            item = value[name]
            table[name] = item if type(item) is str else _in_canonical_order(item)
        return table
    if kind is list:
        return [item if type(item) is str else _in_canonical_order(item) for item in value]
    if kind is float:
        return _plain_number(value)
    if kind is str or kind is bool or value is None or (kind is int and abs(value) <= _SAFE_INTEGER):
        return value
    raise TypeError


def _plain_number(number: float) -> float:
    """Return a number that every writer writes the same way: no exponent, and no fraction if it is an integer.

    Raises:
        TypeError: Some writers use an exponent, or it is not finite.
    """
    if abs(number) <= _SAFE_INTEGER and number.is_integer():
        return int(number)
    if 1e-4 <= abs(number) < 1e15:
        return number
    raise TypeError


def _rfc8785_json(value: object) -> bytes:
    try:
        try:
            return rfc8785.dumps(value)  # type: ignore[arg-type]  # checked by rfc8785 itself
        except rfc8785.IntegerDomainError:
            return b"big:" + rfc8785.dumps(_without_big_integers(value))  # type: ignore[arg-type]
    except (rfc8785.CanonicalizationError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidKeyError(f"the payload has no canonical form: {error}") from error


_SAFE_INTEGER: Final = 2**53 - 1


def _without_big_integers(value: object) -> object:
    if isinstance(value, int) and abs(value) > _SAFE_INTEGER:
        return f"#{value}"
    if isinstance(value, str) and value.startswith("#"):
        return "#" + value
    if isinstance(value, Mapping):
        return {name: _without_big_integers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_big_integers(item) for item in value]
    return value
