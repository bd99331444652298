"""The structure of settings, read from the JSON Schema of a settings model.

The schema is a public description of names, types and bounds, including those of
sections that applications add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

Path = tuple[str, ...]
"""The path of a setting: `("services", "billing", "concurrency")`."""


class _Tolerant(GenerateJsonSchema):
    """Treats types without a JSON form as unknown instead of raising an error."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Ignore warnings about defaults without a JSON form."""


@dataclass(frozen=True)
class Shape:
    """The structure at one path: a section, a table of named sections, or a single setting."""

    schema: Mapping[str, Any]
    definitions: Mapping[str, Any]

    def variants(self, table: object = None) -> list[Mapping[str, Any]]:
        """Return the schemas of values at this path, without null, and limited to the kind of `table` if it has one."""
        found = list(self._resolved(self.schema))
        return [schema for schema in found if _is_kind(schema, table)] or found

    def child(self, name: str, table: object = None) -> Shape | None:
        """Return the structure below `name`, or `None`.  `table` is the value at this path, if known."""
        found = [schema.get("properties", {}).get(name, _freely_named(schema)) for schema in self.variants(table)]
        inner = [schema for schema in found if schema is not None]
        return Shape({"anyOf": inner}, self.definitions) if inner else None

    def names(self, table: object = None) -> list[str]:
        """Return the names of the settings of a section."""
        return [name for schema in self.variants(table) for name in schema.get("properties", {})]

    @property
    def is_table(self) -> bool:
        return any(schema.get("type") == "object" for schema in self.variants())

    @property
    def is_list(self) -> bool:
        return any(schema.get("type") == "array" for schema in self.variants())

    @property
    def item(self) -> Shape | None:
        """The structure of list items; `None` if they differ by position."""
        inner = [schema["items"] for schema in self.variants() if isinstance(schema.get("items"), Mapping)]
        return Shape({"anyOf": inner}, self.definitions) if inner else None

    @property
    def names_are_free(self) -> bool:
        """Whether users choose the names at this path, as in `[services.<name>]`."""
        return any(_freely_named(schema) is not None for schema in self.variants())

    @property
    def is_secret(self) -> bool:
        if any(schema.get("writeOnly") or schema.get("format") == "password" for schema in self.variants()):
            return True
        return self.item is not None and self.item.is_secret

    def leaves(self, here: Path = ()) -> Iterator[Path]:
        """Yield the paths of all individual settings; names chosen by users are written `<name>`."""
        names = [*self.names(), *(["<name>"] if self.names_are_free else [])]
        if not names:
            yield here
        for name in names:
            inner = self.child(name)
            if inner is not None:
                yield from inner.leaves((*here, name))

    def _resolved(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "$ref" in schema:
            yield from self._resolved(self.definitions[schema["$ref"].rpartition("/")[2]])
            return
        members = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if members:
            for member in members:
                yield from self._resolved(member)
        elif schema.get("type") != "null":
            yield schema


@cache
def shape_of(model: type[BaseModel]) -> Shape:
    """Return the structure of a settings model."""
    schema = model.model_json_schema(schema_generator=_Tolerant)
    return Shape(schema, schema.get("$defs", {}))


def _freely_named(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of values whose names users choose."""
    by_pattern: Mapping[str, Any] = schema.get("patternProperties", {})
    inner = next(iter(by_pattern.values()), schema.get("additionalProperties"))
    return inner if isinstance(inner, Mapping) else None


def _is_kind(schema: Mapping[str, Any], table: object) -> bool:
    if not isinstance(table, Mapping):
        return True
    return all(
        table.get(name, inner.get("default")) == inner["const"]
        for name, inner in schema.get("properties", {}).items()
        if "const" in inner
    )
