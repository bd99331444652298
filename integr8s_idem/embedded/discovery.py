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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from integr8s_idem.config import Settings, load_settings
from integr8s_idem.embedded.settings_overlay import NO_KAFKA_CREDENTIALS, embedded_settings, merged
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
    sections: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """What leads to them: sections of settings, with a secret."""

    def __str__(self) -> str:
        addresses = [
            f"INTEGR8S_IDEM_{section.upper()}__{name.upper()}={value}"
            for section, names in (("kafka", ("bootstrap_servers",)), ("store", ("kind", "url")))
            for name, value in self.sections.get(section, {}).items()
            if name in names
        ]
        return f"process {self.process}: {' '.join(addresses)}"


class ServersFile:
    """The file that tells where the servers of this process are; see `told_where`."""

    def __init__(self, place: Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._place = place
        self._sections = sections
        self._descriptor, unfinished = _written(place, sections)
        self.path = place / unfinished.name.replace(_UNFINISHED, _PREFIX)
        unfinished.rename(self.path)

    def add(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell of `sections` as well.

        Raises:
            OSError: The folder cannot be written to.
        """
        self._sections = merged(self._sections, sections)
        descriptor, unfinished = _written(self._place, self._sections)
        unfinished.rename(self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def remove(self) -> None:
        """Nobody finds the servers any more."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextmanager
def announced_servers(sections: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> Iterator[ServersFile]:
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
    file = ServersFile(place, sections)
    try:
        yield file
    finally:
        file.remove()


def _written(place: Path, sections: Mapping[str, Mapping[str, Any]]) -> tuple[int, Path]:
    """A new file, whole and locked before anybody finds it."""
    descriptor, name = tempfile.mkstemp(dir=place, prefix=_UNFINISHED, suffix=".toml")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, _as_toml(sections).encode())
    except OSError:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
        raise
    return descriptor, Path(name)


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


def has_running_servers(folder: Path | None = None) -> bool:
    """Whether some worker runs embedded servers in this folder, or in the working directory."""
    return any(_all_running((folder or Path.cwd()) / FOLDER))


@overload
def load_embedded_settings(
    file: Path | None = None,
    *,
    services: Iterable[str] = (),
    folder: Path | None = None,
    ignore_unknown_sections: bool = False,
) -> Settings: ...


@overload
def load_embedded_settings(
    file: Path | None = None,
    settings_type: type[SettingsT] = ...,
    *,
    services: Iterable[str] = (),
    folder: Path | None = None,
    ignore_unknown_sections: bool = False,
) -> SettingsT: ...


def load_embedded_settings(
    file: Path | None = None,
    settings_type: type[Any] = Settings,
    *,
    services: Iterable[str] = (),
    folder: Path | None = None,
    ignore_unknown_sections: bool = False,
) -> Settings:
    """As `load_settings`, with the servers of the worker that runs here by `run --embedded` in place of those named.

    Args:
        file: The TOML file.  `None`: ./settings.toml if it is there, else no file.
        settings_type: `Settings`, or the application's subclass of it.
        services: Those of the application, if known.
        folder: Where the worker was started; the working directory if not given.
        ignore_unknown_sections: As for `load_settings`.

    Raises:
        ApplicationError: As `running_servers`.
        SettingsError: As `load_settings`.
    """
    servers = running_servers(folder)
    names = list(services)

    def load(overrides: Mapping[str, Any]) -> Settings:
        settings: Settings = load_settings(
            file,
            settings_type,
            overrides=overrides,
            services=names,
            ignore_unknown_sections=ignore_unknown_sections,
        )
        return settings

    return load(embedded_settings(load(NO_KAFKA_CREDENTIALS), servers.sections))


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
