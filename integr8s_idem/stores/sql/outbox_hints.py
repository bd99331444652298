"""Hear of messages that other processes have committed.  Only a hint: relays also look at the outbox regularly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.stores.sql.outbox_rows import CHANNEL

_log: Final = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 30.0
"""Delay before connecting again."""


def has_hints(engine: AsyncEngine) -> bool:
    """Whether the database and its driver report commits of other processes."""
    return engine.dialect.name == "postgresql" and engine.dialect.driver == "asyncpg"


async def hear_hints(engine: AsyncEngine, notice: Callable[[], None]) -> None:
    """Call `notice` when a transaction of any process has committed messages, until cancelled.

    It has a connection of its own.  While there is none, as during a restart of the server, nothing is heard.
    """
    while True:
        try:
            await _listen(engine, notice)
        except Exception as error:  # noqa: BLE001 -- SQLAlchemy's, asyncpg's or the network's; relays work without hints
            _log.warning("no notifications of the outbox: %s: %s", type(error).__name__, error)
        await asyncio.sleep(_PAUSE_SECONDS)


async def _listen(engine: AsyncEngine, notice: Callable[[], None]) -> None:
    """Listen until the connection is lost."""
    lost = asyncio.Event()
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        # Give its place in the pool back: those are for the calls of the store.
        await connection.run_sync(Connection.detach)
        driver.add_termination_listener(lambda _: lost.set())
        await driver.add_listener(CHANNEL, lambda *_: notice())
        notice()  # messages may have been committed before this connection listened
        await lost.wait()
