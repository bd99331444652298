"""State shared between a call of `load_settings` and the model that it builds.

pydantic-settings passes no arguments to the sources of a model, so the file and the findings about
its values are passed in a context variable.
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
    """The state of one load over all sources."""

    table: Mapping[str, Any] = field(default_factory=dict)
    """The contents of the file."""
    origins: dict[Path, str] = field(default_factory=dict)
    """The variable or secret file that set a value."""
    merged: Mapping[str, Any] = field(default_factory=dict)
    """The merged sources, before validation."""
    without: set[Path] = field(default_factory=set)
    """Invalid values, which are excluded so that the others can be validated."""
    instead: dict[Path, Any] = field(default_factory=dict)
    """The values that were probably meant by some of them."""

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


def current_reading() -> Reading | None:
    """Return the active load of this context; `None` if a model is created directly."""
    return _CURRENT.get()


def without(table: Mapping[str, Any], paths: set[Path]) -> dict[str, Any]:
    """Return `table` without the values at `paths`."""
    kept: dict[str, Any] = {}
    for name, value in table.items():
        if (name,) in paths:
            continue
        inner = {path[1:] for path in paths if len(path) > 1 and path[0] == name}
        kept[name] = without(value, inner) if inner and isinstance(value, Mapping) else value
    return kept


def instead(table: Mapping[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return `table` with `values` at their paths."""
    changed = dict(table)
    for (name, *inner), value in values.items():
        changed[name] = instead(changed.get(name, {}), {tuple(inner): value}) if inner else value
    return changed
