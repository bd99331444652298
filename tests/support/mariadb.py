"""A real MariaDB for a test, on a Unix socket in a temporary folder.

The programs are taken from the folder `INTEGR8S_IDEM_TEST_MARIADB`, from the download of `make mariadb`, or from the
PATH.

    with MariadbServer() as server:
        engine = sql_engine(server.url)

Starting takes about two seconds. `stop` deletes the data.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

FETCHED: Final = Path(__file__).parents[2] / ".cache" / "mariadb"
"""The folder that `make mariadb` downloads to."""

_FOLDER_VARIABLE: Final = "INTEGR8S_IDEM_TEST_MARIADB"
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0
_USER: Final = "idem"
_SETTINGS: Final = {
    "skip-networking": "ON",
    "skip-name-resolve": "ON",
    "character-set-server": "latin1",  # not UTF-8, since records must not depend on the default of the server
    "default-time-zone": "+05:30",  # nor must times depend on the server's time zone
    "innodb-buffer-pool-size": "48M",
    "innodb-log-file-size": "16M",
    "performance-schema": "OFF",
    "max-connections": "60",
    "ssl": "OFF",  # MariaDB 11.4 would spend five seconds on a certificate at each start
}
_KEEPS_COMMITS: Final = {"innodb-flush-log-at-trx-commit": "1", "innodb-flush-method": "fsync"}
_FORGETS_COMMITS: Final = {"innodb-flush-log-at-trx-commit": "0", "innodb-flush-method": "nosync"}


def missing_programs() -> str:
    """Return why no MariaDB can be started here; empty if one can."""
    if all(_program(name) for name in ("mariadbd", "mariadb-install-db")):
        return ""
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return "no MariaDB: run `make mariadb`, which needs Maven"
    return "no MariaDB: `make mariadb` supports Linux on x86-64 only; put mariadbd (in /usr/sbin on Debian) on the PATH"


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=os.pathsep.join(map(str, _folders())))
    return Path(found) if found else None


def _folders() -> list[Path | str]:
    named = os.environ.get(_FOLDER_VARIABLE)
    if named:
        return [Path(named) / "bin", Path(named) / "sbin", Path(named) / "scripts"]
    # The marker is written last: without it the download may be incomplete.
    fetched = [FETCHED / "bin", FETCHED / "scripts"] if (FETCHED / ".set-up").exists() else []
    return [*fetched, os.environ.get("PATH", "")]


def _base(program: Path) -> list[str]:
    """Return the options that tell a program where its files are; installed packages need none."""
    return [f"--basedir={FETCHED}"] if program.is_relative_to(FETCHED) else []


class MariadbServer:
    """A server process with a database `test`. All methods block."""

    def __init__(self, *, keeps_commits: bool = False, settings: Mapping[str, str] | None = None) -> None:
        """Prepare a server.

        Args:
            keeps_commits: Whether commits survive a crash of the machine; slower.
            settings: Additional settings.
        """
        kept = _KEEPS_COMMITS if keeps_commits else _FORGETS_COMMITS
        self._settings = {**_SETTINGS, **kept, **(settings or {})}
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_seen = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def url(self) -> str:
        """URL for `sql_engine`."""
        return f"mysql+aiomysql://{_USER}@localhost/test?unix_socket={self._socket}"

    def start(self) -> None:
        """Create a database, start the server, and wait until it answers."""
        assert self._process is None, "the server is already running"
        self.folder = Path(tempfile.mkdtemp(prefix="idem-mariadb-"))
        try:
            self._make()
            self.start_again()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and delete its data. Does nothing if it was not started."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder != Path():
            shutil.rmtree(self.folder)
            self.folder = Path()

    def crash(self) -> None:
        """Kill the server and keep its data for `start_again`."""
        process, self._process = self._process, None
        assert process is not None, "the server is not running"
        process.kill()
        process.wait(_STOP_SECONDS)

    def start_again(self) -> None:
        """Start the server with its previous data."""
        program = _program("mariadbd")
        assert program is not None, missing_programs()
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        first = (self.folder / "first.sql").absolute()
        self._log_seen = len(self.log())
        places = [f"--datadir={self._data}", f"--socket={self._socket}", f"--pid-file={self.folder / 'pid'}"]
        options = ["--no-defaults", *_base(program), *self._as_user(), *places, f"--init-file={first}"]
        self._process = self._run(str(program), *options, *settings)
        self._await_ready()

    def log(self) -> str:
        """Return the log of the server."""
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

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"

    def _as_user(self) -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []

    def _make(self) -> None:
        installer = _program("mariadb-install-db")
        assert installer is not None, missing_programs()
        (self.folder / "first.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS test;\n"
            f"CREATE USER IF NOT EXISTS {_USER}@localhost;\n"
            f"GRANT ALL ON *.* TO {_USER}@localhost WITH GRANT OPTION;\n"
        )
        options = ["--no-defaults", *_base(installer), "--skip-test-db", "--auth-root-authentication-method=normal"]
        made = self._run(
            str(installer), *options, *self._as_user(), f"--datadir={self._data}", "--innodb-log-file-size=16M"
        )
        if made.wait(_START_SECONDS) != 0:
            raise RuntimeError(f"mariadb-install-db failed:\n{self.log()}")

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                # A starting server empties its folder for temporary tables; if servers shared it, one that is being
                # bootstrapped would crash.
                env=os.environ | {"TMPDIR": str(self.folder)},
                # A process group of its own: Ctrl-C in the tests must not end the server before its clients.
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            if "ready for connections" in self.log()[self._log_seen :]:
                return
            time.sleep(0.02)
        raise RuntimeError(f"mariadbd did not start:\n{self.log()}")
