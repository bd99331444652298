"""Parse full keys into their parts, and match them by name.  Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from integr8s_idem._util.escaping import shown
from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import LAST_GENERATION, KeySpace, generation_key

_UNIT: Final = re.compile(r"^(?P<unit>[^;]*)(?:;(?P<generation>[1-9]\d{0,2}))?(?:;s(?P<step>\d+))?$")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~@+,/-]+")
"""Characters that keys contain unescaped."""
_WITH_GENERATION: Final = re.compile(r"^(?P<name>.*);(?P<generation>[1-9]\d{0,2})$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """The parts of a full key."""

    full: str
    scope: str
    """The service, or a hash (`#…`) of a name that is too long."""
    handler: str = ""
    event_type: str = ""
    source: str = ""
    """`id`, `content` or `custom`; empty for a key that a caller chose."""
    value: str = ""
    """The event's id, or other text that the key is made of; empty for a hashed key."""
    digest: str = ""
    """`#…` for a hashed key."""
    generation: int = 0
    step: int | None = None
    """The place of the step, for the record of a step."""

    @property
    def label(self) -> str:
        """The readable name: `order_placed:0192…`."""
        text = self.digest or (f"{self.event_type}:{self.value}" if self.source else self.value)
        generation = f" (generation {self.generation})" if self.generation else ""
        return text + generation + (f" (step in place {self.step})" if self.step is not None else "")

    @property
    def unit(self) -> str:
        """The full key of the first generation of the unit of work, also for its steps."""
        return self.full.partition(";")[0]

    @property
    def unit_generation(self) -> str:
        """The full key of this generation of the unit of work, also for its steps."""
        return generation_key(self.unit, self.generation)


def parse_key(full: str, prefix: str) -> ParsedKey:
    """Parse `full`; an unknown format has only a `value`."""
    rest = full.removeprefix(f"{prefix}:")
    scope, colon, unit_text = rest.partition(":")
    found = _UNIT.match(unit_text)
    if rest == full or not colon or found is None:
        return ParsedKey(full, "", value=full)
    scope = scope if scope.startswith("#") else _plain(scope)
    unit, generation = found["unit"], int(found["generation"] or 0)
    step = int(found["step"]) if found["step"] else None
    if unit.startswith("#"):
        return ParsedKey(full, scope, digest=unit, generation=generation, step=step)
    if unit.startswith(":"):
        return ParsedKey(full, scope, value=_plain(unit[1:]), generation=generation, step=step)
    parts = unit.split(":", 3)
    if len(parts) < 4:
        return ParsedKey(full, "", value=full)
    handler, event_type, source, value = map(_plain, parts)
    return ParsedKey(full, scope, handler, event_type, source, value, "", generation, step)


def check_name(name: str) -> str:
    """Return `name` as typed.

    Raises:
        ApplicationError: It contains bytes that are not UTF-8, which Python represents by lone surrogates.  Drivers of
            stores cannot encode them, and keys contain none.
    """
    if not name.isascii() and any("\ud800" <= each <= "\udfff" for each in name):
        raise ApplicationError(f'invalid name "{shown(name, 200)}": it is not valid UTF-8; copy it from `keys list`')
    return name


def key_space(parsed: ParsedKey, prefix: str, *, hash_keys: bool) -> KeySpace | None:
    """Return the key space of the key's service; `None` if the scope is a hash, which cannot be reversed."""
    if not parsed.scope or parsed.scope.startswith("#"):
        return None
    return KeySpace(prefix, parsed.scope, hash_keys)


def split_generation(name: str) -> tuple[str, int | None]:
    """Split a name as typed into the name and its generation, if there is one."""
    found = _WITH_GENERATION.match(name)
    if found is None or int(found["generation"]) > LAST_GENERATION:
        return name, None
    return found["name"], int(found["generation"])


def matches_name(parsed: ParsedKey, text: str) -> bool:
    """Return whether `text` names this key: an id, a label, a caller's key or the end of a full key."""
    names = (parsed.value, f"{parsed.event_type}:{parsed.value}") if parsed.value else ()
    if text in names:  # also an id that ends like a generation
        return True
    name, generation = split_generation(text)
    if generation is not None and generation != parsed.generation:
        return False
    if name in names:
        return True
    return parsed.unit == name or parsed.unit.endswith(f":{name}")


def literal_parts(text: str) -> list[str]:
    """Return texts that every key matching `text` contains, in this order, for the filter of a store.

    Characters that may be escaped in keys are excluded.
    """
    name, _ = split_generation(text)
    return _PLAIN.findall(name)


def generations_of(unit: str) -> list[str]:
    """Return the full keys of all generations of `unit`."""
    return [generation_key(unit, generation) for generation in range(LAST_GENERATION + 1)]


def _plain(part: str) -> str:
    return unquote(part, errors="replace") if "%" in part else part
