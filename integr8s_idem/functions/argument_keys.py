"""Keys and fingerprints made of the arguments of a call.  Pure.

    "refund:{order_id}"                a template over the parameters' names
    "refund:{order.id}"                nested: attributes, or the items of a mapping
    ["order.id", "currency"]           the same without words of one's own: `order.id=7,currency=EUR`
    lambda order, **_: order.id        whatever a function of the arguments says

What stands in for a name is escaped, so that calls whose arguments differ in their text make different keys.  `7` and
`"7"` are one text.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any, Final, TypeAlias
from uuid import UUID

import pydantic_core

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.keys import canonical_json, escaped, fingerprint

KeySource: TypeAlias = str | Sequence[str] | Callable[..., str]
"""How a key is made: a template, dotted fields, or a function of the arguments."""

FingerprintSource: TypeAlias = Sequence[str] | Callable[..., object]
"""What a second use of the key must bring again: dotted fields, or whatever a function of the arguments returns."""

_ALWAYS_KEPT: Final = "-._~@+,/"
"""What values hold often, and keys show as it is."""

_PLAIN: Final = (str, int, UUID, Decimal, date, time)
"""Types whose text is the same wherever the same value comes again."""


class Arguments:
    """The arguments of one call, as they were given, and, defaults included, by the names of their parameters.

    `injected`: the function has others fill in what it is not given, and is called as it is all the same.
    """

    def __init__(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, injected: bool = False
    ) -> None:
        bound = (signature.bind_partial if injected else signature.bind)(*args, **kwargs)
        bound.apply_defaults()
        self.args, self.kwargs, self.named = args, kwargs, bound.arguments


@dataclass(frozen=True, slots=True)
class _Field:
    """`order.id`: a parameter, and the way from it to a value."""

    text: str
    parameter: str
    way: tuple[str, ...]
    whole: str
    """What it is a part of: a key or a fingerprint."""

    def value(self, named: Mapping[str, Any]) -> Any:
        if self.parameter not in named:
            raise InvalidKeyError(f"{self.text} is to be part of a {self.whole}, and the call does not give it")
        value = named[self.parameter]
        for step in self.way:
            try:
                value = value[step] if isinstance(value, Mapping) else getattr(value, step)
            except (KeyError, AttributeError):
                raise InvalidKeyError(f"{self.text} is to be part of a {self.whole}, and {step} is not there") from None
        return value

    def part(self, named: Mapping[str, Any]) -> str:
        """Its value, escaped."""
        value = self.value(named)
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, bool) or not isinstance(value, _PLAIN):
            raise InvalidKeyError(
                f"{self.text} is to be part of a key, and is {_told(value)}: keys are made of strings, integers, UUID, "
                "Decimal, dates, times and enums. Name a field of it, or make the key by a function"
            )
        if value == "":
            raise InvalidKeyError(f"{self.text} is to be part of a key, and it is empty")
        return escaped(str(value))


def _told(value: object) -> str:
    return repr(value) if value is None or isinstance(value, bool) else f"of the type {type(value).__name__}"


def key_maker(source: KeySource, signature: inspect.Signature, name: str) -> Callable[[Arguments], str]:
    """What makes the key of a call of the function `name`.

    Raises:
        InvalidKeyError: A name in it is none of the function's parameters, nothing of the call is in it, or two
            different calls could have one key.
    """
    if isinstance(source, str):
        return _template(source, signature, name)
    if callable(source):
        return _function_of(source, signature)
    if not source:
        raise InvalidKeyError(f"no field was named: all calls of {name} would be the same work")
    return _template(",".join(f"{text}={{{text}}}" for text in source), signature, name)


def fingerprint_maker(
    source: FingerprintSource | None, signature: inspect.Signature, name: str
) -> Callable[[Arguments], bytes | None]:
    """What tells one payload from another under the same key; nothing does without a `source`.

    Raises:
        InvalidKeyError: A name in it is none of the function's parameters.
    """
    if source is None:
        return lambda _: None
    if callable(source):
        make = _function_of(source, signature)
        return lambda call: _fingerprint(make(call))
    if isinstance(source, str):
        raise InvalidKeyError(f"a fingerprint is made of a list of fields, such as [{source!r}], or by a function")
    fields = [_field(text, signature, name, "fingerprint") for text in source]
    return lambda call: _fingerprint({field.text: field.value(call.named) for field in fields})


def _function_of(make: Callable[..., Any], signature: inspect.Signature) -> Callable[[Arguments], Any]:
    """`make`, called with what its parameters name; if they are no names of the function's, as that is called."""
    try:
        wanted = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some that are written in C tell nothing
        wanted = []
    names = [each.name for each in wanted if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted)
    if not names or len(names) + takes_all != len(wanted) or not set(names) <= set(signature.parameters):
        return lambda call: make(*call.args, **call.kwargs)
    return lambda call: make(**{name: call.named[name] for name in (call.named if takes_all else names)})


def _fingerprint(value: object) -> bytes:
    try:
        plain = pydantic_core.to_jsonable_python(value)
    except pydantic_core.PydanticSerializationError as error:
        raise InvalidKeyError(f"no fingerprint can be made: {error}") from error
    return fingerprint(canonical_json(plain))


def _template(template: str, signature: inspect.Signature, name: str) -> Callable[[Arguments], str]:
    literals, fields = [""], []
    for literal, text in _parsed(template):
        literals[-1] += literal
        if text is not None:
            fields.append(_field(text, signature, name))
            literals.append("")
    if not fields:
        raise InvalidKeyError(
            f"the key template {template!r} names no argument: all calls of {name} would be the same work. "
            'Write one such as "refund:{order_id}"'
        )
    marks = "".join(_mark(between, template) for between in literals[1:-1])

    def make(call: Arguments) -> str:
        parts = (_unmarked(field.part(call.named), marks) for field in fields)
        return literals[0] + "".join(map(str.__add__, parts, literals[1:]))

    return make


def _parsed(template: str) -> Iterator[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidKeyError(f"the key template {template!r} cannot be read: {error}") from None
    for literal, text, spec, conversion in parts:
        if spec or conversion:
            raise InvalidKeyError(f"the key template {template!r} takes names only, no formats: {{{text}}}")
        yield literal, text


def _mark(literal: str, template: str) -> str:
    """A character by which two parts are told apart: what stands in for a name must not hold it."""
    marks = [each for each in literal if not each.isalnum() and each != "%"]
    if not marks:
        raise InvalidKeyError(
            f"in the key template {template!r} two names follow each other, so that two calls could have one key: "
            "put a character such as : between them"
        )
    return min(marks, key=_ALWAYS_KEPT.__contains__)


def _unmarked(part: str, marks: str) -> str:
    for mark in marks:
        part = part.replace(mark, f"%{ord(mark):02X}")
    return part


def _field(text: str, signature: inspect.Signature, name: str, whole: str = "key") -> _Field:
    parameter, *way = text.split(".")
    if parameter not in signature.parameters or not all(step.isidentifier() for step in way):
        known = ", ".join(signature.parameters) or "none"
        raise InvalidKeyError(f"{text!r} is to be part of a {whole}, and the parameters of {name} are {known}")
    return _Field(text, parameter, tuple(way), whole)
