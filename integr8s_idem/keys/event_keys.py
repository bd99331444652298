"""The keys of events: the strategies, and what makes a key for each event.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from integr8s_idem._util import speedups
from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.events import BaseEvent
from integr8s_idem.keys import LONGEST_LABEL, Key, escaped, given_text, key_prefix, plain_text
from integr8s_idem.keys.fingerprints import (
    PlainFingerprints,
    content_hash,
    event_field_set,
    fingerprint_of,
    plain_fingerprints,
    plain_names,
)

_is_plain: Final = plain_text().fullmatch


class KeyStrategy(str, Enum):
    """How the key of an event is derived."""

    EVENT_BASED = "event_based"
    """From the event id.  The fingerprint of the payload is stored with it, to detect reused ids."""
    CONTENT_HASH = "content_hash"
    """From the content: its RFC 8785 form without `event_id`, `timestamp`, `metadata`."""
    CUSTOM = "custom"
    """From a function of the event."""


# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_EVENT_BASED: Final = KeyStrategy.EVENT_BASED


class KeyedWork(Struct, frozen=True, gc=False):
    """A key, and the fingerprint that later uses of the key must match."""

    key: Key
    fingerprint: bytes | None


@dataclass(frozen=True, slots=True)
class KeyResolver:
    """Derives the key of an event for a handler, before the handler can modify the event."""

    strategy: KeyStrategy = KeyStrategy.EVENT_BASED
    fields: frozenset[str] | None = None
    """For `content_hash`: use only these fields."""
    custom: Callable[[BaseEvent], str] | None = None
    """For `custom`: returns the key of an event."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "strategy", KeyStrategy(self.strategy))
        except ValueError as error:
            known = ", ".join(strategy.value for strategy in KeyStrategy)
            raise InvalidKeyError(f"{self.strategy!r} is not a key strategy; use one of {known}") from error
        if (self.strategy is KeyStrategy.CUSTOM) != (self.custom is not None):
            raise InvalidKeyError("use a key function with the custom strategy, and only with it")
        if self.fields is not None and self.strategy is not KeyStrategy.CONTENT_HASH:
            raise InvalidKeyError("fields require the content_hash strategy")

    def check(self, event: type[BaseEvent]) -> None:
        """Check that the resolver can derive keys from events of a class.

        Raises:
            InvalidKeyError: `fields` is empty or names a missing field, so that all events would be equal.
        """
        missing = (self.fields or frozenset()) - set(event.model_fields)
        if missing or self.fields == frozenset():
            raise InvalidKeyError(
                f"{event.__name__} has no field {', '.join(sorted(missing)) or '(none was named)'} to hash"
            )

    def resolve(self, handler: str, event: BaseEvent, generation: int = 0) -> KeyedWork:
        """Return the key of `event` for `handler`; `generation` is the number of deliberate reruns.

        Raises:
            InvalidKeyError: No key can be made of the event.
        """
        if self.strategy is _EVENT_BASED:
            maker = _key_maker(speedups.native, handler, type(event), event.event_type)
            made: KeyedWork | None = None if maker is None else maker.make(event, generation)
            if made is not None:
                return made
            key = Key.of_event(handler, event.event_type, "id", event.event_id, generation=generation)
            return KeyedWork(key, fingerprint_of(event))
        if self.strategy is KeyStrategy.CONTENT_HASH:
            digest = content_hash(event, self.fields)
            return KeyedWork(Key.of_event(handler, event.event_type, "content", digest, generation=generation), None)
        assert self.custom is not None
        value = given_text(self.custom(event))
        return KeyedWork(Key.of_event(handler, event.event_type, "custom", value, generation=generation), None)


class _KeyMaker:
    """Makes the keys of the events of one class for one handler.  The native code has the same class."""

    __slots__ = ("_fingerprints", "_label", "_longest_id", "_prefix")

    def __init__(self, prefix: str, label: str, fingerprints: PlainFingerprints) -> None:
        self._prefix = prefix
        self._label = label
        self._longest_id = LONGEST_LABEL - len(label)
        self._fingerprints = fingerprints

    def make(self, event: BaseEvent, generation: int) -> KeyedWork | None:
        """Return key and fingerprint of `event`; `None` if its id or a value of its payload is not plain."""
        values = event.__dict__
        event_id = values.get("event_id")
        if type(event_id) is not str or len(event_id) > self._longest_id or not _is_plain(event_id):
            return None
        fingerprint = self._fingerprints.make(values)
        if fingerprint is None:
            return None
        return KeyedWork(Key(self._prefix + event_id, self._label + event_id, generation), fingerprint)


@lru_cache(maxsize=1024)
def _key_maker(native: Any | None, handler: str, event: type[BaseEvent], event_type: str) -> Any | None:
    """Return what makes the keys of a class of events; `None` if its payload or type is not plain."""
    fingerprints, label = plain_fingerprints(event), f"{event_type}:"
    has_own_attributes = event.__getattribute__ is not object.__getattribute__ or hasattr(event, "event_id")
    if fingerprints is None or has_own_attributes or not (label.isascii() and label.isprintable()):
        return None
    prefix = key_prefix(handler, event_type, "id")
    if native is None:
        return _KeyMaker(prefix, label, fingerprints)
    return native.KeyMaker(
        Key,
        KeyedWork,
        prefix=prefix,
        label=label,
        longest_label=LONGEST_LABEL,
        safe="".join(character for character in map(chr, range(128)) if escaped(character) == character),
        field_set=event_field_set(event),
        names=plain_names(event),
    )
