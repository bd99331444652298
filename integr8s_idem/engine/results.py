"""Serialize the results of handlers, and restore them for duplicates.

Results that pydantic can serialize are stored as JSON; `bytes` are stored unchanged.  A restored value has the type of
the function's return annotation; without one it is plain JSON.

An iterator can be read only once, and serializing it reads it.  Therefore the run reads it before the first caller gets
it, into the collection that duplicates also get: the type of the return annotation, or a list without one.  See
`repeatable`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Generator,
    Iterable,
    Iterator,
    Reversible,
)
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final, cast
from weakref import ref

import pydantic_core
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from integr8s_idem.engine.iterators import ITERATOR, LONGEST_PLACE, PLAIN_CLASSES, all_plain, kind_of, refuse_kind
from integr8s_idem.errors import ApplicationError, ResultDecodeError
from integr8s_idem.records import JSON, StoredResult

OCTETS: Final = "application/octet-stream"

NOT_KEPT: Final = object()
"""Marks a result that is not stored, because it is too large or of an unsupported kind."""

NO_RESULT: Final = object()
"""Marks work without a result, of which nothing is stored or dropped."""

_DISCARDED: Final = "text/plain; outcome=discarded"
"""Content type of the error of work that a rule has discarded.  Its record is completed, and has this as its result."""

_OBSERVED: Final = "text/plain; outcome=observed"
"""Content type of the place of a message whose handler ran without a guard.  Its record is completed without a result,
and has this in its place."""

_NOTHING: Final = StoredResult(b"null")
"""The stored form of `None`, the most common result."""


def encode_result(value: object) -> StoredResult:
    """Serialize `value`.  `None`, `0`, `""` and other falsy values are restored unchanged.

    A `StoredResult` is returned unchanged, for callers that decode it themselves.

    Raises:
        ValueError: The value cannot be serialized.  Pydantic's serialization error is a `ValueError`.
    """
    if value is None:
        return _NOTHING
    if type(value) is StoredResult:
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


def discarded_result(error: str) -> StoredResult:
    """Return what a record keeps of work that was discarded because of `error`."""
    return StoredResult(error.encode("utf-8", "backslashreplace"), _DISCARDED)


def discarded_error(stored: StoredResult | None) -> str | None:
    """Return the error because of which the work of a result was discarded; `None` if it was not."""
    if stored is None or stored.content_type != _DISCARDED:
        return None
    return stored.body.decode("utf-8", "backslashreplace")


def observed_result(place: str) -> StoredResult:
    """Return what a record keeps of work that was observed: the place of its message, such as `orders[3]@17`."""
    return StoredResult(place.encode("utf-8", "backslashreplace"), _OBSERVED)


def observed_place(stored: StoredResult | None) -> str | None:
    """Return the place of the message whose handling was observed; `None` if the work was guarded."""
    if stored is None or stored.content_type != _OBSERVED:
        return None
    return stored.body.decode("utf-8", "backslashreplace")


def materialized(value: Any, function: Callable[..., object] | None = None) -> Any:
    """Return the items of a synchronous iterator as a collection, and any other value unchanged.

    Call it in the thread and the scope of the function that returned the value, because a lazy iterator runs code.
    Errors of that code are raised.

    Args:
        function: The function whose return annotation is the type of the collection; a list without one.
    """
    if type(value) in PLAIN_CLASSES or kind_of(type(value)) != ITERATOR:
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
        ApplicationError: The result is an async iterator, a file or an awaitable, or contains an iterator.
        Exception: Any error of the code that a lazy iterator runs.
    """
    cls = type(value)
    if cls in PLAIN_CLASSES or (cls is dict and all_plain(map(type, value.values()))):
        return value
    kind = kind_of(cls)
    if kind == ITERATOR:
        value = _collected(list(value), function)
        kind = kind_of(type(value))
    refuse_kind(value, kind, label)
    return value


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


def check_function(function: Callable[..., object], instead: str) -> None:
    """Check that `function` can be called to do its work; see `refuse_call` and `refuse_generator`.

    Raises:
        ApplicationError: It cannot.
    """
    code = getattr(function, "__code__", None)
    if type(code) is types.CodeType and not code.co_flags & _GENERATOR:
        return  # the common case: a function or a method
    refuse_call(function, instead)
    refuse_generator(function)


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
    if not inspect.isclass(kind) or not (kind in _ABSTRACT or kind_of(kind) == ITERATOR):
        return expected
    return list[arguments[0] if arguments and kind in _BY_ITEM else Any]  # type: ignore[misc]


def _name(expected: object) -> str:
    return getattr(expected, "__name__", None) or str(expected)
