"""Keys, fingerprints and canonical JSON.  Pure.

A full key consists of escaped components, so that different inputs never result in the same key:

    idempotency:billing:charge:order_placed:id:0192…       from an event
    ───prefix── ─scope─ handler ───type──── how ──value──
    idempotency:billing::order:1                           from a caller: the handler is empty
    idempotency:billing::http:ann:POST:shop:/orders:8e03…  from an entry point, whose name comes first
    idempotency:billing:#9f86d081…                         hashed: too long, or `hash_keys`
    …;1                                                    suffix of any of them: generation 1, a deliberate rerun

`integr8s_idem.keys.Key` is the part after the scope.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final, final
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from integr8s_idem._util.escaping import printable
from integr8s_idem.errors import InvalidKeyError

MAX_KEY_LENGTH: Final = 255
"""Longest full key, in bytes: short enough for the index of every store, long enough to stay readable."""

LAST_GENERATION: Final = 999
"""The highest generation, which limits deliberate reruns; generation 0 is the first."""

LONGEST_PLAIN: Final = MAX_KEY_LENGTH - len(f";{LAST_GENERATION}")
"""Longest full key that is not hashed, in bytes; leaves room for the generation."""

LONGEST_SCOPE: Final = 100
"""Longest scope that is not hashed, in bytes, so that prefix, scope and hashed key fit into `MAX_KEY_LENGTH`."""


LONGEST_LABEL: Final = 200
"""Longest label of a key, in characters."""

_SAFE: Final = "-._~@+,/"
_SAFE_IN_A_CALLERS_KEY: Final = _SAFE + ":"


class EntryPoint(str, Enum):
    """An entry point that derives keys from received data.  Its name is the first part of its keys."""

    HTTP = "http"
    """Requests with an `Idempotency-Key` header."""
    FASTSTREAM = "faststream"
    """Messages that FastStream receives."""
    KAFKA_LOOP = "kafka-loop"
    """Records in a loop over a Kafka consumer."""


_PLAIN_KEY: Final = re.compile(rf"[A-Za-z0-9_.~{re.escape(_SAFE_IN_A_CALLERS_KEY)}-]{{1,{LONGEST_LABEL}}}")
"""A caller's key that is its own escaped form, and its own label, unless it begins with one of `_RESERVED`."""

_RESERVED: Final = tuple(f"{entry.value}:" for entry in EntryPoint)
"""Prefixes that are escaped in keys from callers."""


@final
class Key(Struct, frozen=True, gc=False):
    """One unit of work within a scope, already escaped."""

    text: str
    name: str
    """Name in messages, without the generation: `order_placed:0192…`."""
    generation: int = 0
    """Number of deliberate reruns."""

    @staticmethod
    def of(text: str) -> Key:
        """Create a key from a caller's string.

        Keys are compared byte for byte, without case folding or Unicode normalization.

        Raises:
            InvalidKeyError: It is empty or not a string.
        """
        if type(text) is str and _PLAIN_KEY.fullmatch(text) and not text.startswith(_RESERVED):
            return Key(":" + text, text)
        plain = escaped(given_text(text), safe=_SAFE_IN_A_CALLERS_KEY)
        if plain.startswith(_RESERVED):
            plain = plain.replace(":", "%3A", 1)
        return Key(":" + plain, _label(text))

    @staticmethod
    def of_entry(entry: EntryPoint, *parts: str, name: str) -> Key:
        """Create a key of an entry point, distinct from keys of callers and of other entry points."""
        is_plain = plain_text(_SAFE).fullmatch
        if not is_plain("".join(parts)):
            parts = tuple([part if is_plain(part) else escaped(part) for part in parts])
        return Key(":".join(("", entry, *parts)), _label(name))

    @staticmethod
    def of_event(handler: str, event_type: str, how: str, value: str, *, generation: int = 0) -> Key:
        """Create a key from an event; `handler` distinguishes the handlers of the event."""
        text = key_prefix(handler, event_type, how) + escaped(value)
        return Key(text, _label(f"{event_type}:{value}"), generation)

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"{self.name} (generation {self.generation})" if self.generation else self.name

    @property
    def digest(self) -> str:
        """Hash that replaces a text that is too long or confidential."""
        return f"#{hashlib.sha256(self.text.encode()).hexdigest()}"

    def hidden(self) -> Key:
        """Return the same key with its name hashed."""
        return replace(self, name=self.digest)

    def in_generation(self, generation: int) -> Key:
        """Return the key of a deliberate rerun; generation 0 is the first run.

        Records of earlier generations are kept as history, and do not block the new generation.
        """
        return self if generation == self.generation else replace(self, generation=generation)


def generation_key(full: str, generation: int) -> str:
    """Return the full key of a generation, given `full`, the key of generation 0."""
    # Components never contain a semicolon, since it is escaped.
    return f"{full};{generation}" if generation else full


def first_generation_key(full: str, generation: int) -> str:
    """Return the full key of generation 0; the inverse of `generation_key`."""
    return full.removesuffix(f";{generation}") if generation else full


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The prefix and scope of the keys of one service."""

    prefix: str
    scope: str
    hash_keys: bool = False
    """Hash every key, in the store and in messages, for keys that contain personal data."""
    root: str = field(init=False, repr=False, compare=False)
    """Common prefix of all full keys of this space."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _root(self.prefix, self.scope))

    def key(self, given: str | Key) -> Key:
        """Return the key for a caller's string or a key, with a hashed name if keys are hashed."""
        key = given if type(given) is Key else Key.of(given)
        return key.hidden() if self.hash_keys else key

    def step(self, full: str, name: str, slot: int) -> Key:
        """Return the key of a step of the work with the full key `full`; `name` is its name in messages."""
        # Components never contain a semicolon, and generations start with a digit.
        return Key(f"{full.removeprefix(self.root)};s{slot}", name)

    def full(self, key: Key) -> str:
        """Return the key in the store: printable ASCII, at most `MAX_KEY_LENGTH` bytes."""
        full = self.root + key.text
        if self.hash_keys or len(full) > LONGEST_PLAIN:
            full = self.root + key.digest
        return generation_key(full, key.generation) if key.generation else full


def given_text(text: object) -> str:
    """Return `text` if it is a non-empty string.

    Raises:
        InvalidKeyError: It is empty or not a string.
    """
    if not isinstance(text, str) or not text:
        raise InvalidKeyError(f"a key must be a non-empty string, not {text!r:.80}")
    return text


def _label(text: str) -> str:
    """Return a printable form of `text` with limited length, for logs and headers."""
    if len(text) <= LONGEST_LABEL:
        return text if text.isprintable() else printable(text)
    begin = printable(text[: LONGEST_LABEL - 30])
    return f"{begin}…#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def escaped(component: str, *, safe: str = _SAFE) -> str:
    """Percent-encode separators and everything but printable ASCII in a component of a key."""
    plain = plain_text(safe).fullmatch(component)
    if plain:
        return plain[0]
    if component.isascii():
        return component.translate(_escapes(safe))
    # JSON escapes can produce lone surrogates; keys that differ in them must differ.
    return quote(component, safe=safe, errors="surrogatepass")


@lru_cache(maxsize=8)
def plain_text(safe: str = _SAFE) -> re.Pattern[str]:
    """Return a pattern for text that `quote` does not change, such as most ids and names."""
    return re.compile(rf"[A-Za-z0-9_.~{re.escape(safe)}-]*")


@lru_cache(maxsize=8)
def _escapes(safe: str) -> dict[int, str]:
    """Return what `quote` makes of each ASCII character."""
    return {code: quote(chr(code), safe=safe) for code in range(128)}


# Only handlers, event types and scopes are cached, which are few; ids are not.


@lru_cache(maxsize=1024)
def key_prefix(handler: str, event_type: str, how: str) -> str:
    """Return the common prefix of the keys of one handler for one event type."""
    return ":".join(map(escaped, (handler, event_type, how, "")))


@lru_cache(maxsize=1024)
def _root(prefix: str, scope: str) -> str:
    name = escaped(scope)
    if len(name) > LONGEST_SCOPE:
        name = "#" + hashlib.sha256(name.encode()).hexdigest()
    return f"{prefix}:{name}:"


def downstream_key(key: str, name: str) -> str:
    """Return a key for a downstream request of `key`: the same in every attempt, at most 255 characters."""
    text = f"{key}:{escaped(name)}"
    return text if len(text) <= MAX_KEY_LENGTH else hashlib.sha256(text.encode()).hexdigest()
