"""`docs/reference/settings.md`: each setting with default, unit and meaning.  `make reference` writes it."""

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
They stand in `settings.toml` of the working directory, or where `--settings` says. `integr8s-idem settings check` says
every mistake at once; [settings.example.toml](../../settings.example.toml) has all of them, to copy from.

The environment wins over the file: `INTEGR8S_IDEM_STORE__PASSWORD` sets `password` in `[store]`, and
`INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY` sets `concurrency` in `[services.k8s-worker]`. Lists are written there
with commas. Files that are named like these variables, in the folder that `INTEGR8S_IDEM_SECRETS_DIR` names, come in
between.
"""
_UNITS: Final = {"seconds": "seconds", "bytes": "bytes"}
_WHAT_32_BITS_HOLD: Final = {2_147_483, 2_147_483_647}
"""Bounds that nobody meets: seconds as milliseconds, and numbers, as brokers and clients count."""
_KINDS: Final = {"string": "text", "boolean": "true or false", "integer": "whole number", "number": "number"}


def page() -> str:
    lines = ["# Settings", "", MADE, "", _HEAD]
    for heading, model in sections():
        lines += [f"## {heading}", "", cell(inspect.getdoc(model) or ""), ""]
        told = example._docstrings(model)
        rows = [
            (f"`{name}`", _default(field), _value(shape_of(model).child(name), name), cell(told.get(name, "")))
            for name, field in model.model_fields.items()
        ]
        lines += [*table(("setting", "default", "value", "meaning"), rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section under its heading; one of several kinds, once for each kind."""
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
    words = [words for schema in place.variants() if (words := _told(schema, name))]
    return cell(", or ".join(dict.fromkeys(words)))


def _told(schema: Mapping[str, Any], name: str) -> str:
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if choices := schema.get("enum"):
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if schema.get("type") == "array":
        return "list of texts"
    kind = _UNITS.get(name.rpartition("_")[2]) or _KINDS.get(schema.get("type", ""), "")
    return " ".join(filter(None, [kind, _bounds(schema)]))


def _bounds(schema: Mapping[str, Any]) -> str:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    most = None if most in _WHAT_32_BITS_HOLD else most
    told = f"from {_number(least)}" if least is not None else f"above {_number(above)}" if above is not None else ""
    told += f" to {_number(most)}" if most is not None else ""
    return told + (f"like `{schema['pattern']}`" if "pattern" in schema else "")


def _number(value: float) -> str:
    return f"{value:,}".replace(",", " ")
