"""A pool that hands a connection on without a look at it, if it was used a moment ago."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from redis.asyncio.connection import BlockingConnectionPool

KEPT: Final = 4
"""Connections at hand: one for each verb that a busy worker has under way."""

FRESH_SECONDS: Final = 1.0
"""A connection that was used so lately is taken as it is; another one is looked at, as the driver does each time."""


class QuickPool(BlockingConnectionPool):
    """As the driver's, of which taking and giving back costs as much as a call of the store.

    A connection that has died within a second shows that at its use, and the call is repeated.  Connections at
    hand count as in use; they are given up when somebody waits for one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._at_hand: list[tuple[Any, asyncio.AbstractEventLoop, float]] = []
        self._waiting = 0

    async def get_connection(self, *names: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        while self._at_hand:
            connection, of, since = self._at_hand.pop()
            if of is loop and loop.time() - since < FRESH_SECONDS:
                return connection
            await super().release(connection)
        self._waiting += 1
        try:
            return await super().get_connection(*names, **options)  # type: ignore[no-untyped-call]
        finally:
            self._waiting -= 1

    async def release(self, connection: Any) -> None:
        if self._waiting or len(self._at_hand) >= KEPT or not connection.is_connected or _is_to_go(connection):
            await super().release(connection)
        else:
            loop = asyncio.get_running_loop()
            self._at_hand.append((connection, loop, loop.time()))

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """As the driver's: those at hand are not in use."""
        while self._at_hand:
            await super().release(self._at_hand.pop()[0])
        await super().disconnect(inuse_connections)


def _is_to_go(connection: Any) -> bool:
    """Whether the driver wants to replace it; older drivers never do."""
    return bool(getattr(connection, "should_reconnect", bool)())
