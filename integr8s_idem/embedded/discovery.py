"""Discover the embedded servers of a running worker from other commands in the same folder.

The worker creates `.integr8s-idem/embedded-….toml` in its working directory and holds a lock on it.  The kernel
releases the lock when the process ends, so that a file without a lock is stale.  Process ids are not used, since they
can be reused.
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
"""Folder in the working directory, ignored by git."""

_PREFIX: Final = "embedded-"
_UNFINISHED: Final = "unfinished-"

SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True)
class RunningServers:
    """Embedded servers of another process."""

    process: int
    """Process id, for messages."""
    sections: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Sections of settings with their addresses and a secret."""

    def __str__(self) -> str:
        addresses = [
            f"INTEGR8S_IDEM_{section.upper()}__{name.upper()}={value}"
            for section, names in (("kafka", ("bootstrap_servers",)), ("store", ("kind", "url")))
            for name, value in self.sections.get(section, {}).items()
            if name in names
        ]
        return f"process {self.process}: {' '.join(addresses)}"


class ServersFile:
    """The file with the addresses of the servers of this process; see `announced_servers`."""

    def __init__(self, place: Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._place = place
        self._sections = sections
        self._descriptor, unfinished = _written(place, sections)
        self.path = place / unfinished.name.replace(_UNFINISHED, _PREFIX)
        unfinished.rename(self.path)

    def add(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Add `sections` to the file.

        Raises:
            OSError: The folder cannot be written.
        """
        self._sections = merged(self._sections, sections)
        descriptor, unfinished = _written(self._place, self._sections)
        unfinished.rename(self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


@contextmanager
def announced_servers(sections: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> Iterator[ServersFile]:
    """Let other commands find the servers inside the block.

    Args:
        sections: Settings of the servers, by section.
        folder: Folder of the commands; the working directory if not given.

    Raises:
        OSError: The folder cannot be written.
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
    """Write and lock a temporary file, before it is renamed."""
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
    """Return the embedded servers of the worker that runs in this folder.

    Args:
        folder: Folder in which it was started; the working directory if not given.

    Raises:
        ApplicationError: There is no such worker, or more than one.
    """
    place = folder or Path.cwd()
    found = list(_all_running(place / FOLDER))
    if not found:
        raise ApplicationError(
            f"no embedded servers found: --embedded uses those of a worker that was started in {place}. "
            "Start one in another terminal: integr8s-idem run MODULE:APP --embedded"
        )
    if len(found) > 1:
        which = "\n".join(f"    {servers}" for servers in found)
        raise ApplicationError(
            f"{len(found)} workers with embedded servers were started in {place}:\n{which}\n"
            "To do: stop the others; or omit --embedded and set the variables of the one to use"
        )
    return found[0]


def has_running_servers(folder: Path | None = None) -> bool:
    """Return whether a worker runs embedded servers in this folder, by default the working directory."""
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
    """Load settings like `load_settings`, with the embedded servers of the `run --embedded` in this folder.

    Args:
        file: The TOML file.  `None`: ./settings.toml if it exists, otherwise no file.
        settings_type: `Settings`, or the application's subclass of it.
        services: The services of the application, if known.
        folder: Folder in which the worker was started; the working directory if not given.
        ignore_unknown_sections: See `load_settings`.

    Raises:
        ApplicationError: See `running_servers`.
        SettingsError: See `load_settings`.
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
                    file.unlink(missing_ok=True)  # its process was killed
        except FileNotFoundError:
            continue  # its process has just ended


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _servers(table: dict[str, Any]) -> RunningServers:
    return RunningServers(table.pop("process"), table)


def _as_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Embedded servers of a running worker; removed when it ends.", f"process = {os.getpid()}"]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        # Strings and numbers have the same syntax in TOML and JSON.
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"
