"""Serialize the results of handlers, and restore them for duplicates.

Results that pydantic can serialize are stored as JSON; `bytes` are stored unchanged.  A restored value has the type of
the function's return annotation; without one it is plain JSON.

An iterator can be read only once, and serializing it reads it.  Therefore the run reads it before the first caller gets
it, into the collection that duplicates also get: the type of the return annotation, or a list without one.  See
`repeatable`.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import types
import typing
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Container,
    Generator,
    Iterable,
    Iterator,
    Reversible,
)
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final, cast
from uuid import UUID
from weakref import ref

import pydantic_core
from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from integr8s_idem.errors import ApplicationError, ResultDecodeError
from integr8s_idem.records import JSON, StoredResult

OCTETS: Final = "application/octet-stream"

NOT_KEPT: Final = object()
"""Marks a result that is not stored, because it is too large or of an unsupported kind."""

_NOTHING: Final = StoredResult(b"null")
"""The stored form of `None`, the most common result."""

LONGEST_PLACE: Final = 200
"""Maximum number of characters of a place in a result that an error names; the names come from the result."""


def encode_result(value: object) -> StoredResult:
    """Serialize `value`.  `None`, `0`, `""` and other falsy values are restored unchanged.

    A `StoredResult` is returned unchanged, for callers that decode it themselves.

    Raises:
        ValueError: The value cannot be serialized.  Pydantic's serialization error is a `ValueError`.
    """
    if value is None:
        return _NOTHING
    if isinstance(value, StoredResult):
        return value
    if isinstance(value, bytes):
        return StoredResult(value, OCTETS)
    # NaN and infinity as constants: not standard JSON, but they can be restored.
    return StoredResult(pydantic_core.to_json(value, inf_nan_mode="constants", fallback=_listed), JSON)


def _listed(value: object) -> list[object]:
    """Convert a deque to a list: pydantic before 2.14 does not serialize a deque without an annotation.

    Raises:
        ValueError: `value` is not a deque.
    """
    if isinstance(value, deque):
        return list(value)
    raise pydantic_core.PydanticSerializationError(f"Unable to serialize unknown type: {type(value)}")


# Iterators.

_PLAIN, _SEQUENCE, _MAPPING, _FIELDS, _ITERATOR, _ASYNC_ITERATOR, _FILE = range(7)
"""Kinds of objects for serialization.  Kinds from `_ITERATOR` on can be read only once.  They are plain integers for
speed, because every result is classified."""

_PLAIN_CLASSES: Final = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, StoredResult),
        *(Decimal, datetime, date, time, timedelta, UUID),
    }
)
"""Exact classes of most results and their parts, which contain no other objects."""

_all_plain: Final = _PLAIN_CLASSES.issuperset
"""Called with the classes of many objects; much faster than a loop."""


def materialized(value: Any, function: Callable[..., object] | None = None) -> Any:
    """Return the items of a synchronous iterator as a collection, and any other value unchanged.

    Call it in the thread and the scope of the function that returned the value, because a lazy iterator runs code.
    Errors of that code are raised.

    Args:
        function: The function whose return annotation is the type of the collection; a list without one.
    """
    if type(value) in _PLAIN_CLASSES or _kind_of(type(value)) != _ITERATOR:
        return value
    return _collected(list(value), function)


def _collected(items: list[Any], function: Callable[..., object] | None) -> Any:
    """Convert `items` to the type that `decode_result` restores; unchanged if they do not match it."""
    expected = return_type_of(function)
    if expected is Any or why_unreadable(expected) is not None:
        return items
    try:
        return _adapter_of(expected).validate_python(items)
    except ValidationError:
        return items  # duplicates get a ResultDecodeError, as with any result that does not match


def repeatable(value: Any, label: str, function: Callable[..., object] | None = None) -> Any:
    """Return `value`, or a collection of its items if it is a synchronous iterator, so that duplicates can get it too.

    Args:
        label: Name of the work in errors.
        function: See `materialized`.

    Raises:
        ApplicationError: The result is an async iterator or a file, or contains an iterator.
        Exception: Any error of the code that a lazy iterator runs.
    """
    cls = type(value)
    if cls in _PLAIN_CLASSES or (cls is dict and _all_plain(map(type, value.values()))):
        return value
    kind = _kind_of(cls)
    if kind == _ITERATOR:
        value = _collected(list(value), function)
        kind = _kind_of(type(value))
    _refuse(value, kind, label)
    return value


def refuse_iterator(value: Any, label: str) -> None:
    """Reject a result that can be read only once, because storing it would consume it.

    Raises:
        ApplicationError: The result is an iterator, an async iterator or a file, or contains one of these.
    """
    if type(value) not in _PLAIN_CLASSES:
        _refuse(value, _kind_of(type(value)), label)


def _refuse(value: Any, kind: int, label: str) -> None:
    if kind == _PLAIN:
        if not (hasattr(value, "__next__") and hasattr(value, "read")):
            return
        kind = _FILE  # a wrapper that delegates to a file, such as those of `tempfile`
    if kind >= _ITERATOR:
        noun, advice = _READ_ONCE[kind]
        raise ApplicationError(f"{label} returned {noun} ({type(value).__name__}). {advice}")
    if _has_iterator(value, kind):
        place, part = _iterator_in(value)
        noun, advice = _READ_ONCE[_kind_of(type(part))]
        raise ApplicationError(
            f"{label} returned a result that contains {noun} ({type(part).__name__}) at {place}. {advice}"
        )


_READ_ONCE: Final = {
    _ITERATOR: ("an iterator", "It can be read only once, but every duplicate gets the same result: use a list"),
    _ASYNC_ITERATOR: (
        "an async iterator",
        "It can be read only once, but every duplicate gets the same result: use [item async for item in …]",
    ),
    _FILE: ("a file object", "It cannot be stored for duplicates: use its content, as bytes"),
}
"""The name of each kind, and the remedy."""


def _find_kind(cls: type) -> int:
    if cls in _PLAIN_CLASSES or issubclass(cls, str | bytes | int | float | Enum):
        return _PLAIN
    # Models and dataclasses are serialized by their fields, even if they are iterators.
    if issubclass(cls, BaseModel) or dataclasses.is_dataclass(cls):
        return _FIELDS
    if issubclass(cls, dict):
        return _MAPPING
    if issubclass(cls, list | tuple | set | frozenset | deque):
        return _SEQUENCE
    if issubclass(cls, io.IOBase) or (issubclass(cls, Iterator) and hasattr(cls, "read")):
        return _FILE
    if issubclass(cls, AsyncIterator):
        return _ASYNC_ITERATOR
    return _ITERATOR if issubclass(cls, Iterator) else _PLAIN


_kind_of: Final[Callable[[Any], int]] = lru_cache(maxsize=1024)(_find_kind)


def _has_iterator(value: Any, kind: int) -> bool:
    """Whether a container contains an iterator at any depth."""
    if _is_flat(value, kind):
        return False
    pending, seen = [(value, kind)], {id(value)}
    for holder, kind in pending:  # grows during the loop
        for part in _parts_of(holder, kind):
            if type(part) in _PLAIN_CLASSES:
                continue
            part_kind = _kind_of(type(part))
            if part_kind >= _ITERATOR:
                return True
            if part_kind != _PLAIN and not _is_flat(part, part_kind) and id(part) not in seen:
                seen.add(id(part))
                pending.append((part, part_kind))
    return False


def _is_flat(holder: Any, kind: int) -> bool:
    """Whether a container certainly contains only plain objects."""
    if kind == _MAPPING:
        return _all_plain(map(type, holder.values()))
    if kind == _SEQUENCE:
        return _all_plain(map(type, holder))
    # This includes more than the fields, such as cached properties; if those are not plain, check the fields.
    state = getattr(holder, "__dict__", None)
    return state is not None and _all_plain(map(type, state.values())) and not getattr(holder, _EXTRA, None)


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
            kind = _kind_of(type(part))
            if kind >= _ITERATOR:
                return (where + place)[:LONGEST_PLACE], part
            if kind != _PLAIN and id(part) not in seen:
                seen.add(id(part))
                pending.append((where + place, part))
    raise AssertionError("there is no iterator")


def _places_in(holder: Any) -> Iterable[tuple[str, Any]]:
    match _kind_of(type(holder)):
        case kind if kind == _MAPPING:
            return ((f"[{key!r}]", part) for key, part in holder.items())
        case kind if kind == _FIELDS:
            return ((f".{name}", part) for name, part in _fields_of(holder).items())
        case _:
            return ((f"[{index}]", part) for index, part in enumerate(holder))


_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def refuse_call(function: object, instead: str) -> None:
    """Reject the result of a call that was passed instead of the function.

    Args:
        function: The argument.
        instead: A correct call, for the error message.

    Raises:
        ApplicationError: `function` is not callable.
    """
    if callable(function):
        return
    if inspect.iscoroutine(function):
        function.close()  # avoids Python's warning that it was never awaited
    raise ApplicationError(
        f"pass the function itself, as in {instead}, not the result of calling it ({type(function).__name__})"
    )


def refuse_generator(function: Callable[..., object]) -> None:
    """Reject a generator function, synchronous or async, because calling it does none of its work.

    Raises:
        ApplicationError: `function` is a generator function.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    flags = code.co_flags if isinstance(code, types.CodeType) else 0
    if flags & _GENERATOR and not flags & inspect.CO_ITERABLE_COROUTINE:
        name = getattr(inner, "__qualname__", repr(inner))
        raise ApplicationError(
            f"{name} is a generator, which returns before its work is done, so it cannot be guarded. Collect the items "
            "in a list and return the list"
        )


# Restoring results.


def decode_result(key: str, stored: StoredResult, expected: object = Any) -> Any:
    """Restore the value in `stored` as type `expected`; as a list for an iterator or an abstract collection.

    Raises:
        ResultDecodeError: The value does not match the type, for example because the class has changed.
    """
    if stored.content_type == OCTETS:
        return stored.body
    if stored.content_type != JSON:
        raise ResultDecodeError(key, _name(expected), f"unsupported media type {stored.content_type!r}")
    try:
        if expected is Any:
            return pydantic_core.from_json(stored.body)
        return _validate(expected)(stored.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))[:LONGEST_PLACE]
        raise ResultDecodeError(key, _name(expected), f"{where + ': ' if where else ''}{first['msg']}") from None
    except (ValueError, TypeError, PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ResultDecodeError(key, _name(expected), str(error)) from error


def return_type_of(function: Callable[..., object] | None) -> object:
    """Return the return annotation of `function`; `Any` if there is none or it cannot be resolved."""
    if function is None:
        return Any
    function = getattr(function, "__func__", function)  # a bound method is a new object on every access
    try:
        return (
            _cached_return_type(ref(function)) if isinstance(function, FunctionType) else _resolve_return_type(function)
        )
    except (NameError, TypeError, AttributeError):
        return Any


@lru_cache(maxsize=512)
def _cached_return_type(function: ref[FunctionType]) -> object:
    # A weak reference, because closures keep their variables alive.
    return _resolve_return_type(cast("FunctionType", function()))


def _resolve_return_type(function: Callable[..., object]) -> object:
    # A callable object has the annotation on __call__; functools.partial on the inner function.
    inner = inspect.unwrap(getattr(function, "func", function))
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        inner = type(inner).__call__
    return typing.get_type_hints(inner).get("return", Any)


def why_unreadable(expected: object) -> str | None:
    """Return why no result can be restored as `expected`; `None` if it can."""
    try:
        _adapter_of(expected)
    except (TypeError, PydanticSchemaGenerationError, PydanticUserError) as error:
        return str(error).partition("\n")[0]
    return None


def _validate(expected: Any) -> Callable[[bytes], Any]:
    try:
        return _validator(expected)
    except TypeError:  # see `_adapter_of`
        return TypeAdapter(_readable(expected)).validate_json


@lru_cache(maxsize=512)
def _validator(expected: Any) -> Callable[[bytes], Any]:
    # Bypass the adapter, which checks options that are not used here.
    validate: Callable[[bytes], Any] = _adapter(expected).validator.validate_json
    return validate


def _adapter_of(expected: Any) -> TypeAdapter[Any]:
    try:
        return _adapter(expected)
    except TypeError:  # some types are not hashable, so they cannot be cached
        return TypeAdapter(_readable(expected))


@lru_cache(maxsize=512)
def _adapter(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_readable(expected))


_ABSTRACT: Final = frozenset({Iterable, Collection, Container, Reversible})
"""Types that do not name a concrete collection; pydantic does not support them, or restores an iterator."""

_BY_ITEM: Final = _ABSTRACT | {Iterator, Generator, map, filter, zip, reversed}
"""Types whose first argument is the type of the items."""


def _readable(expected: Any) -> Any:
    """Return the type to restore a result as: a list if `expected` is an iterator or an abstract collection."""
    kind, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, arguments))]  # noqa: UP007  # the types are only known at run time
    if not inspect.isclass(kind) or not (kind in _ABSTRACT or _kind_of(kind) == _ITERATOR):
        return expected
    return list[arguments[0] if arguments and kind in _BY_ITEM else Any]  # type: ignore[misc]


def _name(expected: object) -> str:
    return getattr(expected, "__name__", None) or str(expected)
