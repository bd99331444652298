"""Full keys taken apart: the reverse of `integr8s_idem.keys`, as far as there is one.  Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from integr8s_idem.keys import LAST_GENERATION, KeySpace, generation_key

_BEHIND: Final = re.compile(r"^(?P<unit>[^;]*)(?:;(?P<generation>[1-9]\d{0,2}))?(?:;s(?P<step>\d+))?$")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~@+,/-]+")
"""What stands in a key as people type it."""
_WITH_GENERATION: Final = re.compile(r"^(?P<words>.*);(?P<generation>[1-9]\d{0,2})$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Named:
    """What a full key says of the work that it names."""

    full: str
    scope: str
    """The service; a hash (`#…`) of a name that is too long."""
    handler: str = ""
    event_type: str = ""
    how: str = ""
    """`id`, `content` or `custom`; empty for a key that a caller gave."""
    value: str = ""
    """The event's id, or whatever makes the key; empty for a hashed key."""
    digest: str = ""
    """`#…` for a key of which nothing else can be read."""
    generation: int = 0
    step: int | None = None
    """The place of a step, for the record of one."""

    @property
    def label(self) -> str:
        """What people call it: `order_placed:0192…`."""
        text = self.digest or (f"{self.event_type}:{self.value}" if self.how else self.value)
        generation = f" (generation {self.generation})" if self.generation else ""
        return text + generation + (f" (step in place {self.step})" if self.step is not None else "")

    @property
    def unit(self) -> str:
        """The full key of the first generation of the work that it is, or is a step of."""
        return self.full.partition(";")[0]


def named(full: str, prefix: str) -> Named:
    """Take `full` apart; one that is none of ours has nothing but its text."""
    rest = full.removeprefix(f"{prefix}:")
    scope, colon, behind = rest.partition(":")
    found = _BEHIND.match(behind)
    if rest == full or not colon or found is None:
        return Named(full, "", value=full)
    scope = scope if scope.startswith("#") else _plain(scope)
    unit, generation = found["unit"], int(found["generation"] or 0)
    step = int(found["step"]) if found["step"] else None
    if unit.startswith("#"):
        return Named(full, scope, digest=unit, generation=generation, step=step)
    if unit.startswith(":"):
        return Named(full, scope, value=_plain(unit[1:]), generation=generation, step=step)
    parts = unit.split(":", 3)
    if len(parts) < 4:
        return Named(full, "", value=full)
    handler, event_type, how, value = map(_plain, parts)
    return Named(full, scope, handler, event_type, how, value, "", generation, step)


def space_of(told: Named, prefix: str, *, hash_keys: bool) -> KeySpace | None:
    """Where the other records of the same work are; `None` if its scope is a hash, which cannot be told back."""
    if not told.scope or told.scope.startswith("#"):
        return None
    return KeySpace(prefix, told.scope, hash_keys)


def split_generation(words: str) -> tuple[str, int | None]:
    """What people typed, and the generation behind it, if they named one."""
    found = _WITH_GENERATION.match(words)
    if found is None or int(found["generation"]) > LAST_GENERATION:
        return words, None
    return found["words"], int(found["generation"])


def is_meant(told: Named, words: str) -> bool:
    """Whether `words` are an id, a label, a caller's key or the end of a full key, and name this one."""
    wanted, generation = split_generation(words)
    if generation is not None and generation != told.generation:
        return False
    if wanted in (told.value, f"{told.event_type}:{told.value}") and told.value:
        return True
    return told.unit == wanted or told.unit.endswith(f":{wanted}")


def parts_of(words: str) -> list[str]:
    """What the key must hold, in this order, if `is_meant` by these words: for a store that looks for it by itself.

    Letters that may stand in the key as they are or escaped are left out, so that either is found.
    """
    wanted, _ = split_generation(words)
    return _PLAIN.findall(wanted)


def generations_of(unit: str) -> list[str]:
    """The full keys that the work of `unit` may have, by generation."""
    return [generation_key(unit, generation) for generation in range(LAST_GENERATION + 1)]


def _plain(part: str) -> str:
    return unquote(part, errors="replace") if "%" in part else part
