"""What handlers return, to bytes and back.

Everything pydantic can write becomes JSON; `bytes` stay as they are.  Coming back, a value has the
type that the function promises in its return annotation; without one it is plain JSON.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, Final, cast
from weakref import ref

import pydantic_core
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from integr8s_idem.errors import ResultDecodeError
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


def decode_result(key: str, stored: StoredResult, expected: object = Any) -> Any:
    """The value in `stored`, as `expected` where that is a type.

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
        return TypeAdapter(expected).validate_json


@lru_cache(maxsize=512)
def _validator(expected: Any) -> Callable[[bytes], Any]:
    # Past the adapter, which looks at options that we never give.
    validate: Callable[[bytes], Any] = _adapter(expected).validator.validate_json
    return validate


def _adapter_of(expected: Any) -> TypeAdapter[Any]:
    try:
        return _adapter(expected)
    except TypeError:  # some types cannot be hashed, and so not be remembered
        return TypeAdapter(expected)


@lru_cache(maxsize=512)
def _adapter(expected: Any) -> TypeAdapter[Any]:
    return TypeAdapter(expected)


def _name(expected: object) -> str:
    return getattr(expected, "__name__", None) or str(expected)
