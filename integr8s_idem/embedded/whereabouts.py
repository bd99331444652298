"""Where the embedded servers of a running worker are, for other commands of the same folder.

Whoever runs them leaves `.integr8s-idem/embedded-….toml` in the working directory and holds a lock on it for as long as
it lives.  The kernel lets go of the lock however a process ends, so that a file without one is nobody's: no process
number is trusted, which may be another's by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from integr8s_idem.config import Settings, load_settings
from integr8s_idem.embedded.overlay import NO_KAFKA_CREDENTIALS, embedded_settings
from integr8s_idem.errors import ApplicationError

FOLDER: Final = Path(".integr8s-idem")
"""In the working directory; git passes it over."""

_PREFIX: Final = "embedded-"
_UNFINISHED: Final = "unfinished-"

SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True)
class RunningServers:
    """Embedded servers of another process, as it has told."""

    process: int
    """Its number, where it runs: for people."""
    sections: Mapping[str, Mapping[str, Any]]
    """What leads to them: sections of settings."""

    def __str__(self) -> str:
        addresses = [
            f"INTEGR8S_IDEM_{section.upper()}__{name.upper()}={value}"
            for section, names in (("kafka", ("bootstrap_servers",)), ("store", ("kind", "url")))
            for name, value in self.sections.get(section, {}).items()
            if name in names
        ]
        return f"process {self.process}: {' '.join(addresses)}"


@contextmanager
def told_where(sections: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> Iterator[Path]:
    """Let other commands find servers while inside.

    Args:
        sections: Texts and numbers that lead to them, by section.
        folder: Where the commands are called; the working directory if not given.

    Raises:
        OSError: The folder cannot be written to.
    """
    place = (folder or Path.cwd()) / FOLDER
    place.mkdir(exist_ok=True)
    (place / ".gitignore").write_text("*\n")
    # Nobody finds it before it is whole and locked.
    descriptor, name = tempfile.mkstemp(dir=place, prefix=_UNFINISHED, suffix=".toml")
    unfinished = Path(name)
    told = place / unfinished.name.replace(_UNFINISHED, _PREFIX)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, _as_toml(sections).encode())
        unfinished.rename(told)
        yield told
    finally:
        unfinished.unlink(missing_ok=True)
        told.unlink(missing_ok=True)
        os.close(descriptor)


def running_servers(folder: Path | None = None) -> RunningServers:
    """The embedded servers of the one worker that runs them in this folder.

    Args:
        folder: Where it was started; the working directory if not given.

    Raises:
        ApplicationError: There is none, or more than one: which is meant must be said.
    """
    place = folder or Path.cwd()
    found = list(_all_running(place / FOLDER))
    if not found:
        raise ApplicationError(
            f"no embedded servers run here: --embedded means those of a worker that was started from {place}. "
            "Start one in another terminal: integr8s-idem run MODULE:APP --embedded"
        )
    if len(found) > 1:
        which = "\n".join(f"    {servers}" for servers in found)
        raise ApplicationError(
            f"{len(found)} workers were started from {place}, each with embedded servers of its own:\n{which}\n"
            "To do: end the others; or leave --embedded out, and set what stands behind the one that is meant"
        )
    return found[0]


@overload
def settings_of_running(
    file: Path | None = None, *, services: Iterable[str] = (), folder: Path | None = None
) -> Settings: ...


@overload
def settings_of_running(
    file: Path | None = None,
    settings_type: type[SettingsT] = ...,
    *,
    services: Iterable[str] = (),
    folder: Path | None = None,
) -> SettingsT: ...


def settings_of_running(
    file: Path | None = None,
    settings_type: type[Any] = Settings,
    *,
    services: Iterable[str] = (),
    folder: Path | None = None,
) -> Settings:
    """As `load_settings`, with the servers of the worker that runs here by `run --embedded` in place of those named.

    Args:
        file: The TOML file.  `None`: ./settings.toml if it is there, else no file.
        settings_type: `Settings`, or the application's subclass of it.
        services: Those of the application, if known.
        folder: Where the worker was started; the working directory if not given.

    Raises:
        ApplicationError: As `running_servers`.
        SettingsError: As `load_settings`.
    """
    servers = running_servers(folder)
    names = list(services)
    own = load_settings(file, settings_type, overrides=NO_KAFKA_CREDENTIALS, services=names)
    laid_over = embedded_settings(own, servers.sections)
    settings: Settings = load_settings(file, settings_type, overrides=laid_over, services=names)
    return settings


def _all_running(place: Path) -> Iterator[RunningServers]:
    for file in sorted(place.glob(f"{_PREFIX}*.toml")):
        try:
            with file.open("rb") as opened:
                if _is_locked(opened.fileno()):
                    yield _servers(tomllib.load(opened))
                else:
                    file.unlink(missing_ok=True)  # whoever wrote it was killed
        except FileNotFoundError:
            continue  # it has ended in this moment


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _servers(table: dict[str, Any]) -> RunningServers:
    return RunningServers(table.pop("process"), table)


def _as_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Embedded servers of a worker that runs; gone when it ends.", f"process = {os.getpid()}"]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        # A text or a number is written in TOML as in JSON.
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"
