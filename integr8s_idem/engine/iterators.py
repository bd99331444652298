"""Find and refuse iterators and awaitables in results: they can be read only once, and awaitables have not been."""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any, Final, cast
from uuid import UUID

from pydantic import BaseModel

from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import StoredResult

LONGEST_PLACE: Final = 200
"""Maximum number of characters of a place in a result that an error names; the names come from the result."""


_PLAIN, _SEQUENCE, _MAPPING, _FIELDS, ITERATOR, _ASYNC_ITERATOR, _FILE, _AWAITABLE = range(8)
"""Kinds of objects for serialization.  Kinds from `ITERATOR` on can be read only once.  They are plain integers for
speed, because every result is classified."""


PLAIN_CLASSES: Final = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, StoredResult),
        *(Decimal, datetime, date, time, timedelta, UUID),
    }
)
"""Exact classes of most results and their parts, which contain no other objects."""


all_plain: Final = PLAIN_CLASSES.issuperset
"""Called with the classes of many objects; much faster than a loop."""


def refuse_iterator(value: Any, label: str) -> None:
    """Reject a result that can be read only once, because storing it would consume it.

    Raises:
        ApplicationError: The result is an iterator, an async iterator, a file or an awaitable, or contains one of
            these.
    """
    if type(value) not in PLAIN_CLASSES:
        refuse_kind(value, kind_of(type(value)), label)


def refuse_awaitable(value: Any, label: str) -> None:
    """Reject a result that nobody awaited, because its work is not done.

    Raises:
        ApplicationError: The result is a coroutine, a future or another awaitable.
    """
    if kind_of(type(value)) == _AWAITABLE:
        refuse_kind(value, _AWAITABLE, label)


def refuse_kind(value: Any, kind: int, label: str) -> None:
    if kind == _PLAIN:
        if not (hasattr(value, "__next__") and hasattr(value, "read")):
            return
        kind = _FILE  # a wrapper that delegates to a file, such as those of `tempfile`
    if kind >= ITERATOR:
        _close(value)
        noun, advice = _READ_ONCE[kind]
        raise ApplicationError(f"{label} returned {noun} ({type(value).__name__}). {advice}")
    if _has_iterator(value, kind):
        place, part = _iterator_in(value)
        _close(part)
        noun, advice = _READ_ONCE[kind_of(type(part))]
        raise ApplicationError(
            f"{label} returned a result that contains {noun} ({type(part).__name__}) at {place}. {advice}"
        )


def _close(value: object) -> None:
    if isinstance(value, Coroutine):
        value.close()  # avoids Python's warning that it was never awaited


_READ_ONCE: Final = {
    ITERATOR: ("an iterator", "It can be read only once, but every duplicate gets the same result: use a list"),
    _ASYNC_ITERATOR: (
        "an async iterator",
        "It can be read only once, but every duplicate gets the same result: use [item async for item in …]",
    ),
    _FILE: ("a file object", "It cannot be stored for duplicates: use its content, as bytes"),
    _AWAITABLE: ("an awaitable that nobody awaited", "Its work may not be done: write return await …"),
}
"""The name of each kind, and the remedy."""


def _find_kind(cls: type) -> int:
    if cls in PLAIN_CLASSES or issubclass(cls, str | bytes | int | float | Enum):
        return _PLAIN
    # Models and dataclasses are serialized by their fields, even if they are iterators.
    if issubclass(cls, BaseModel) or dataclasses.is_dataclass(cls):
        return _FIELDS
    if issubclass(cls, dict):
        return _MAPPING
    if issubclass(cls, list | tuple | set | frozenset | deque):
        return _SEQUENCE
    if issubclass(cls, Awaitable):
        return _AWAITABLE
    if issubclass(cls, io.IOBase) or (issubclass(cls, Iterator) and hasattr(cls, "read")):
        return _FILE
    if issubclass(cls, AsyncIterator):
        return _ASYNC_ITERATOR
    return ITERATOR if issubclass(cls, Iterator) else _PLAIN


kind_of: Final[Callable[[Any], int]] = lru_cache(maxsize=1024)(_find_kind)


def _has_iterator(value: Any, kind: int) -> bool:
    """Whether a container contains an iterator at any depth."""
    if _is_flat(value, kind):
        return False
    pending, seen = [(value, kind)], {id(value)}
    for holder, kind in pending:  # grows during the loop
        for part in _parts_of(holder, kind):
            if type(part) in PLAIN_CLASSES:
                continue
            part_kind = kind_of(type(part))
            if part_kind >= ITERATOR:
                return True
            if part_kind != _PLAIN and not _is_flat(part, part_kind) and id(part) not in seen:
                seen.add(id(part))
                pending.append((part, part_kind))
    return False


def _is_flat(holder: Any, kind: int) -> bool:
    """Whether a container certainly contains only plain objects."""
    if kind == _MAPPING:
        return all_plain(map(type, holder.values()))
    if kind == _SEQUENCE:
        return all_plain(map(type, holder))
    # This includes more than the fields, such as cached properties; if those are not plain, check the fields.
    state = getattr(holder, "__dict__", None)
    return state is not None and all_plain(map(type, state.values())) and not getattr(holder, _EXTRA, None)


_EXTRA: Final = "__pydantic_extra__"


def _parts_of(holder: Any, kind: int) -> Collection[Any]:
    if kind == _SEQUENCE:
        return cast("Collection[Any]", holder)
    return cast("Collection[Any]", (holder if kind == _MAPPING else _fields_of(holder)).values())


def _fields_of(holder: Any) -> dict[str, Any]:
    cls: Any = type(holder)
    fields = {name: getattr(holder, name, None) for name in _field_names(cls)}
    return {**fields, **(getattr(holder, _EXTRA, None) or {})}


@lru_cache(maxsize=512)
def _field_names(cls: Any) -> tuple[str, ...]:
    """Return the names of the serialized fields."""
    if issubclass(cls, BaseModel):
        return tuple(name for name, field in cls.model_fields.items() if not field.exclude)
    return tuple(field.name for field in dataclasses.fields(cls))


def _iterator_in(value: object) -> tuple[str, object]:
    """Find the first iterator in `value`; return its place and the iterator."""
    pending, seen = [("", value)], {id(value)}
    for where, holder in pending:
        for place, part in _places_in(holder):
            kind = kind_of(type(part))
            if kind >= ITERATOR:
                return (where + place)[:LONGEST_PLACE], part
            if kind != _PLAIN and id(part) not in seen:
                seen.add(id(part))
                pending.append((where + place, part))
    raise AssertionError("there is no iterator")


def _places_in(holder: Any) -> Iterable[tuple[str, Any]]:
    match kind_of(type(holder)):
        case kind if kind == _MAPPING:
            return ((f"[{key!r}]", part) for key, part in holder.items())
        case kind if kind == _FIELDS:
            return ((f".{name}", part) for name, part in _fields_of(holder).items())
        case _:
            return ((f"[{index}]", part) for index, part in enumerate(holder))
