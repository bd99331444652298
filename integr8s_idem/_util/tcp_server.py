"""Accept a limited number of TCP connections in the event loop, even if the process is out of file descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE: Final = 10
"""Connections accepted per iteration of the event loop, so that open ones are served in between."""

PAUSE: Final = 0.1
"""Pause in seconds if the system refuses new connections and there is no connection to close."""

LOG_INTERVAL: Final = 60.0
"""Seconds between two log lines about refused connections."""


class Connection(Protocol):
    """One open connection."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its client, and is therefore closed first."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """The open connections of one server, oldest first.

    Args:
        most: The maximum; one more closes the oldest connection that waits for its client, or else the oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Add a new connection."""
        while len(self._open) >= self._most:
            self.close_oldest()
        self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)

    def close_oldest(self) -> bool:
        """Close the oldest connection that waits for its client, or else the oldest; return whether there was one."""
        oldest = next((each for each in self._open if each.is_waiting), next(iter(self._open), None))
        if oldest is None:
            return False
        self.discard(oldest)
        oldest.abort()
        return True


class Acceptor:
    """Accepts the connections of a listening socket, which it does not close.

    Servers of asyncio log each failure to accept, up to a hundred per iteration of the event loop, and then stop
    accepting for a second; and closing one between accepting and connecting leaks a socket (seen in Python 3.11).

    Args:
        listening: A non-blocking socket.
        protocol: Creates the protocol of a connection, which adds itself to `connections` and removes itself.
        connections: The open connections, of which some are closed if the process is out of descriptors.
        what: Name of the server for log messages.
    """

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], connections: Connections, what: str
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._connections = connections
        self._what = what
        self._connecting: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._next_log = 0.0

    def start(self) -> None:
        """Start accepting connections in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listening, self._accept)

    async def stop(self) -> None:
        """Stop accepting, and wait until all accepted connections have a protocol."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listening)
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has already disconnected
            except OSError as error:
                self._refused(error)
                return
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            connection.close()
            logger.debug("%s: a client disconnected at once: %s", self._what, error)

    def _refused(self, error: OSError) -> None:
        """Close an open connection; without one, try again later."""
        if not self._connections.close_oldest():
            self._loop.remove_reader(self._listening)
            self._resuming = self._loop.call_later(PAUSE, self.start)
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            logger.warning(
                "%s cannot accept all connections: %s. It closes those that wait for their clients; if the process is "
                "out of file descriptors, raise its limit (ulimit -n)",
                self._what,
                error.strerror,
            )
