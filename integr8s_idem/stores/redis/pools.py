"""A connection pool that reuses recently used connections without checking them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, Final

from redis.asyncio.connection import BlockingConnectionPool

KEPT: Final = 4
"""Ready connections: one for each kind of call that a busy worker runs at the same time."""

FRESH_SECONDS: Final = 1.0
"""A connection used this recently is not checked; others are, as the driver does every time."""


class QuickPool(BlockingConnectionPool):
    """A blocking pool that keeps a few connections ready, since the checks of the driver cost as much as a call.

    If a ready connection has died within a second, its next call fails and is retried.  Ready connections count as
    in use; they are returned to the pool when a caller waits for a connection.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ready: list[tuple[Any, asyncio.AbstractEventLoop, float]] = []
        self._waiting = 0

    def take_ready(self, loop: asyncio.AbstractEventLoop) -> Any | None:
        """Return a connection that was used in `loop` a moment ago, without waiting; `None` if there is none."""
        if not self._ready:
            return None
        connection, owner_loop, since = self._ready[-1]
        if owner_loop is not loop or monotonic() - since >= FRESH_SECONDS:
            return None
        self._ready.pop()
        return connection

    def keep_ready(self, connection: Any, loop: asyncio.AbstractEventLoop) -> bool:
        """Keep a connection for the next `take_ready` in `loop`; `False` if it must be released."""
        if self._waiting or len(self._ready) >= KEPT or not connection.is_connected:
            return False
        # Whether the driver wants to replace the connection; older drivers never do.
        if getattr(connection, "should_reconnect", bool)():
            return False
        self._ready.append((connection, loop, monotonic()))
        return True

    async def get_connection(self, *names: Any, **options: Any) -> Any:
        if (ready := self.take_ready(asyncio.get_running_loop())) is not None:
            return ready
        while self._ready:  # the most recent one is too old already
            await super().release(self._ready.pop()[0])
        self._waiting += 1
        try:
            return await super().get_connection(*names, **options)  # type: ignore[no-untyped-call]
        finally:
            self._waiting -= 1

    async def release(self, connection: Any) -> None:
        if not self.keep_ready(connection, asyncio.get_running_loop()):
            await super().release(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Disconnect all connections, treating ready ones as not in use."""
        while self._ready:
            await super().release(self._ready.pop()[0])
        await super().disconnect(inuse_connections)
