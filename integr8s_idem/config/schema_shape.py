"""What settings there can be, read from the JSON Schema of a settings model.

The schema is the one public description that knows names, types and bounds alike, also of
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
"""Where a setting stands: `("services", "billing", "concurrency")`."""


class _Tolerant(GenerateJsonSchema):
    """A type without a JSON form is a setting of which nothing is known, not an error."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: Any, detail: str) -> None:
        """A default without a JSON form is nothing to warn of here."""


@dataclass(frozen=True)
class Shape:
    """One place in the settings: a section, a table of named sections, or a single setting."""

    schema: Mapping[str, Any]
    definitions: Mapping[str, Any]

    def variants(self, table: object = None) -> list[Mapping[str, Any]]:
        """The schemas a value here may have, without null; those of `table`'s kind, where it says one."""
        found = list(self._resolved(self.schema))
        return [schema for schema in found if _is_kind(schema, table)] or found

    def child(self, name: str, table: object = None) -> Shape | None:
        """The place called `name`; `None` if there is none.  `table` is the value here, if known."""
        found = [schema.get("properties", {}).get(name, _freely_named(schema)) for schema in self.variants(table)]
        inner = [schema for schema in found if schema is not None]
        return Shape({"anyOf": inner}, self.definitions) if inner else None

    def names(self, table: object = None) -> list[str]:
        """Names of the settings of a section."""
        return [name for schema in self.variants(table) for name in schema.get("properties", {})]

    @property
    def is_table(self) -> bool:
        return any(schema.get("type") == "object" for schema in self.variants())

    @property
    def is_list(self) -> bool:
        return any(schema.get("type") == "array" for schema in self.variants())

    @property
    def item(self) -> Shape | None:
        """What each of a list must be; `None` where the places of a list differ."""
        inner = [schema["items"] for schema in self.variants() if isinstance(schema.get("items"), Mapping)]
        return Shape({"anyOf": inner}, self.definitions) if inner else None

    @property
    def names_are_free(self) -> bool:
        """Whether users choose the names here, as in `[services.<name>]`."""
        return any(_freely_named(schema) is not None for schema in self.variants())

    @property
    def is_secret(self) -> bool:
        if any(schema.get("writeOnly") or schema.get("format") == "password" for schema in self.variants()):
            return True
        return self.item is not None and self.item.is_secret

    def leaves(self, here: Path = ()) -> Iterator[Path]:
        """The paths of all single settings below; a free name is written `<name>`."""
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
    """The shape of a whole settings model."""
    schema = model.model_json_schema(schema_generator=_Tolerant)
    return Shape(schema, schema.get("$defs", {}))


def _freely_named(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What stands under names that users choose."""
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
