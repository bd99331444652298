"""`load_settings`: read a file and the environment into one model, or report all mistakes."""

from __future__ import annotations

import os
import select
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from pydantic import ValidationError

from integr8s_idem.config.checks import contradictions
from integr8s_idem.config.load_context import Reading, instead
from integr8s_idem.config.message_text import printable_mistake
from integr8s_idem.config.schema_shape import Path as Place
from integr8s_idem.config.schema_shape import shape_of
from integr8s_idem.config.settings import Settings
from integr8s_idem.config.validation_errors import Found, Translator
from integr8s_idem.config.warnings import misspelled_services
from integr8s_idem.errors import SettingsError, SettingsMistake

SettingsT = TypeVar("SettingsT", bound=Settings)

DEFAULT_FILE: Final = Path("settings.toml")
"""Read from the working directory, if present."""


LARGEST_FILE: Final = 1_000_000
"""Largest settings file in bytes, so that a device or a dump does not fill the memory."""


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
    """Read the settings; call it once at startup.

    Args:
        path: The TOML file; by default ./settings.toml, if present.
        settings_type: `Settings`, or the application's subclass of it.
        overrides: Nested values that override every source: `{"kafka": {"bootstrap_servers": "…"}}`.
        services: Names of the application's services, if known, to detect misspelled sections.
        ignore_unknown_sections: Ignore sections that only the application's class defines.  A misspelled section of
            this library remains a mistake.

    Raises:
        SettingsError: All mistakes in file, environment and overrides, and all contradictions
            between settings.  It contains no secrets.
    """
    file = settings_file(path)
    reading = Reading(table=_table(file) if file else {})
    source = settings_source(path)
    settings, found = _validated(settings_type, reading, dict(overrides or {}))
    ignored = _unknown_sections(found, reading) if ignore_unknown_sections else set()
    mistakes = [each.mistake for each in found if each.place not in ignored]
    mistakes += misspelled_services(reading.merged.get("services"), list(services), reading.origins)
    doubtful = reading.without | {each.meant for each in found}
    mistakes += _contradictions(settings or _library_settings(reading), doubtful)
    if mistakes or settings is None:
        raise SettingsError(source, mistakes)
    return settings


def ignored_sections(path: Path | None) -> list[str]:
    """Return the sections of the file that `ignore_unknown_sections` ignores."""
    file = settings_file(path)
    return [name for name in _table(file) if name not in Settings.model_fields] if file else []


def settings_file(path: Path | None) -> Path | None:
    """Return the file that `load_settings` reads for `path`."""
    if path is not None:
        return path
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def settings_source(path: Path | None) -> str:
    """Return the name of the source of the settings in errors."""
    return str(settings_file(path) or "environment")


def _validated(
    settings_type: type[Settings], reading: Reading, overrides: dict[str, Any]
) -> tuple[Settings | None, list[Found]]:
    """Return the model without invalid values, or `None` if it requires them, and the mistakes."""
    found: list[Found] = []
    while True:
        outcome = _attempt(settings_type, reading, overrides)
        if isinstance(outcome, Settings):
            return outcome, found
        new = [each for each in _translated(settings_type, reading, outcome) if each.place not in reading.without]
        reported = {each.mistake.path for each in found}
        found += [each for each in new if each.is_reported and each.mistake.path not in reported]
        reading.instead |= {each.place: each.instead for each in new if each.instead is not None}
        reading.without |= {each.place for each in new if each.place}
        if not any(each.place for each in new):
            return None, found


def _unknown_sections(found: Iterable[Found], reading: Reading) -> set[Place]:
    """Return sections that may belong to the application: tables with names unlike those of the library."""
    return {
        each.place
        for each in found
        if len(each.place) == 1
        and not each.meant
        and each.place[0] not in Settings.model_fields
        and isinstance(reading.merged.get(each.place[0]), Mapping)
    }


def _library_settings(reading: Reading) -> Settings | None:
    """Return the sections of the library if those of the application are invalid, to check them as well."""
    reading.without |= {(name,) for name in reading.merged if name not in Settings.model_fields}
    outcome = _attempt(Settings, reading, dict(reading.merged))
    return outcome if isinstance(outcome, Settings) else None


def _contradictions(settings: Settings | None, doubtful: set[Place]) -> list[SettingsMistake]:
    """Return contradictions between settings that are not doubtful."""
    paths = [".".join(place) for place in doubtful if place]
    return [
        each.mistake
        for each in (contradictions(settings) if settings else ())
        if not any(_overlaps(each.path, path) or _overlaps(each.other, path) for path in paths)
    ]


def _attempt(settings_type: type[Settings], reading: Reading, overrides: dict[str, Any]) -> Settings | ValidationError:
    """Return the model or its error; a raised error would carry the values in its context."""
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


def _overlaps(path: str, mistaken: str) -> bool:
    return path == mistaken or path.startswith(f"{mistaken}.") or mistaken.startswith(f"{path}.")


def _table(file: Path) -> dict[str, Any]:
    """Read the tables in `file`."""
    mistake = ("", "")
    try:
        return tomllib.loads(_text(file))
    except _TooLargeError:
        mistake = ("file", f"is larger than {LARGEST_FILE} bytes, the limit for settings")
    except _NotAFileError:
        mistake = ("file", "is a pipe, or a device that has nothing to read; use a regular file")
    except FileNotFoundError:
        mistake = ("file", f"does not exist; write one: integr8s-idem settings example > {file}")
    except OSError as error:
        mistake = ("file", f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        mistake = (f"line {line}", "contains bytes that are not valid UTF-8; save the file as UTF-8")
    except tomllib.TOMLDecodeError as error:
        mistake = _syntax(str(error), file)
    except ValueError:
        # Python does not parse decimal numbers with more than a few thousand digits.
        mistake = ("file", "contains a number with too many digits")
    except RecursionError:
        mistake = ("file", "is nested too deeply")
    raise SettingsError(str(file), [printable_mistake(*mistake)])


class _TooLargeError(Exception):
    """The file is larger than `LARGEST_FILE`."""


class _NotAFileError(Exception):
    """Reading it would wait for another program or for a user, perhaps forever."""


def _text(file: Path) -> str:
    """Return the text of `file`, reading at most `LARGEST_FILE` bytes, since a device has no end."""
    with open(file, "rb", opener=_open_at_once) as opened:
        kind = os.fstat(opened.fileno()).st_mode
        # A pipe has no second reader: the file is read again to name the last line, and by each worker process.
        if stat.S_ISFIFO(kind) or not (stat.S_ISREG(kind) or select.select([opened], [], [], 0)[0]):
            raise _NotAFileError
        raw = opened.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise _TooLargeError
    # Some editors write a byte order mark; \r\n ends a line as in text mode.
    return raw.decode("utf-8-sig").replace("\r\n", "\n")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting until a writer opens the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _syntax(message: str, file: Path) -> tuple[str, str]:
    """Split `Invalid value (at line 3, column 7)` into place and message."""
    words, _, place = message.rpartition(" (at ")
    words, place = words[:1].lower() + words[1:], place.rstrip(")")
    if place.startswith("line"):
        hint = "; put strings in quotes" if words == "invalid value" else ""
        return place, f"is not valid TOML: {words}{hint}"
    last_line = len(_text(file).rstrip().splitlines())
    found = "where a value is expected" if words == "invalid value" else f"too early: {words}"
    return f"line {last_line}", f"is not valid TOML: the file ends {found}"
