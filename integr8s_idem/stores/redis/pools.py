"""A connection pool that reuses recently used connections without checking them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, Final

from redis.asyncio.connection import BlockingConnectionPool

from integr8s_idem.stores.redis.direct_exchange import DirectExchange, direct_exchange

KEPT: Final = 4
"""Ready connections: one for each kind of call that a busy worker runs at the same time."""

FRESH_SECONDS: Final = 1.0
"""A connection used this recently is not checked; others are, as the driver does every time."""


class ReadyConnection:
    """A connection that is kept ready for a loop, with its exchange, if it has one."""

    __slots__ = ("connection", "exchange", "loop", "since")

    def __init__(self, connection: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.loop = loop
        self.exchange: DirectExchange | None = None
        self.since = 0.0
        """When it was last used, by `time.monotonic`."""

    def attached(self) -> DirectExchange | None:
        """Attach an exchange to the connection; `None` if the driver's own methods are to be used."""
        self.detached()
        self.exchange = direct_exchange(self.connection, self.loop)
        return self.exchange

    def detached(self) -> Any:
        """Return the connection for use by the driver."""
        if self.exchange is not None:
            self.exchange.detach()
            self.exchange = None
        return self.connection


class QuickPool(BlockingConnectionPool):
    """A blocking pool that keeps a few connections ready, since the checks of the driver cost as much as a call.

    If a ready connection has died within a second, its next call fails and is retried.  Ready connections count as
    in use; they are returned to the pool when a caller waits for a connection.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ready: list[ReadyConnection] = []
        self._waiting = 0

    def take_ready(self, loop: asyncio.AbstractEventLoop) -> ReadyConnection | None:
        """Return a connection that was used in `loop` a moment ago, without waiting; `None` if there is none."""
        if not self._ready:
            return None
        ready = self._ready[-1]
        if ready.loop is not loop or monotonic() - ready.since >= FRESH_SECONDS:
            return None
        # Not usable: the server has closed the connection, or has sent something that nobody requested.
        return None if ready.exchange is not None and not ready.exchange.is_usable else self._ready.pop()

    def keep_ready(self, ready: ReadyConnection) -> bool:
        """Keep a connection for the next `take_ready`; `False` if it must be released."""
        connection = ready.connection
        if self._waiting or len(self._ready) >= KEPT:
            return False
        # `take_ready` asks the exchange, if there is one.
        if ready.exchange is None and not connection.is_connected:
            return False
        # Whether the driver wants to replace the connection; older drivers never do.
        if getattr(connection, "should_reconnect", bool)():
            return False
        ready.since = monotonic()
        self._ready.append(ready)
        return True

    async def get_connection(self, *names: Any, **options: Any) -> Any:
        if (ready := self.take_ready(asyncio.get_running_loop())) is not None:
            return ready.detached()
        while self._ready:  # the most recent one must be checked
            await super().release(self._ready.pop().detached())
        self._waiting += 1
        try:
            return await super().get_connection(*names, **options)  # type: ignore[no-untyped-call]
        finally:
            self._waiting -= 1

    async def release(self, connection: Any) -> None:
        if not self.keep_ready(ReadyConnection(connection, asyncio.get_running_loop())):
            await super().release(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Disconnect all connections, treating ready ones as not in use."""
        while self._ready:
            await super().release(self._ready.pop().detached())
        await super().disconnect(inuse_connections)
