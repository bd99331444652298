"""Accept TCP connections in the event loop: a bounded number of them, also when the process is out of descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE: Final = 10
"""Connections that are accepted in one turn of the event loop: the others are served in between."""

PAUSE: Final = 0.1
"""Seconds without accepting, where the system refuses to and no connection can be closed for another."""

LOG_INTERVAL: Final = 60.0
"""Seconds between two log lines about refused connections."""


class Connection(Protocol):
    """One open connection."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is waiting for its client, so that it may be closed first."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """The open connections of one server, oldest first.

    Args:
        most: How many there may be; one more closes the oldest that is waiting for its client, or else the oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Take in a new connection."""
        while len(self._open) >= self._most:
            self.close_oldest()
        self._open[connection] = None

    def discard(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._open.pop(connection, None)

    def close_oldest(self) -> bool:
        """Close the oldest connection that is waiting for its client, or else the oldest; whether there was one."""
        oldest = next((each for each in self._open if each.is_waiting), next(iter(self._open), None))
        if oldest is None:
            return False
        self.discard(oldest)
        oldest.abort()
        return True


class Acceptor:
    """Accepts the connections to one listening socket, which stays its caller's.

    asyncio's own servers log each failure to accept, a hundred in a turn of the event loop, and stop accepting for a
    second; and one that is closed between accepting and connecting leaves a socket open (seen with Python 3.11).

    Args:
        listening: Does not block.
        protocol: Makes the protocol of a connection, which adds itself to `connections` and removes itself.
        connections: Where room is made when the process is out of descriptors.
        what: What listens, for the log.
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
        """Accept from now on, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listening, self._accept)

    async def stop(self) -> None:
        """Accept no more; when this returns, each accepted connection has its protocol."""
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
                continue  # that client has already gone
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
            logger.debug("%s: a client hung up at once: %s", self._what, error)

    def _refused(self, error: OSError) -> None:
        """Make room; without any to make, try again later."""
        if not self._connections.close_oldest():
            self._loop.remove_reader(self._listening)
            self._resuming = self._loop.call_later(PAUSE, self.start)
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            logger.warning(
                "%s cannot accept all connections: %s. It closes those that wait for their clients; if the process is "
                "out of descriptors, raise its limit (ulimit -n)",
                self._what,
                error.strerror,
            )
