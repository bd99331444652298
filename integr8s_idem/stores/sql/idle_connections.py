"""Ping pooled connections that have been idle for a while before reusing them.

A ping costs at least one round trip, so a busy pool must not send one for each call.  Firewalls and the like drop
connections silently only after minutes of inactivity, and a server that shuts down notifies the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError, InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

MAX_IDLE_SECONDS: Final = 1.0
"""Seconds in the pool after which a connection is pinged."""

_IDLE_SINCE: Final = "integr8s_idem_idle_since"


def ping_idle_connections(engine: AsyncEngine, is_closed: Callable[[Any], bool]) -> None:
    """Make the pool of `engine` check connections before it hands them out.

    Args:
        is_closed: Whether the driver already knows that its connection is closed.
    """
    dialect = engine.dialect

    @event.listens_for(engine.sync_engine, "checkin")
    def _record_checkin(_connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info[_IDLE_SINCE] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _check(connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:
        if is_closed(entry.driver_connection):
            raise DisconnectionError("the server has closed the connection")
        idle_since = entry.info.pop(_IDLE_SINCE, None)
        if idle_since is None or time.monotonic() - idle_since < MAX_IDLE_SECONDS:
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            if not dialect.is_disconnect(error, connection, None):
                raise
            # The other connections have been idle for as long, and replacing a live one is cheap.
            raise InvalidatePoolError from error
