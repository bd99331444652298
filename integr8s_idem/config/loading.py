"""`load_settings`: one file and the environment into one model, or every mistake at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from pydantic import ValidationError

from integr8s_idem.config.checks import contradictions, misspelled_services
from integr8s_idem.config.load_context import Reading, instead
from integr8s_idem.config.message_text import said
from integr8s_idem.config.schema_shape import Path as Place
from integr8s_idem.config.schema_shape import shape_of
from integr8s_idem.config.settings import Settings
from integr8s_idem.config.validation_errors import Found, Translator
from integr8s_idem.errors import SettingsError, SettingsMistake

SettingsT = TypeVar("SettingsT", bound=Settings)

DEFAULT_FILE: Final = Path("settings.toml")
"""Read from the working directory if it is there."""


LARGEST_FILE: Final = 1_000_000
"""Bytes of a file of settings: a device, or a dump by mistake, would fill the memory."""


@overload
def load_settings(
    path: Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    services: Iterable[str] = (),
    ignore_unknown_sections: bool = False,
) -> Settings: ...


@overload
def load_settings(
    path: Path | None = None,
    settings_type: type[SettingsT] = ...,
    *,
    overrides: Mapping[str, Any] | None = None,
    services: Iterable[str] = (),
    ignore_unknown_sections: bool = False,
) -> SettingsT: ...


def load_settings(
    path: Path | None = None,
    settings_type: type[Any] = Settings,
    *,
    overrides: Mapping[str, Any] | None = None,
    services: Iterable[str] = (),
    ignore_unknown_sections: bool = False,
) -> Settings:
    """Read the settings, once, at start.

    Args:
        path: The TOML file.  `None`: ./settings.toml if it is there, else no file.
        settings_type: `Settings`, or the application's subclass of it.
        overrides: Nested values that win over every source: `{"kafka": {"bootstrap_servers": "…"}}`.
        services: Those of the application, if known: a section whose name is nearly one of them is a mistake.
        ignore_unknown_sections: Ignore sections that only the application's own class knows.  A section whose name is
            nearly that of a section of this library stays a mistake.

    Raises:
        SettingsError: Every mistake in file, environment and overrides, and every contradiction
            between settings.  It holds no secret.
    """
    file = settings_file(path)
    reading = Reading(table=_table(file) if file else {})
    source = settings_source(path)
    settings, found = _validated(settings_type, reading, dict(overrides or {}))
    ignored = _unknown_sections(found, reading) if ignore_unknown_sections else set()
    mistakes = [each.mistake for each in found if each.place not in ignored]
    mistakes += misspelled_services(reading.merged.get("services"), list(services), reading.origins)
    mistakes += _contradictions(settings or _ours(reading), reading.without | {each.meant for each in found})
    if mistakes or settings is None:
        raise SettingsError(source, mistakes)
    return settings


def ignored_sections(path: Path | None) -> list[str]:
    """The sections of the file that `ignore_unknown_sections` leaves out."""
    file = settings_file(path)
    return [name for name in _table(file) if name not in Settings.model_fields] if file else []


def settings_file(path: Path | None) -> Path | None:
    """The file that `load_settings` reads for `path`."""
    if path is not None:
        return path
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def settings_source(path: Path | None) -> str:
    """What errors call the place where the settings come from."""
    return str(settings_file(path) or "environment")


def _validated(
    settings_type: type[Settings], reading: Reading, overrides: dict[str, Any]
) -> tuple[Settings | None, list[Found]]:
    """The model without the values that are mistakes, and these; no model if it cannot be without them."""
    found: list[Found] = []
    while True:
        outcome = _attempt(settings_type, reading, overrides)
        if isinstance(outcome, Settings):
            return outcome, found
        new = [each for each in _translated(settings_type, reading, outcome) if each.place not in reading.without]
        said = {each.mistake.path for each in found}
        found += [each for each in new if each.told and each.mistake.path not in said]
        reading.instead |= {each.place: each.instead for each in new if each.instead is not None}
        reading.without |= {each.place for each in new if each.place}
        if not any(each.place for each in new):
            return None, found


def _unknown_sections(found: Iterable[Found], reading: Reading) -> set[Place]:
    """Sections that may be the application's: tables with names that are nearly none of ours."""
    return {
        each.place
        for each in found
        if len(each.place) == 1
        and not each.meant
        and each.place[0] not in Settings.model_fields
        and isinstance(reading.merged.get(each.place[0]), Mapping)
    }


def _ours(reading: Reading) -> Settings | None:
    """What can be read of our own sections where the application's cannot be, so that they are checked as well."""
    reading.without |= {(name,) for name in reading.merged if name not in Settings.model_fields}
    outcome = _attempt(Settings, reading, dict(reading.merged))
    return outcome if isinstance(outcome, Settings) else None


def _contradictions(settings: Settings | None, doubtful: set[Place]) -> list[SettingsMistake]:
    """Those between settings of which none is doubtful."""
    paths = [".".join(place) for place in doubtful if place]
    return [
        each.mistake
        for each in (contradictions(settings) if settings else ())
        if not any(_rests_on(each.path, path) or _rests_on(each.other, path) for path in paths)
    ]


def _attempt(settings_type: type[Settings], reading: Reading, overrides: dict[str, Any]) -> Settings | ValidationError:
    """Returns its error: one that is raised further would carry the values along in its context."""
    with reading.active():
        try:
            return settings_type(**overrides)
        except ValidationError as error:
            return error


def _translated(settings_type: type[Settings], reading: Reading, error: ValidationError) -> list[Found]:
    prefix = settings_type.model_config.get("env_prefix", "")
    shape = shape_of(settings_type)
    values = instead(reading.merged, reading.instead)
    translator = Translator(shape, prefix, values, reading.origins, frozenset(shape.leaves()))
    by_path: dict[str, Found] = {}
    for detail in error.errors(include_url=False, include_input=False):
        each = translator.found(detail)
        by_path.setdefault(each.mistake.path, each)
    return list(by_path.values())


def _rests_on(path: str, mistaken: str) -> bool:
    return path == mistaken or path.startswith(f"{mistaken}.") or mistaken.startswith(f"{path}.")


def _table(file: Path) -> dict[str, Any]:
    """The tables in `file`."""
    mistake = ("", "")
    try:
        # A file saved by an editor that puts a mark at its start is still TOML.
        return tomllib.loads(_text(file))
    except _TooLargeError:
        mistake = ("file", f"is larger than {LARGEST_FILE} bytes, which no settings are")
    except FileNotFoundError:
        mistake = ("file", f"does not exist; write one: integr8s-idem settings example > {file}")
    except OSError as error:
        mistake = ("file", f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        mistake = (f"line {line}", "holds bytes that are no UTF-8 text; save the file as UTF-8")
    except tomllib.TOMLDecodeError as error:
        mistake = _syntax(str(error), file)
    except ValueError:
        # Python refuses to read a decimal number beyond some thousand digits.
        mistake = ("file", "holds a number of more digits than can be read")
    except RecursionError:
        mistake = ("file", "is nested too deeply")
    raise SettingsError(str(file), [said(*mistake)])


class _TooLargeError(Exception):
    """It is no file of settings."""


def _text(file: Path) -> str:
    """What stands in `file`; of one without an end no more is read than settings can hold."""
    with file.open("rb") as opened:
        raw = opened.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise _TooLargeError
    # As in a file that is opened as text, \r\n ends a line.
    return raw.decode("utf-8-sig").replace("\r\n", "\n")


def _syntax(message: str, file: Path) -> tuple[str, str]:
    """`Invalid value (at line 3, column 7)` into place and words."""
    words, _, place = message.rpartition(" (at ")
    words, place = words[:1].lower() + words[1:], place.rstrip(")")
    if place.startswith("line"):
        hint = "; texts stand in quotes" if words == "invalid value" else ""
        return place, f"is no TOML: {words}{hint}"
    last_line = len(_text(file).rstrip().splitlines())
    found = "where a value should stand" if words == "invalid value" else f"too early: {words}"
    return f"line {last_line}", f"is no TOML: the file ends {found}"
