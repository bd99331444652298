"""Make keys and fingerprints from the arguments of a call.  Pure.

    "refund:{order_id}"                a template with parameter names
    "refund:{order.id}"                nested: attributes, or the items of a mapping
    ["order.id", "currency"]           a list of fields, which makes `order.id=7,currency=EUR`
    lambda order, **_: order.id        a function of the arguments

Values are escaped, so that calls whose arguments differ as text have different keys.  `7` and `"7"` are the same text.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias, get_type_hints
from uuid import UUID

import pydantic_core

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.functions.arguments import Arguments, function_of_arguments, takes_no_argument
from integr8s_idem.keys import escaped
from integr8s_idem.keys.field_sets import annotation_at, field_set_of_parts, field_set_of_value
from integr8s_idem.keys.fingerprints import canonical_json, fingerprint, fingerprint_of_fields

KeySource: TypeAlias = str | Sequence[str] | Callable[..., str]
"""The source of a key: a template, dotted fields, or a function of the arguments."""

FingerprintSource: TypeAlias = Sequence[str] | Callable[..., object]
"""The source of a fingerprint: dotted fields, or a function of the arguments."""

_COMMON_IN_VALUES: Final = "-._~@+,/"
"""Punctuation that values often contain; other separators are preferred so that it stays unescaped in keys."""

_KEY_TYPES: Final = (str, int, UUID, Decimal, date, time)
"""Types whose equal values have equal text in every process."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A dotted field such as `order.id`: a parameter, and the path from it to a value."""

    text: str
    parameter: str
    path: tuple[str, ...]
    target: str
    """Name of the result it is part of: key or fingerprint."""

    def value(self, named: Mapping[str, Any]) -> Any:
        if self.parameter not in named:
            raise InvalidKeyError(f"the {self.target} uses {self.text}, which the call does not pass")
        value = named[self.parameter]
        for step in self.path:
            try:
                value = value[step] if isinstance(value, Mapping) else getattr(value, step)
            except (KeyError, AttributeError):
                raise InvalidKeyError(f"the {self.target} uses {self.text}, and {step} was not found") from None
        return value

    def part(self, named: Mapping[str, Any]) -> str:
        """Return the escaped value for a key."""
        value = self.value(named)
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, bool) or not isinstance(value, _KEY_TYPES):
            raise InvalidKeyError(
                f"the key uses {self.text}, which is {_described(value)}: keys are made of strings, integers, UUID, "
                "Decimal, dates, times and enums. Name a field of it, or pass a function as key"
            )
        if value == "":
            raise InvalidKeyError(f"the key uses {self.text}, which is empty")
        return escaped(str(value))


def _described(value: object) -> str:
    return repr(value) if value is None or isinstance(value, bool) else f"of type {type(value).__name__}"


def key_maker(source: KeySource, signature: inspect.Signature, name: str) -> Callable[[Arguments], str]:
    """Return a function that makes the key of a call of the function `name`.

    Raises:
        InvalidKeyError: The key uses an unknown parameter, does not depend on the arguments, or could be the same for
            different calls.
    """
    if isinstance(source, str):
        return _template(source, signature, name)
    if callable(source):
        if signature.parameters and takes_no_argument(source, signature):
            raise InvalidKeyError(
                f"the key function takes none of the arguments: all calls of {name} would have the same key. Let it "
                f"take one of {', '.join(signature.parameters)}"
            )
        return function_of_arguments(source, signature)
    if not source:
        raise InvalidKeyError(f"the list of fields is empty: all calls of {name} would have the same key")
    return _template(",".join(f"{text}={{{text}}}" for text in source), signature, name)


def fingerprint_maker(
    source: FingerprintSource | None,
    signature: inspect.Signature,
    name: str,
    function: Callable[..., Any] | None = None,
) -> Callable[[Arguments], bytes | None]:
    """Return a function that makes the fingerprint of a call, or `None` without a `source`.

    Fingerprints of dotted fields are compared if the fields are the same, including those of the classes with which
    `function` annotates its parameters.  If a function is the source, what it returns is compared whole, or by the
    fields of its class if that declares fields.

    Raises:
        InvalidKeyError: The fingerprint uses an unknown parameter.
    """
    if source is None:
        return lambda _: None
    if callable(source):
        return _fingerprint_by(function_of_arguments(source, signature))
    if isinstance(source, str):
        raise InvalidKeyError(f"fingerprint takes a list of fields, such as [{source!r}], or a function")
    return _fingerprint_of_parts([_field(text, signature, name, "fingerprint") for text in source], function)


def _fingerprint_by(make: Callable[[Arguments], Any]) -> Callable[[Arguments], bytes]:
    def fingerprint_of_call(call: Arguments) -> bytes:
        value = make(call)
        payload, field_set = _canonical(value), field_set_of_value(value)
        return fingerprint(payload) if field_set is None else fingerprint_of_fields(field_set, payload)

    return fingerprint_of_call


def _fingerprint_of_parts(
    fields: Sequence[_Field], function: Callable[..., Any] | None
) -> Callable[[Arguments], bytes]:
    @cache  # at the first call, when the names in annotations are defined
    def field_set() -> bytes:
        annotations = _annotations(function)
        return field_set_of_parts(
            {field.text: annotation_at(annotations.get(field.parameter, Any), field.path) for field in fields}
        )

    def fingerprint_of_call(call: Arguments) -> bytes:
        payload = _canonical({field.text: field.value(call.named) for field in fields})
        return fingerprint_of_fields(field_set(), payload)

    return fingerprint_of_call


def _annotations(function: Callable[..., Any] | None) -> dict[str, Any]:
    try:
        return get_type_hints(function) if function is not None else {}
    except (NameError, TypeError):  # imported for type checkers only, or not a function
        return {}


def _canonical(value: object) -> bytes:
    try:
        plain = pydantic_core.to_jsonable_python(value)
    except pydantic_core.PydanticSerializationError as error:
        raise InvalidKeyError(f"the fingerprint cannot be made: {error}") from error
    return canonical_json(plain)


def _template(template: str, signature: inspect.Signature, name: str) -> Callable[[Arguments], str]:
    literals, fields = [""], []
    for literal, text in _parsed(template):
        literals[-1] += literal
        if text is not None:
            fields.append(_field(text, signature, name))
            literals.append("")
    if not fields:
        raise InvalidKeyError(
            f"the key template {template!r} contains no parameter: all calls of {name} would have the same key. "
            'Write a template such as "refund:{order_id}"'
        )
    separators = "".join(_separator(literal, template) for literal in literals[1:-1])

    def make(call: Arguments) -> str:
        parts = (_escape_separators(field.part(call.named), separators) for field in fields)
        return literals[0] + "".join(map(str.__add__, parts, literals[1:]))

    return make


def _parsed(template: str) -> Iterator[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidKeyError(f"the key template {template!r} cannot be read: {error}") from None
    for literal, text, spec, conversion in parts:
        if spec or conversion:
            raise InvalidKeyError(
                f"the key template {template!r} contains a format or conversion; use names only: {{{text}}}"
            )
        yield literal, text


def _separator(literal: str, template: str) -> str:
    """Return the character of `literal` that separates two values; it is escaped within values."""
    separators = [each for each in literal if not each.isalnum() and each != "%"]
    if not separators:
        raise InvalidKeyError(
            f"the key template {template!r} has two names without a separator, so different calls could have the same "
            "key: put a character such as : between them"
        )
    return min(separators, key=_COMMON_IN_VALUES.__contains__)


def _escape_separators(part: str, separators: str) -> str:
    for separator in separators:
        part = part.replace(separator, f"%{ord(separator):02X}")
    return part


def _field(text: str, signature: inspect.Signature, name: str, target: str = "key") -> _Field:
    parameter, *path = text.split(".")
    if parameter not in signature.parameters or not all(step.isidentifier() for step in path):
        known = ", ".join(signature.parameters) or "none"
        raise InvalidKeyError(f"the {target} uses {text!r}, and the parameters of {name} are {known}")
    return _Field(text, parameter, tuple(path), target)
