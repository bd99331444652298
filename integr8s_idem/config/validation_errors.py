"""Translate validation errors of pydantic into mistakes: path, expected value, suggestion.  Never shows a secret."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from pydantic_core import ErrorDetails

from integr8s_idem.config.environment import variable_name
from integr8s_idem.config.idempotency import LARGEST
from integr8s_idem.config.message_text import printable_mistake, shown_number
from integr8s_idem.config.schema_shape import Path, Shape
from integr8s_idem.config.urls import without_secret
from integr8s_idem.errors import SettingsMistake

_VALIDATOR_PREFIXES: Final = ("Value error, ", "Assertion failed, ")
"""Prefixes that pydantic adds to messages of validators."""
_LONGEST_SHOWN: Final = 60
_LISTED: Final = 8
_ALIASES: Final = {"mariadb": "mysql", "valkey": "redis"}
"""Other common names of kinds of store."""


@dataclass(frozen=True)
class Found:
    """A mistake, and the values that cannot be used because of it."""

    mistake: SettingsMistake
    place: Path
    """The value to exclude so that the other settings can be validated."""
    meant: Path = ()
    """The setting that was probably meant."""
    instead: str | None = None
    """The value that was probably meant, used to validate the settings next to it."""
    is_reported: bool = True
    """Whether to report it; false if it follows from another mistake."""


@dataclass(frozen=True)
class Translator:
    """Translates errors, using the model, the values and their origins."""

    shape: Shape
    prefix: str
    values: Mapping[str, Any]
    origins: Mapping[Path, str]
    leaves: Collection[Path]
    """Paths of all individual settings."""

    def found(self, error: ErrorDetails) -> Found:
        """Translate `error`."""
        place = self._place(error)
        if error["type"] == "extra_forbidden":
            return self._unknown(place)
        path = place
        if error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
            path = (*place, str(error["ctx"]["discriminator"]).strip("'"))
        message, instead = self._message(error, path), None
        if error["type"] == "union_tag_invalid" and (instead := self._kind_meant(path)):
            message += f"; did you mean {json.dumps(instead)}?"
        whole = self._without_index(place)
        if len(place) == len(whole) + 1 and not isinstance(self._value_at(place), Mapping):
            # An item of a list of strings or numbers: the setting is the list.
            path, message = whole, f"each {message}" if message.startswith("must") else message
        origin = self.origins.get(path)
        # For a wrong tag, exclude only the tag, so that the section is validated as the default kind.
        excluded = path if error["type"] == "union_tag_invalid" else whole
        mistake = printable_mistake(".".join(path), message + (f" (set by {origin})" if origin else ""))
        return Found(mistake, excluded, instead=instead, is_reported=not self._has_unknown_kind(error, whole))

    def _kind_meant(self, path: Path) -> str | None:
        """Return the kind that was probably meant."""
        given, shape = self._value_at(path), self._shape_at(path)
        if not isinstance(given, str) or shape is None:
            return None
        kinds = [choice for schema in shape.variants() for choice in _choices(schema)]
        word = given.strip().lower()
        near = get_close_matches(_ALIASES.get(word, word), kinds, n=1)
        return near[0] if near else None

    def _has_unknown_kind(self, error: ErrorDetails, place: Path) -> bool:
        """Return whether the value was validated as the default kind only because its section has an unknown kind."""
        if error["type"] not in {"value_error", "assertion_error"}:
            return False
        return self._kind_is_unknown(place[:-1])

    def _kind_is_unknown(self, section: Path) -> bool:
        given, shape = self._value_at(section), self._shape_at((*section, "kind"))
        kind = given.get("kind") if isinstance(given, Mapping) else None
        if kind is None or shape is None:
            return False
        return kind not in [choice for schema in shape.variants() for choice in _choices(schema)]

    def _without_index(self, place: Path) -> Path:
        """Return `place` up to the list that contains it, since lists are excluded as a whole."""
        lists = (end for end in range(len(place)) if isinstance(self._value_at(place[:end]), list | tuple))
        return place[: next(lists, len(place))]

    def _place(self, error: ErrorDetails) -> Path:
        """Return the path of the error, without parts that are not names of settings: tags of unions, `[key]`."""
        location = error["loc"]
        value: Any = self.values
        place: list[str] = []
        for index, part in enumerate(location):
            is_missing = index == len(location) - 1 and error["type"] == "missing"
            if isinstance(value, Mapping) and (part in value or is_missing):
                value = value.get(part)
            elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                continue
            place.append(str(part))
        return tuple(place)

    def _message(self, error: ErrorDetails, path: Path) -> str:
        shape = self._shape_at(path)
        value = self._value_at(path)
        if error["type"] == "missing":
            return f"must be set: {expectation(shape, path, value)}" if shape else "must be set"
        if error["loc"][-1:] == ("[key]",):
            return f"must have a name that matches {error.get('ctx', {}).get('pattern', 'the rules')}"
        if error["type"] == "string_unicode" and isinstance(value, Mapping):
            return "contains a name that is not valid text"
        for prefix in _VALIDATOR_PREFIXES:
            if error["msg"].startswith(prefix):
                return _redacted(error["msg"].removeprefix(prefix), shape, value)
        wanted = expectation(shape, path, value) if shape else ""
        if not wanted:
            return error["msg"].replace("Input should be", "must be")
        return f"must be {wanted}{_not_this(shape, value)}"

    def _unknown(self, place: Path) -> Found:
        *parents, name = place
        section = self._shape_at(tuple(parents))
        known = section.names(self._value_at(tuple(parents))) if section else []
        origin = self.origins.get(place)
        if place in self.leaves:
            message = self._wrong_kind_message(tuple(parents), name)
            return Found(
                printable_mistake(".".join(place), message),
                place,
                is_reported=not self._kind_is_unknown(tuple(parents)),
            )
        meant = self._meant(tuple(parents), name, known)
        message = f"unknown setting {origin}" if origin else "unknown setting"
        if meant:
            near = meant[-1] if meant[:-1] == tuple(parents) else ".".join(meant)
            message += f"; did you mean {variable_name(self.prefix, meant) if origin else near}?"
        elif 0 < len(known) <= _LISTED:
            message += f"; known settings: {', '.join(known)}"
        return Found(printable_mistake(".".join(place), message), place, meant)

    def _wrong_kind_message(self, parents: Path, name: str) -> str:
        """Return the message for a setting that belongs to another kind of store."""
        given = self._value_at(parents)
        if "kind" in given:
            return f'cannot be used with kind = "{given["kind"]}"; remove it'
        section = self._shape_at(parents)
        assert section is not None
        variants = [schema["properties"] for schema in section.variants() if "kind" in schema.get("properties", {})]
        fitting = [names for names in variants if set(given) <= set(names)] or [n for n in variants if name in n]
        kinds = [json.dumps(choice) for names in fitting for choice in _choices(names["kind"])]
        default = next((names["kind"]["default"] for names in variants if "default" in names["kind"]), None)
        return f"cannot be used with kind = {json.dumps(default)}, the default; write kind = {_one_of(kinds)}"

    def _meant(self, parents: Path, name: str, known: Iterable[str]) -> Path:
        near = get_close_matches(name, list(known), n=1)
        if near:
            return (*parents, near[0])
        # The name may be in the wrong section, or a variable may have a single underscore instead of two.
        flat = {"_".join(path): path for path in self.leaves}
        elsewhere = [path for path in flat.values() if path[-1] == name]
        if elsewhere:
            return elsewhere[0]
        near = [] if parents else get_close_matches(name, list(flat), n=1, cutoff=0.85)
        return flat[near[0]] if near else ()

    def _shape_at(self, path: Path) -> Shape | None:
        shape: Shape | None = self.shape
        value: Any = self.values
        for part in path:
            if shape is None:
                return None
            shape = shape.item if shape.is_list else shape.child(part, value)
            value = value.get(part) if isinstance(value, Mapping) else None
        return shape

    def _value_at(self, path: Path) -> Any:
        value: Any = self.values
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list | tuple) and part.isdecimal():
                value = value[int(part)]
        return value


def expectation(shape: Shape, path: Path, value: object = None) -> str:
    """Return the text after "must be" for a setting; empty if the schema does not define it."""
    variants = shape.variants()
    if all(_choices(schema) for schema in variants):
        return _one_of([f'"{choice}"' for schema in variants for choice in _choices(schema)])
    words = dict.fromkeys(_expected(schema, path, value) for schema in variants)
    return " or ".join(words) if all(words) else ""


def _expected(schema: Mapping[str, Any], path: Path, value: object) -> str:
    if choices := _choices(schema):
        return _one_of([f'"{choice}"' for choice in choices])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _bounds(schema, value)
        case "number":
            what = "a number of seconds" if path and path[-1].endswith("_seconds") else "a number"
            return what + _bounds(schema, value)
        case "boolean":
            return "true or false"
        case "string":
            return "a string" + (f" that matches {schema['pattern']}" if "pattern" in schema else "")
        case "array":
            return ("a list of strings" if schema.get("items", {}).get("type") == "string" else "a list") + (
                " with at least one item" if schema.get("minItems") == 1 else ""
            )
        case "object":
            return "a table of settings"
    return ""


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _bounds(schema: Mapping[str, Any], value: object) -> str:
    least, most, above = (schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    if least is not None and most is not None and most < LARGEST:
        return f" from {least} to {most}"
    if most is not None and isinstance(value, int | float) and value > most:
        return f" of at most {most}"
    if least is not None:
        return f" of at least {least}"
    return "" if above is None else f" greater than {above}"


def _not_this(shape: Shape | None, value: Any) -> str:
    """Return the text ", not VALUE", unless the value may be a secret."""
    if shape is None or shape.is_secret or value is None:
        return ""
    match value:
        case bool() | int() | float():
            return f", not {json.dumps(value) if isinstance(value, bool) else shown_number(value)}"
        case str() if shape.is_table:
            return ", not a string"
        case str():
            shown = without_secret(value)
            cut = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
            return f", not {json.dumps(cut, ensure_ascii=False)}"
        case Mapping():
            return ", not a table"
        case list() | tuple():
            return ", not a list" if value else ", not an empty list"
    return f", not {type(value).__name__}"


def _redacted(message: str, shape: Shape | None, value: Any) -> str:
    """Return the message of a validator, with the value hidden if it is a secret."""
    if shape is not None and shape.is_secret and value:
        return message.replace(str(value), "***")
    return message
