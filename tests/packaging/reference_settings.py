"""Generate `docs/reference/settings.md`: each setting with default, unit and meaning."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from integr8s_idem.config import Settings, example
from integr8s_idem.config.schema_shape import Shape, shape_of
from integr8s_idem.config.sections import ServiceSettings
from tests.packaging.markdown import MADE, cell, table

_HEAD: Final = """\
Settings are read from `settings.toml` in the working directory, or from the file given by `--settings`.
`integr8s-idem settings check` reports all mistakes at once; [settings.example.toml](../../settings.example.toml) lists
all settings, ready to copy.

Environment variables override the file: `INTEGR8S_IDEM_STORE__PASSWORD` sets `password` in `[store]`, and
`INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY` sets `concurrency` in `[services.k8s-worker]`. Separate the items of a
list with commas. Files in the folder `INTEGR8S_IDEM_SECRETS_DIR` that are named like these variables override
`settings.toml`, and the environment overrides them.
"""
_UNITS: Final = {"seconds": "seconds", "bytes": "bytes"}
_WHAT_32_BITS_HOLD: Final = {2_147_483, 2_147_483_647}
"""Bounds of 32-bit integers in brokers and clients, for seconds (as milliseconds) and numbers; not worth listing."""
_KINDS: Final = {"string": "string", "boolean": "boolean", "integer": "integer", "number": "number"}


def page() -> str:
    lines = ["# Settings", "", MADE, "", _HEAD]
    for heading, model in sections():
        lines += [f"## {heading}", "", cell(inspect.getdoc(model) or ""), ""]
        meanings = example._docstrings(model)
        rows = [
            (f"`{name}`", _default(field), _value(shape_of(model).child(name), name), cell(meanings.get(name, "")))
            for name, field in model.model_fields.items()
        ]
        lines += [*table(("setting", "default", "value", "meaning"), rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section with its heading; a section that has several kinds, once per kind."""
    for name, field in Settings.model_fields.items():
        if name == "services":
            yield "`[services.NAME]`", ServiceSettings
            continue
        kinds = list(example._models(field.annotation))
        for kind in kinds:
            yield f"`[{name}]`" + (_kind(kind) if len(kinds) > 1 else ""), kind


def _kind(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"]["kind"]
    return f" with `kind = {json.dumps(schema['const'])}`"


def _default(field: FieldInfo) -> str:
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if value is None:
        return "needed" if field.is_required() else ""
    return f"`{example._toml(value)}`"


def _value(place: Shape | None, name: str) -> str:
    if place is None:
        return ""
    words = [words for schema in place.variants() if (words := _described(schema, name))]
    return cell(", or ".join(dict.fromkeys(words)))


def _described(schema: Mapping[str, Any], name: str) -> str:
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if choices := schema.get("enum"):
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return "list of strings" if items.get("type") == "string" else "list of tables"
    kind = _UNITS.get(name.rpartition("_")[2]) or _KINDS.get(schema.get("type", ""), "")
    return " ".join(filter(None, [kind, _bounds(schema)]))


def _bounds(schema: Mapping[str, Any]) -> str:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    most = None if most in _WHAT_32_BITS_HOLD else most
    words = f"from {_number(least)}" if least is not None else f"above {_number(above)}" if above is not None else ""
    words += f" to {_number(most)}" if most is not None else ""
    return words + (f"like `{schema['pattern']}`" if "pattern" in schema else "")


def _number(value: float) -> str:
    return f"{value:,}".replace(",", " ")
