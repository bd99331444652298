"""Constructors of structs for the reference: griffe knows those of dataclasses only."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe


def constructor_of(struct: Any) -> griffe.Function | None:
    """Return the `__init__` of a class that inherits directly from `msgspec.Struct`, and otherwise `None`."""
    if not any(str(base) == "Struct" for base in struct.bases):
        return None
    # Only the class itself knows whether its fields are keywords only.
    made = inspect.signature(getattr(import_module(struct.module.path), struct.name))
    parameters = [
        griffe.Parameter(
            name,
            annotation=struct.members[name].annotation,
            kind=griffe.ParameterKind.keyword_only
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            else griffe.ParameterKind.positional_or_keyword,
            default=struct.members[name].value,
        )
        for name, parameter in made.parameters.items()
    ]
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=struct)
