"""What handlers return, to bytes and back.

Everything pydantic can write becomes JSON; `bytes` stay as they are.  Coming back, a value has the
type that the function promises in its return annotation; without one it is plain JSON.

An iterator can be read only once, and writing it as JSON reads it.  So it is read within the run, before its first
caller has it, into the collection that duplicates get: the type of the return annotation, or a list without one.
See `repeatable`.
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
"""Stands for a result that nobody holds: larger than any that is kept, or of a kind that is not."""

_NOTHING: Final = StoredResult(b"null")
"""What most handlers return."""

LONGEST_PLACE: Final = 200
"""Characters of the place in a result that an error names: its names come from the result."""


def encode_result(value: object) -> StoredResult:
    """`value` as bytes; `None`, `0`, `""` and their kin come back as what they are.

    A `StoredResult` stays as it is, for those who read it themselves.

    Raises:
        ValueError: There is no way to write it (pydantic's serialization error is one).
    """
    if value is None:
        return _NOTHING
    if isinstance(value, StoredResult):
        return value
    if isinstance(value, bytes):
        return StoredResult(value, OCTETS)
    # NaN and infinity as constants: no standard JSON, but they come back as what they were.
    return StoredResult(pydantic_core.to_json(value, inf_nan_mode="constants", fallback=_listed), JSON)


def _listed(value: object) -> list[object]:
    """A deque as a list: pydantic before 2.14 does not serialize one that no annotation names.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, deque):
        return list(value)
    raise pydantic_core.PydanticSerializationError(f"Unable to serialize unknown type: {type(value)}")


# Iterators.

_PLAIN, _SEQUENCE, _MAPPING, _FIELDS, _ITERATOR, _ASYNC_ITERATOR, _FILE = range(7)
"""Kinds of objects, as a serializer sees them.  Everything from `_ITERATOR` on can be read only once.  Plain integers,
because every result is classified."""

_PLAIN_CLASSES: Final = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, StoredResult),
        *(Decimal, datetime, date, time, timedelta, UUID),
    }
)
"""Exact classes of most results and of most of their parts, which hold nothing else."""

_all_plain: Final = _PLAIN_CLASSES.issuperset
"""Takes the classes of many objects, and is much faster than a loop."""


def materialized(value: Any, function: Callable[..., object] | None = None) -> Any:
    """Return the items of a synchronous iterator as a collection, and any other value unchanged.

    Call it in the thread and the scope of the function that returned the value, because a lazy iterator runs code.
    Errors of that code are raised.

    Args:
        function: Its return annotation names the type of the collection; a list without one.
    """
    if type(value) in _PLAIN_CLASSES or _kind_of(type(value)) != _ITERATOR:
        return value
    return _collected(list(value), function)


def _collected(items: list[Any], function: Callable[..., object] | None) -> Any:
    """Return `items` in the type that `decode_result` gives to duplicates; as they are if they do not fit it."""
    expected = return_type_of(function)
    if expected is Any or why_unreadable(expected) is not None:
        return items
    try:
        return _adapter_of(expected).validate_python(items)
    except ValidationError:
        return items  # as with any result that does not fit, duplicates get a ResultDecodeError


def repeatable(value: Any, label: str, function: Callable[..., object] | None = None) -> Any:
    """Return a result that the first caller and every duplicate can get.

    That is `value`, or a collection of its items if it is a synchronous iterator.

    Args:
        label: Names the work in errors.
        function: As for `materialized`.

    Raises:
        ApplicationError: It is an async iterator or a file, or holds an iterator.
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
    """Refuse a result that can be read only once, because storing it would use it up for its owner.

    Raises:
        ApplicationError: It is an iterator, an async iterator or a file, or holds one of these.
    """
    if type(value) not in _PLAIN_CLASSES:
        _refuse(value, _kind_of(type(value)), label)


def _refuse(value: Any, kind: int, label: str) -> None:
    if kind == _PLAIN:
        if not (hasattr(value, "__next__") and hasattr(value, "read")):
            return
        kind = _FILE  # a wrapper that delegates to a file, as those of `tempfile` do
    if kind >= _ITERATOR:
        noun, advice = _READ_ONCE[kind]
        raise ApplicationError(f"{label} returned {noun} ({type(value).__name__}). {advice}")
    if _has_iterator(value, kind):
        place, part = _iterator_in(value)
        noun, advice = _READ_ONCE[_kind_of(type(part))]
        raise ApplicationError(
            f"{label} returned a result that holds {noun} ({type(part).__name__}) at {place}. {advice}"
        )


_READ_ONCE: Final = {
    _ITERATOR: ("an iterator", "It can be read only once, but every duplicate gets the same result: use a list"),
    _ASYNC_ITERATOR: (
        "an async iterator",
        "It can be read only once, but every duplicate gets the same result: use [item async for item in …]",
    ),
    _FILE: ("a file object", "It cannot be stored for duplicates: use its content, as bytes"),
}
"""What to call an object of this kind, and what to do instead."""


def _find_kind(cls: type) -> int:
    if cls in _PLAIN_CLASSES or issubclass(cls, str | bytes | int | float | Enum):
        return _PLAIN
    # Models and dataclasses are written by their fields, even if they are iterators.
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
    """Whether a container holds an iterator, at any depth."""
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
    """Whether it clearly holds plain objects only."""
    if kind == _MAPPING:
        return _all_plain(map(type, holder.values()))
    if kind == _SEQUENCE:
        return _all_plain(map(type, holder))
    # This includes more than the fields, such as cached properties; if they are not plain, the fields decide.
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
    """The fields that are written."""
    if issubclass(cls, BaseModel):
        return tuple(name for name, field in cls.model_fields.items() if not field.exclude)
    return tuple(field.name for field in dataclasses.fields(cls))


def _iterator_in(value: object) -> tuple[str, object]:
    """Find the first iterator that `value` holds, and its place."""
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
    """Refuse what a call of a function has returned, in place of the function.

    Args:
        function: What was handed over.
        instead: What to write.

    Raises:
        ApplicationError: It cannot be called.
    """
    if callable(function):
        return
    if inspect.iscoroutine(function):
        function.close()  # else Python warns that nobody awaited it
    raise ApplicationError(
        f"hand over the function itself, as in {instead}, not what a call of it returns ({type(function).__name__})"
    )


def refuse_generator(function: Callable[..., object]) -> None:
    """Refuse a generator function, synchronous or not, because calling it does none of its work.

    Raises:
        ApplicationError: It is a generator function.
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
    """The value in `stored`, as `expected` where that is a type; a list for an iterator or an abstract collection.

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


def return_type_of(function: Callable[..., object] | None) -> object:
    """What `function` promises to return; `Any` where it says nothing or names what is out of reach, and for `None`."""
    if function is None:
        return Any
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


_ABSTRACT: Final = frozenset({Iterable, Collection, Container, Reversible})
"""Types that say nothing about the class of a collection, and that pydantic reads in no way or as an iterator."""

_BY_ITEM: Final = _ABSTRACT | {Iterator, Generator, map, filter, zip, reversed}
"""Types whose first argument is the type of their items."""


def _readable(expected: Any) -> Any:
    """The type to read a stored result as: `expected`, or a list where that is an iterator or any collection."""
    kind, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
    if kind in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, arguments))]  # noqa: UP007  # of types that are known only here
    if not inspect.isclass(kind) or not (kind in _ABSTRACT or _kind_of(kind) == _ITERATOR):
        return expected
    return list[arguments[0] if arguments and kind in _BY_ITEM else Any]  # type: ignore[misc]


def _name(expected: object) -> str:
    return getattr(expected, "__name__", None) or str(expected)
