"""Names of sets of fields, for fingerprints.  Pure.

Two versions of a class that differ in a field compute different digests of one payload: the later version includes its
new optional field.  The name of a set of fields tells such fingerprints apart from those of another payload.  It covers
the names of all fields, nested ones included, but not their types.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic_core import CoreSchema

FIELD_SET_BYTES: Final = 4

_CHILDREN: Final = (
    "schema",
    "items_schema",
    "choices",
    "keys_schema",
    "values_schema",
    "steps",
    "lax_schema",
    "strict_schema",
    "json_schema",
    "python_schema",
    "arguments_schema",
)
"""Entries of a schema of pydantic that contain schemas.  Others, such as defaults, contain values."""


@lru_cache(maxsize=1_024)
def field_set_of(annotation: Any, excluded: frozenset[str] = frozenset()) -> bytes:
    """Return the name of the set of fields of a class or of another type: `FIELD_SET_BYTES`, the first bit 1.

    Args:
        annotation: A model, a dataclass, or any other type that pydantic knows.  Others have no fields.
        excluded: Names of its own fields that are not part of the set.
    """
    return _digest(_lines(annotation, excluded))


def field_set_of_parts(parts: Mapping[str, Any]) -> bytes:
    """Return the name of the set of fields of named parts, given the annotation of each."""
    return _digest([f"{name}>{line}" for name in sorted(parts) for line in ("", *_lines(parts[name], frozenset()))])


def field_set_of_value(value: object) -> bytes | None:
    """Return the name of the set of fields of the class of `value`; `None` if the class declares no fields."""
    cls: Any = type(value)
    return field_set_of(cls) if isinstance(value, BaseModel) or dataclasses.is_dataclass(cls) else None


def annotation_at(annotation: Any, path: Sequence[str]) -> Any:
    """Return the annotation of the attribute at `path` of a value with `annotation`; `Any` if it is not declared."""
    for name in path:
        annotation = _attribute(_without_none(annotation), name)
    return annotation


def _attribute(annotation: Any, name: str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and name in annotation.model_fields:
        return annotation.model_fields[name].annotation
    try:
        return get_type_hints(annotation).get(name, Any)
    except (AttributeError, NameError, TypeError):  # not a class, or its annotations cannot be resolved
        return Any


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    return members[0] if len(members) == 1 else annotation


def _digest(lines: Iterable[str]) -> bytes:
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).digest()[:FIELD_SET_BYTES]
    return bytes((digest[0] | 0x80,)) + digest[1:]


def _lines(annotation: Any, excluded: frozenset[str]) -> list[str]:
    try:
        schema = TypeAdapter(annotation).core_schema
    except (PydanticUserError, NameError, TypeError, RecursionError):
        return []  # a type that pydantic does not know, so its fields are not known either
    walk = _Walk(excluded)
    walk.visit(schema, "")
    return walk.lines


class _Walk:
    """Collects the fields of a schema, one line for each.

    Each class with fields gets a number where it is found first, so that a class that contains itself, or that is used
    in many places, is listed once.
    """

    def __init__(self, excluded: frozenset[str]) -> None:
        self.lines: list[str] = []
        self._excluded = excluded
        """Fields of the first class, which are not listed."""
        self._definitions: dict[str, CoreSchema] = {}
        self._numbers: dict[str, int] = {}
        self._count = 0

    def visit(self, schema: Any, place: str) -> None:
        """List the fields of `schema`, which is used at `place`: the number of a class, and a name in it."""
        kind = schema["type"]
        if kind == "definitions":
            self._definitions |= {definition["ref"]: definition for definition in schema["definitions"]}
        elif kind == "definition-ref":
            self._refer(schema["schema_ref"], place)
            return
        fields = _fields_in(schema)
        if fields is not None:
            self._list(fields, place)
            return
        for name in _CHILDREN:
            for child in _schemas_in(schema.get(name)):
                self.visit(child, place)

    def _refer(self, ref: str, place: str) -> None:
        if ref in self._numbers:
            self.lines.append(f"{place}>{self._numbers[ref]}")
        elif ref in self._definitions:
            self._numbers[ref] = self._count
            self.visit(self._definitions[ref], place)

    def _list(self, fields: Mapping[str, Any], place: str) -> None:
        number = self._count
        self._count += 1
        excluded, self._excluded = self._excluded, frozenset()
        self.lines.append(f"{place}>{number}")
        for name in sorted(fields.keys() - excluded):
            self.lines.append(f"{number}.{name}")
            self.visit(fields[name], f"{number}.{name}")


def _fields_in(schema: Any) -> dict[str, Any] | None:
    """Return the dumped fields that a schema declares, and their schemas; `None` if it declares none."""
    kind = schema["type"]
    found: dict[str, Any]
    if kind in {"model-fields", "typed-dict"}:
        found = {_name(name, field): field for name, field in schema["fields"].items() if _is_dumped(field)}
    elif kind in {"dataclass-args", "named-tuple"}:
        found = {_name(field["name"], field): field for field in schema["fields"] if _is_dumped(field)}
    elif kind == "arguments":  # of a named tuple, in older versions of pydantic
        return {argument["name"]: argument["schema"] for argument in schema["arguments_schema"]}
    else:
        return None
    for computed in schema.get("computed_fields", ()):
        found[computed["property_name"]] = {"type": "computed-field", "schema": computed["return_schema"]}
    return found


def _name(name: str, field: Any) -> str:
    alias = field.get("serialization_alias")
    return f"{name}={alias}" if alias else name


def _is_dumped(field: Any) -> bool:
    return not field.get("serialization_exclude")


def _schemas_in(value: Any) -> Iterable[Any]:
    """Return the schemas in an entry of a schema: itself, or those in a list, a tuple or a table."""
    if isinstance(value, dict):
        is_schema = isinstance(value.get("type"), str)
        parts: Iterable[Any] = [value] if is_schema else value.values()
        return [part for part in parts if is_schema or isinstance(part, dict)]
    if isinstance(value, list | tuple):
        return [schema for part in value for schema in _schemas_in(part)]
    return []
