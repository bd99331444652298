"""What one call of `load_settings` shares with the model it builds.

pydantic-settings gives a model's sources no arguments, so the file, and what was found out
about the values, travel in a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from integr8s_idem.config.schema_shape import Path

_CURRENT: Final[ContextVar[Reading | None]] = ContextVar("integr8s_idem_reading", default=None)


@dataclass
class Reading:
    """One pass over all sources."""

    table: Mapping[str, Any] = field(default_factory=dict)
    """The file."""
    origins: dict[Path, str] = field(default_factory=dict)
    """Which variable or secret file gave a value."""
    merged: Mapping[str, Any] = field(default_factory=dict)
    """All sources together, before validation."""
    without: set[Path] = field(default_factory=set)
    """Values known to be mistakes: left out, so that what depends on the others can be checked too."""
    instead: dict[Path, Any] = field(default_factory=dict)
    """What was probably meant by some of them."""

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


def current_reading() -> Reading | None:
    """The reading that is on in this context; `None` if a model is built by hand."""
    return _CURRENT.get()


def without(table: Mapping[str, Any], paths: set[Path]) -> dict[str, Any]:
    """`table` without the values at `paths`."""
    kept: dict[str, Any] = {}
    for name, value in table.items():
        if (name,) in paths:
            continue
        inner = {path[1:] for path in paths if len(path) > 1 and path[0] == name}
        kept[name] = without(value, inner) if inner and isinstance(value, Mapping) else value
    return kept


def instead(table: Mapping[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
    """`table` with these `values` at their places."""
    changed = dict(table)
    for (name, *inner), value in values.items():
        changed[name] = instead(changed.get(name, {}), {tuple(inner): value}) if inner else value
    return changed
