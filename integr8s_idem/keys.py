"""Keys, fingerprints and canonical JSON.  Pure.

A full key is made of escaped components, so that no two different inputs make one key:

    idempotency:billing:charge:order_placed:id:0192…       made from an event
    ───prefix── ─scope─ handler ───type──── how ──value──
    idempotency:billing::order:1                           given by a caller: the handler is empty
    idempotency:billing::http:ann:POST:shop:/orders:8e03…  made by an entry point that serves others: its name is first
    idempotency:billing:#9f86d081…                         hashed: too long, or `hash_keys`
    …;1                                                    behind any of them: asked for anew on purpose, once

`integr8s_idem.keys.Key` is the part after the scope.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import pydantic_core
import rfc8785
from pydantic import BaseModel

from integr8s_idem._util.escaping import printable
from integr8s_idem._util.fast_dataclass import quick
from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.events import BaseEvent

MAX_KEY_LENGTH: Final = 255
"""Most bytes of a full key: short enough for every store's index, long enough to stay readable."""

LAST_GENERATION: Final = 999
"""Work can be done anew on purpose this often; generation 0 is the first."""

LONGEST_PLAIN: Final = MAX_KEY_LENGTH - len(f";{LAST_GENERATION}")
"""Bytes of a full key before it is hashed: there is room for its generation."""

LONGEST_SCOPE: Final = 100
"""Bytes of a scope before it is hashed: prefix, scope and a hashed key fit together into `MAX_KEY_LENGTH`."""

VOLATILE_FIELDS: Final = frozenset({"event_id", "timestamp", "metadata"})
"""Fields of an event that differ between two deliveries of the same work; the list of the seeds."""

FINGERPRINT_BYTES: Final = 16
"""The first half of a SHA-256: compared only within one key, 128 bits are plenty, and records stay small."""

LONGEST_LABEL: Final = 200
"""Characters of a key as people read it."""

_SAFE: Final = "-._~@+,/"
_SAFE_IN_A_CALLERS_KEY: Final = _SAFE + ":"


class EntryPoint(str, Enum):
    """An entry point whose keys are made of what others send.  Its name is the first part of its keys."""

    HTTP = "http"
    """Requests with an `Idempotency-Key` header."""
    FASTSTREAM = "faststream"
    """Messages that FastStream receives."""
    KAFKA_LOOP = "kafka-loop"
    """Records in a loop over a Kafka consumer."""


_RESERVED: Final = tuple(f"{entry.value}:" for entry in EntryPoint)
"""What a key that a caller gives cannot start with unescaped."""


class KeyStrategy(str, Enum):
    """What makes two events the same work."""

    EVENT_BASED = "event_based"
    """Equal ids.  The payload's fingerprint is kept beside it, so that a reused id is noticed."""
    CONTENT_HASH = "content_hash"
    """Equal content, whatever the id: RFC 8785 form without `event_id`, `timestamp`, `metadata`."""
    CUSTOM = "custom"
    """Whatever a function of the event says."""


@quick
@dataclass(frozen=True, slots=True)
class Key:
    """One unit of work within a scope, already escaped."""

    text: str
    name: str
    """What people see in messages, but for the generation: `order_placed:0192…`."""
    generation: int = 0
    """How often the work was asked for anew on purpose."""

    @staticmethod
    def of(text: str) -> Key:
        """A key given by a caller.  Compared byte for byte: no case folding, no Unicode normalization.

        Raises:
            InvalidKeyError: It is empty, or no string.
        """
        plain = escaped(given_text(text), safe=_SAFE_IN_A_CALLERS_KEY)
        if plain.startswith(_RESERVED):
            plain = plain.replace(":", "%3A", 1)
        return Key(":" + plain, _label(text))

    @staticmethod
    def of_entry(entry: EntryPoint, *parts: str, name: str) -> Key:
        """A key that an entry point makes of what others send: no other entry point and no caller can name it."""
        return Key(":" + ":".join((entry.value, *map(escaped, parts))), _label(name))

    @staticmethod
    def of_event(handler: str, event_type: str, how: str, value: str) -> Key:
        """A key made from an event; `handler` keeps two handlers of one event apart."""
        return Key(_beginning(handler, event_type, how) + escaped(value), _label(f"{event_type}:{value}"))

    @property
    def label(self) -> str:
        """What people see in messages."""
        return f"{self.name} (generation {self.generation})" if self.generation else self.name

    @property
    def digest(self) -> str:
        """What stands for its text where that is too long, or must not be seen."""
        return f"#{hashlib.sha256(self.text.encode()).hexdigest()}"

    def hidden(self) -> Key:
        """The same key, which shows people nothing of itself."""
        return replace(self, name=self.digest)

    def in_generation(self, generation: int) -> Key:
        """The same work, to be done anew on purpose; generation 0 is the first.

        The earlier generations keep their records: a replay lifts their block and leaves their history.
        """
        return self if generation == self.generation else replace(self, generation=generation)


def generation_key(full: str, generation: int) -> str:
    """The full key of a generation of the work whose first one has the key `full`."""
    # No component holds a semicolon: it is escaped.
    return f"{full};{generation}" if generation else full


def first_generation_key(full: str, generation: int) -> str:
    """The reverse of `generation_key`."""
    return full.removesuffix(f";{generation}") if generation else full


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Where the keys of one service live in the store."""

    prefix: str
    scope: str
    hash_keys: bool = False
    """Hash every key, in the store and for people: for keys that hold personal data."""
    root: str = field(init=False, repr=False, compare=False)
    """What all full keys of this space start with."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _root(self.prefix, self.scope))

    def key(self, given: str | Key) -> Key:
        """A caller's string as a key, a key as it is; for people no more of it than the store may know."""
        key = given if isinstance(given, Key) else Key.of(given)
        return key.hidden() if self.hash_keys else key

    def step(self, full: str, name: str, slot: int) -> Key:
        """The key of a step of the work whose full key is `full`; `name` is what people see."""
        # No component holds a semicolon, and no generation begins with a letter.
        return Key(f"{full.removeprefix(self.root)};s{slot}", name)

    def full(self, key: Key) -> str:
        """The key as the store sees it: printable ASCII, at most `MAX_KEY_LENGTH` bytes."""
        full = self.root + key.text
        if self.hash_keys or len(full) > LONGEST_PLAIN:
            full = self.root + key.digest
        return generation_key(full, key.generation)


class KeyedWork(NamedTuple):
    """A key, and the fingerprint that a second use of it must match."""

    key: Key
    fingerprint: bytes | None


@dataclass(frozen=True, slots=True)
class KeyResolver:
    """Makes the key of an event for one handler, once, before the handler can touch the event."""

    strategy: KeyStrategy = KeyStrategy.EVENT_BASED
    fields: frozenset[str] | None = None
    """For `content_hash`: only these fields count."""
    custom: Callable[[BaseEvent], str] | None = None
    """For `custom`: makes the key from the event."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "strategy", KeyStrategy(self.strategy))
        except ValueError as error:
            known = ", ".join(strategy.value for strategy in KeyStrategy)
            raise InvalidKeyError(f"{self.strategy!r} is no key strategy; there are {known}") from error
        if (self.strategy is KeyStrategy.CUSTOM) != (self.custom is not None):
            raise InvalidKeyError("the custom strategy and a key function go together, one without the other does not")
        if self.fields is not None and self.strategy is not KeyStrategy.CONTENT_HASH:
            raise InvalidKeyError("fields only mean something to the content_hash strategy")

    def check(self, event: type[BaseEvent]) -> None:
        """Refuse at start what could never make a key.

        Raises:
            InvalidKeyError: A field to be hashed does not exist: all events would be equal.
        """
        missing = (self.fields or frozenset()) - set(event.model_fields)
        if missing or self.fields == frozenset():
            raise InvalidKeyError(
                f"{event.__name__} has no field {', '.join(sorted(missing)) or '(none was named)'} to hash"
            )

    def resolve(self, handler: str, event: BaseEvent, generation: int = 0) -> KeyedWork:
        """The key of `event` for `handler`; `generation` counts how often it was replayed on purpose.

        Raises:
            InvalidKeyError: The event offers nothing to make a key of.
        """
        if self.strategy is KeyStrategy.EVENT_BASED:
            key = Key.of_event(handler, event.event_type, "id", event.event_id)
            return KeyedWork(key.in_generation(generation), fingerprint_of(event))
        if self.strategy is KeyStrategy.CONTENT_HASH:
            digest = content_hash(event, self.fields)
            return KeyedWork(Key.of_event(handler, event.event_type, "content", digest).in_generation(generation), None)
        assert self.custom is not None
        value = given_text(self.custom(event))
        return KeyedWork(Key.of_event(handler, event.event_type, "custom", value).in_generation(generation), None)


def given_text(text: object) -> str:
    """`text`, if a key can be made of it.

    Raises:
        InvalidKeyError: It is empty, or not a string.
    """
    if not isinstance(text, str) or not text:
        raise InvalidKeyError(f"a key is a string with at least one character, not {text!r:.80}")
    return text


def _label(text: str) -> str:
    """`text` for people, bounded: a key of a megabyte belongs neither into a log nor into a header."""
    if len(text) <= LONGEST_LABEL:
        return printable(text)
    begin = printable(text[: LONGEST_LABEL - 30])
    return f"{begin}…#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def escaped(component: str, *, safe: str = _SAFE) -> str:
    """`component` as a part of a key: what separates parts, and what is no printable ASCII, is percent-encoded."""
    plain = _plain_text(safe).fullmatch(component)
    if plain:
        return plain[0]
    # Lone surrogates reach us through JSON escapes; they are as good a difference as any.
    return quote(component, safe=safe, errors="surrogatepass")


@lru_cache(maxsize=8)
def _plain_text(safe: str) -> re.Pattern[str]:
    """What `quote` leaves as it is: most ids and names."""
    return re.compile(rf"[A-Za-z0-9_.~{re.escape(safe)}-]*")


# Handlers, types of events and scopes are few; ids, which are many, are behind what is kept here.


@lru_cache(maxsize=1024)
def _beginning(handler: str, event_type: str, how: str) -> str:
    """What comes before the value in all keys that one handler has for one type of events."""
    return ":".join(map(escaped, (handler, event_type, how, "")))


@lru_cache(maxsize=1024)
def _root(prefix: str, scope: str) -> str:
    name = escaped(scope)
    if len(name) > LONGEST_SCOPE:
        name = "#" + hashlib.sha256(name.encode()).hexdigest()
    return f"{prefix}:{name}:"


def downstream_key(key: str, name: str) -> str:
    """A key for something done downstream on behalf of `key`: the same at every attempt, at most 255 characters."""
    text = f"{key}:{escaped(name)}"
    return text if len(text) <= MAX_KEY_LENGTH else hashlib.sha256(text.encode()).hexdigest()


def payload_of(event: BaseEvent, fields: Iterable[str] | None = None) -> dict[str, object]:
    """What two deliveries of the same work have in common, as plain JSON values."""
    if fields is not None:
        return event.model_dump(mode="json", include=set(fields))
    return event.model_dump(mode="json", exclude=set(VOLATILE_FIELDS))


def content_hash(event: BaseEvent, fields: Iterable[str] | None = None) -> str:
    """SHA-256, in hex, of the payload.  The event type is part of the key, not of the hash."""
    return hashlib.sha256(canonical_json(payload_of(event, fields))).hexdigest()


def fingerprint_of(event: BaseEvent) -> bytes:
    """What tells one payload from another under the same id: `FINGERPRINT_BYTES` of a SHA-256."""
    names = _plain_names(type(event))
    if names:
        try:
            return fingerprint(pydantic_core.to_json(_plain_payload(event.__dict__, names)))
        except (TypeError, ValueError):
            pass  # a value is none of those that every writer of JSON writes alike
    return fingerprint(canonical_json(payload_of(event)))


def _plain_payload(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, object]:
    """What `payload_of` gives, in canonical order, where all values are plain.

    Raises:
        TypeError: One is not.
    """
    table = {}
    for name in names:
        value = values[name]
        kind = type(value)
        if kind is str or kind is bool or value is None or (kind is int and abs(value) <= _SAFE_INTEGER):
            table[name] = value
        else:
            raise TypeError
    return table


@lru_cache(maxsize=1_024)
def _plain_names(event: type[BaseEvent]) -> tuple[str, ...]:
    """The fields of a payload, in canonical order, where pydantic writes each as it is; else none.

    That is a class whose fields hold texts, integers, booleans or nothing, and which has no ways of its own to
    write them.  Then there is no need to have pydantic make the payload first.
    """
    schema: Any = event.__pydantic_core_schema__
    fields: Any = schema.get("schema", {})
    its_own = event.model_dump is not BaseModel.model_dump or event.model_config.get("serialize_by_alias")
    if its_own or not _is_plain(schema, "model") or not _is_plain(fields, "model-fields"):
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
    """What tells one payload from another: `FINGERPRINT_BYTES` of its SHA-256."""
    return hashlib.sha256(payload).digest()[:FINGERPRINT_BYTES]


def canonical_json(value: object) -> bytes:
    """RFC 8785 form of plain JSON values.

    That form has no integers beyond ±(2^53 - 1); events do (64-bit ids).  A value that holds
    one is written with those integers as marked strings, behind a marker of its own, so
    that it equals nothing else.

    Raises:
        InvalidKeyError: NaN, infinity, or something that is no JSON value.
    """
    try:
        return pydantic_core.to_json(_in_canonical_order(value))
    except (TypeError, ValueError, RecursionError):
        return _by_the_standard(value)


def _in_canonical_order(value: Any) -> Any:
    """What is equal to `value`, and has its RFC 8785 form from any writer of JSON.

    Raises:
        TypeError: There may be no such thing: writers differ about some numbers, and orders about some names.
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
    """`number` as every writer writes it: no exponent, and no fraction where it is whole.

    Raises:
        TypeError: It needs an exponent somewhere, or is none.
    """
    if abs(number) <= _SAFE_INTEGER and number.is_integer():
        return int(number)
    if 1e-4 <= abs(number) < 1e15:
        return number
    raise TypeError


def _by_the_standard(value: object) -> bytes:
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
