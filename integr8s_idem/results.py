"""What handlers return, to bytes and back.

Everything pydantic can write becomes JSON; `bytes` stay as they are.  Coming back, a value has the
type that the function promises in its return annotation; without one it is plain JSON.

An iterator can be read only once, and writing it as JSON reads it.  So it is read into a list within the run, before
its first caller has it: see `repeatable`.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import types
import typing
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator
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
"""Stands for a result that nobody holds: larger than any that is kept, or of a kind that is not."""

_NOTHING: Final = StoredResult(b"null")
"""What most handlers return."""

LONGEST_PLACE: Final = 200
"""Characters of the place in a result that an error names: its names come from the result."""


def encode_result(value: object) -> StoredResult:
    """`value` as bytes; `None`, `0`, `""` and their kin come back as what they are.

    A `StoredResult` stays as it is, for those who read it themselves.

    Raises:
        ValueError: There is no way to write it (pydantic's serialisation error is one).
    """
    if value is None:
        return _NOTHING
    if isinstance(value, StoredResult):
        return value
    if isinstance(value, bytes):
        return StoredResult(value, OCTETS)
    # NaN and infinity as constants: no standard JSON, but they come back as what they were.
    return StoredResult(pydantic_core.to_json(value, inf_nan_mode="constants"), JSON)


# Iterators.

_PLAIN, _SEQUENCE, _MAPPING, _FIELDS, _ITERATOR, _ASYNC_ITERATOR, _FILE = range(7)
"""What an object of some class is to a serializer.  Plain numbers in this order, since every result is asked for it."""

_PLAIN_CLASSES: Final = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, StoredResult),
        *(Decimal, datetime, date, time, timedelta, UUID),
    }
)
"""Exact classes of most results and of most of their parts."""

_all_plain: Final = _PLAIN_CLASSES.issuperset
"""Of the classes of many objects: much faster than a loop."""


def materialized(value: Any) -> Any:
    """The items of a synchronous iterator as a list; any other value as it is.

    For the place that the code of a lazy iterator belongs to: the thread and the scope of the function that returned
    it.  Raises whatever that code raises.
    """
    if type(value) in _PLAIN_CLASSES or _kind_of(type(value)) != _ITERATOR:
        return value
    return list(value)


def repeatable(value: Any, label: str) -> Any:
    """A result that the first caller and every duplicate can get: `value`, or a list of the items of an iterator.

    Args:
        label: Names the work in errors.

    Raises:
        ApplicationError: It is an async iterator or a file, or has an iterator inside.
        Exception: Whatever the code of a lazy iterator raises.
    """
    cls = type(value)
    if cls in _PLAIN_CLASSES or (cls is dict and _all_plain(map(type, value.values()))):
        return value
    kind = _kind_of(cls)
    if kind == _ITERATOR:
        value, kind = list(value), _SEQUENCE
    _refuse(value, kind, label)
    return value


def refuse_iterator(value: Any, label: str) -> None:
    """Refuse a result that can be read only once: to store it would leave its owner an empty one.

    Raises:
        ApplicationError: It is an iterator, an async iterator or a file, or has an iterator inside.
    """
    if type(value) not in _PLAIN_CLASSES:
        _refuse(value, _kind_of(type(value)), label)


def _refuse(value: Any, kind: int, label: str) -> None:
    if kind == _PLAIN:
        if not (hasattr(value, "__next__") and hasattr(value, "read")):
            return
        kind = _FILE  # it hands everything on to a file, as the wrappers of `tempfile` do
    if kind >= _ITERATOR:
        raise ApplicationError(f"{label} returned {_described(value, kind)}")
    if _has_iterator(value, kind):
        place, part = _iterator_in(value)
        raise ApplicationError(f"{label} returned a result with, at {place}, {_described(part, _kind_of(type(part)))}")


def _described(value: object, kind: int) -> str:
    name = type(value).__name__
    match kind:
        case _ if kind == _FILE:
            return f"a file object ({name}), which cannot be stored for duplicates. Return its content, as bytes"
        case _ if kind == _ASYNC_ITERATOR:
            told, advice = "an async iterator", "a list, as in [item async for item in …]"
        case _:
            told, advice = "an iterator", "a list"
    return f"{told} ({name}), which can be read only once, while duplicates get the same result. Return {advice}"


def _find_kind(cls: type) -> int:
    if cls in _PLAIN_CLASSES or issubclass(cls, str | bytes | int | float | Enum):
        return _PLAIN
    # These are written by their fields, even if they can be iterated.
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
    """Whether a container has an iterator inside, however deep."""
    if _is_flat(value, kind):
        return False
    pending, seen = [(value, kind)], {id(value)}
    for holder, kind in pending:  # which grows
        for part in _parts_of(holder, kind):
            if type(part) in _PLAIN_CLASSES:
                continue
            of_part = _kind_of(type(part))
            if of_part >= _ITERATOR:
                return True
            if of_part != _PLAIN and not _is_flat(part, of_part) and id(part) not in seen:
                seen.add(id(part))
                pending.append((part, of_part))
    return False


def _is_flat(holder: Any, kind: int) -> bool:
    """Whether nothing but plain objects is in it, as far as can be said in a moment."""
    if kind == _MAPPING:
        return _all_plain(map(type, holder.values()))
    if kind == _SEQUENCE:
        return _all_plain(map(type, holder))
    # More than its fields, such as cached properties, may be in there: what is not plain is looked at again.
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
    """Those that are written: not the excluded ones, and not what an object keeps beside its fields."""
    if issubclass(cls, BaseModel):
        return tuple(name for name, field in cls.model_fields.items() if not field.exclude)
    return tuple(field.name for field in dataclasses.fields(cls))


def _iterator_in(value: object) -> tuple[str, object]:
    """The first iterator inside of `value`, and its place."""
    pending, seen = [("", value)], {id(value)}
    for where, holder in pending:
        for place, part in _places_in(holder):
            kind = _kind_of(type(part))
            if kind >= _ITERATOR:
                return (where + place)[:LONGEST_PLACE], part
            if kind != _PLAIN and id(part) not in seen:
                seen.add(id(part))
                pending.append((where + place, part))
    raise AssertionError("there is one")


def _places_in(holder: Any) -> Iterable[tuple[str, Any]]:
    match _kind_of(type(holder)):
        case kind if kind == _MAPPING:
            return ((f"[{key!r}]", part) for key, part in holder.items())
        case kind if kind == _FIELDS:
            return ((f".{name}", part) for name, part in _fields_of(holder).items())
        case _:
            return ((f"[{index}]", part) for index, part in enumerate(holder))


_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def refuse_generator(function: Callable[..., object]) -> None:
    """Refuse a generator function, synchronous or not: what a call of it returns has done nothing yet.

    Raises:
        ApplicationError: It is one.
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    flags = code.co_flags if isinstance(code, types.CodeType) else 0
    if flags & _GENERATOR and not flags & inspect.CO_ITERABLE_COROUTINE:
        name = getattr(inner, "__qualname__", repr(inner))
        raise ApplicationError(
            f"{name} is a generator, which returns before its work is done: it cannot be guarded. Collect what it "
            "yields in a list, and return that"
        )


# Results that come back.


def decode_result(key: str, stored: StoredResult, expected: object = Any) -> Any:
    """The value in `stored`, as `expected` where that is a type; a list for an iterator, as for the first caller.

    Raises:
        ResultDecodeError: It does not fit, for example because the class has changed since.
    """
    if stored.content_type == OCTETS:
        return stored.body
    if stored.content_type != JSON:
        raise ResultDecodeError(key, _name(expected), f"its media type {stored.content_type!r} is none of ours")
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


def return_type_of(function: Callable[..., object]) -> object:
    """What `function` promises to return; `Any` where it says nothing or names what is out of reach."""
    function = getattr(function, "__func__", function)  # of a bound method, which is made anew for each look at it
    try:
        return _kept_promise(ref(function)) if isinstance(function, FunctionType) else _promise_of(function)
    except (NameError, TypeError, AttributeError):
        return Any


@lru_cache(maxsize=512)
def _kept_promise(function: ref[FunctionType]) -> object:
    # By a weak reference: functions within functions hold what was theirs.
    return _promise_of(cast("FunctionType", function()))


def _promise_of(function: Callable[..., object]) -> object:
    # A callable object says it on __call__; functools.partial on the function inside.
    inner = inspect.unwrap(getattr(function, "func", function))
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        inner = type(inner).__call__
    return typing.get_type_hints(inner).get("return", Any)


def why_unreadable(expected: object) -> str | None:
    """Why no result can ever be read as `expected`; `None` if it may be."""
    try:
        _adapter_of(expected)
    except (TypeError, PydanticSchemaGenerationError, PydanticUserError) as error:
        return str(error).partition("\n")[0]
    return None


def _validate(expected: Any) -> Callable[[bytes], Any]:
    try:
        return _validator(expected)
    except TypeError:  # as below
        return TypeAdapter(_readable(expected)).validate_json


@lru_cache(maxsize=512)
def _validator(expected: Any) -> Callable[[bytes], Any]:
    # Past the adapter, which looks at options that we never give.
    validate: Callable[[bytes], Any] = _adapter(expected).validator.validate_json
    return validate


def _adapter_of(expected: Any) -> TypeAdapter[Any]:
    try:
        return _adapter(expected)
    except TypeError:  # some types cannot be hashed, and so not be remembered
        return TypeAdapter(_readable(expected))


@lru_cache(maxsize=512)
def _adapter(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_readable(expected))


_BY_ITEM: Final = frozenset({Iterable, Iterator, Generator, map, filter, zip, reversed})
"""Types whose first argument is that of their items."""


def _readable(expected: Any) -> Any:
    """The type as which a stored result is read: a list where `expected` is an iterator, or any iterable."""
    kind, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, arguments))]  # noqa: UP007  # of types that are known only here
    if not inspect.isclass(kind) or not (kind is Iterable or _kind_of(kind) == _ITERATOR):
        return expected
    return list[arguments[0] if arguments and kind in _BY_ITEM else Any]  # type: ignore[misc]


def _name(expected: object) -> str:
    return getattr(expected, "__name__", None) or str(expected)
