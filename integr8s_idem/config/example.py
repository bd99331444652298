"""Generate `settings.example.toml`, with the default and the description of every setting."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from integr8s_idem.config.environment import SECRETS_DIR
from integr8s_idem.config.schema_shape import Shape, shape_of
from integr8s_idem.config.sections import ServiceSettings
from integr8s_idem.config.settings import Settings

_HEAD: Final = """\
All settings with their defaults.  You can omit any of them; settings in comments have no default.

Environment variables override this file: {prefix}STORE__PASSWORD sets password in [store], and
{prefix}SERVICES__K8S_WORKER__CONCURRENCY sets concurrency in [services.k8s-worker].  Write
lists separated by commas.  Files with such names in the folder {prefix}{secrets}
override this file, too; environment variables take precedence over them.
"""


def example_settings(settings_type: type[Settings] = Settings) -> str:
    """Return a TOML file with all settings at their defaults, and their descriptions in comments."""
    prefix = settings_type.model_config.get("env_prefix", "")
    parts = [_comment(_HEAD.format(prefix=prefix, secrets=SECRETS_DIR))]
    for name, field in settings_type.model_fields.items():
        if name == "services":
            note = "One table per service, such as [services.billing]."
            parts.append(_section("services.example", ServiceSettings(), note))
            continue
        section = field.get_default(call_default_factory=True) if not field.is_required() else None
        if isinstance(section, BaseModel):
            parts.append(_section(name, section))
            parts += [_instead(name, kind) for kind in _models(field.annotation) if kind is not type(section)]
        else:
            parts.append(_required(name, settings_type, field))
    return "\n".join(parts)


def _section(name: str, section: BaseModel, note: str = "") -> str:
    head = _comment(inspect.getdoc(type(section)) or "") + (_comment(note) if note else "")
    return f"{head}[{name}]\n" + "".join(_settings(type(section)))


def _instead(name: str, kind: type[BaseModel]) -> str:
    """Return a section of another kind as a comment, an alternative to the section above it."""
    settings = f"[{name}]\n" + "".join(_settings(kind))
    return _comment(f"Or, instead of [{name}] above:\n{inspect.getdoc(kind)}\n\n" + textwrap.indent(settings, "    "))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation allows, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _required(name: str, settings_type: type[Settings], field: FieldInfo) -> str:
    """Return a section without a default, with placeholders to fill in."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return f"{_comment(inspect.getdoc(field.annotation) or '')}[{name}]\n" + "".join(_settings(field.annotation))
    return "".join(_setting(name, field, _docstrings(settings_type).get(name, ""), shape_of(settings_type)))


def _settings(model: type[BaseModel]) -> Iterator[str]:
    docstrings = _docstrings(model)
    for name, field in model.model_fields.items():
        yield from _setting(name, field, docstrings.get(name, ""), shape_of(model))


def _setting(name: str, field: FieldInfo, docstring: str, shape: Shape) -> Iterator[str]:
    yield _comment(docstring)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    place = shape.child(name)
    choices = _choices(place) if place else []
    only = _only(place) if place and field.is_required() else None
    default = only if default is None else default
    value = f"# {name} = {_placeholder(place)}" if default is None else f"{name} = {_toml(default)}"
    yield f"{value}  # {' | '.join(choices)}\n" if choices else f"{value}\n"


def _only(shape: Shape) -> object:
    """Return the only possible value of a setting, if there is one."""
    return next((schema["const"] for schema in shape.variants() if "const" in schema), None)


def _choices(shape: Shape) -> list[str]:
    return [json.dumps(choice) for schema in shape.variants() for choice in schema.get("enum", ())]


def _placeholder(shape: Shape | None) -> str:
    """Return a placeholder of the right type."""
    if shape is None:
        return '"…"'
    if choices := _choices(shape):
        return choices[0]
    kinds = {schema.get("type") for schema in shape.variants()}
    return "1" if kinds & {"integer", "number"} else '["…"]' if "array" in kinds else '"…"'


def _toml(value: Any) -> str:
    match value:
        case Enum():
            return _toml(value.value)
        case bool():
            return str(value).lower()
        case int() if value >= 10_000:
            return f"{value:_}"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.strip().splitlines())


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of the model and its bases; empty without source code."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        if isinstance(body, ast.ClassDef):
            found |= dict(_documented(body.body))
    return found


def _documented(statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(statements):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
