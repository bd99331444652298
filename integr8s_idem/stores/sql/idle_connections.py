"""Connections that nobody used for a while are looked at before they are used again.

A look is a round trip or more, so a busy pool must not pay it at each call.  What ends a connection without a word, a
firewall say, does so after minutes; and of a server that stops we are told, if we listen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError, InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

LONGEST_UNSEEN: Final = 1.0
"""Seconds in the pool after which a connection is looked at."""

_SINCE: Final = "integr8s_idem_idle_since"


def look_at_idle(engine: AsyncEngine, has_ended: Callable[[Any], bool]) -> None:
    """Have the pool give out connections that live.  `has_ended`: what the driver's connection was told of its end."""
    dialect = engine.dialect

    @event.listens_for(engine.sync_engine, "checkin")
    def _note(_connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info[_SINCE] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _look(connection: Any, entry: ConnectionPoolEntry, _given: Any) -> None:
        if has_ended(entry.driver_connection):
            raise DisconnectionError("the server has ended the connection")
        since = entry.info.pop(_SINCE, None)
        if since is None or time.monotonic() - since < LONGEST_UNSEEN:
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            if not dialect.is_disconnect(error, connection, None):
                raise
            # The others have lain there for as long, or will be missed by nobody.
            raise InvalidatePoolError from error
