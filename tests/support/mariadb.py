"""A real MariaDB for a test: on a Unix socket, in a folder of its own, stopped by its process id.

The programs are those of the folder that `INTEGR8S_IDEM_TEST_MARIADB` names, or what `make mariadb` fetched, or those
on the PATH.

    with MariadbServer() as server:
        engine = sql_engine(server.url)

Starting takes about two seconds.  Nothing survives a stop.
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
"""Where `make mariadb` puts it."""

_FOLDER_VARIABLE: Final = "INTEGR8S_IDEM_TEST_MARIADB"
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0
_USER: Final = "idem"
_SETTINGS: Final = {
    "skip-networking": "ON",
    "skip-name-resolve": "ON",
    "character-set-server": "latin1",  # not what texts of ours look like: what we keep must not depend on it
    "default-time-zone": "+05:30",  # nor our times on that of the server
    "innodb-buffer-pool-size": "48M",
    "innodb-log-file-size": "16M",
    "performance-schema": "OFF",
    "max-connections": "60",
    "ssl": "OFF",  # a server of 11.4 without a certificate makes one at each start, for five seconds
}
_KEEPS_COMMITS: Final = {"innodb-flush-log-at-trx-commit": "1", "innodb-flush-method": "fsync"}
_FORGETS_COMMITS: Final = {"innodb-flush-log-at-trx-commit": "0", "innodb-flush-method": "nosync"}


def missing_programs() -> str:
    """Why no MariaDB can be started here; empty if one can."""
    if all(_program(name) for name in ("mariadbd", "mariadb-install-db")):
        return ""
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        return "no MariaDB: run `make mariadb`, which needs Maven"
    return "no MariaDB: Maven has one for Linux on x86-64 only; put mariadbd (in /usr/sbin on Debian) on the PATH"


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=os.pathsep.join(map(str, _folders())))
    return Path(found) if found else None


def _folders() -> list[Path | str]:
    named = os.environ.get(_FOLDER_VARIABLE)
    if named:
        return [Path(named) / "bin", Path(named) / "sbin", Path(named) / "scripts"]
    # The marker comes last: without it, what is there may be half of it.
    fetched = [FETCHED / "bin", FETCHED / "scripts"] if (FETCHED / ".set-up").exists() else []
    return [*fetched, os.environ.get("PATH", "")]


def _base(program: Path) -> list[str]:
    """Where a program finds its messages and tables; one that was installed by a package knows."""
    return [f"--basedir={FETCHED}"] if program.is_relative_to(FETCHED) else []


class MariadbServer:
    """One server process with one database, `test`.  All methods block."""

    def __init__(self, *, keeps_commits: bool = False, settings: Mapping[str, str] | None = None) -> None:
        """`keeps_commits`: what was committed survives the machine's end, too; slower.  `settings`: more of them."""
        kept = _KEEPS_COMMITS if keeps_commits else _FORGETS_COMMITS
        self._settings = {**_SETTINGS, **kept, **(settings or {})}
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def url(self) -> str:
        """For `sql_engine`."""
        return f"mysql+aiomysql://{_USER}@localhost/test?unix_socket={self._socket}"

    def start(self) -> None:
        """Make a database, start the server, and wait until it answers."""
        assert self._process is None, "the server runs already"
        self.folder = Path(tempfile.mkdtemp(prefix="idem-mariadb-"))
        try:
            self._make()
            self.start_again()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, with the connections it has, and forget its data.  Does nothing if it never ran."""
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
        """End it at once and keep its data; `start_again` brings it back."""
        process, self._process = self._process, None
        assert process is not None, "the server does not run"
        process.kill()
        process.wait(_STOP_SECONDS)

    def start_again(self) -> None:
        """Start it on the data that it had."""
        program = _program("mariadbd")
        assert program is not None, missing_programs()
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        first = (self.folder / "first.sql").absolute()
        self._told = len(self.log())
        places = [f"--datadir={self._data}", f"--socket={self._socket}", f"--pid-file={self.folder / 'pid'}"]
        options = ["--no-defaults", *_base(program), *self._as_user(), *places, f"--init-file={first}"]
        self._process = self._run(str(program), *options, *settings)
        self._await_ready()

    def log(self) -> str:
        """What the server wrote."""
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
                # A server that starts deletes what it finds in a common folder for temporary tables: one that another
                # bootstraps crashes then.
                env=os.environ | {"TMPDIR": str(self.folder)},
                # Of its own: Ctrl-C at the tests must not end the server before its clients.
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            if "ready for connections" in self.log()[self._told :]:
                return
            time.sleep(0.02)
        raise RuntimeError(f"mariadbd did not start:\n{self.log()}")
