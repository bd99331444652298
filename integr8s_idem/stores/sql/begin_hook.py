"""Call a function at the beginning of each transaction of an engine, as a listener for `begin` would.

Such a listener must not raise an error: SQLAlchemy's connection would never begin a transaction by itself again.  Each
later statement would commit on its own, or never, depending on the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

_BEGINNING: Final = "integr8s_idem_beginning"
"""Key of the connection that begins a transaction, in its own `info`."""


def call_at_begin(engine: AsyncEngine, begin: Callable[[Connection], None]) -> None:
    """Call `begin` when a connection of `engine` begins a transaction.

    After an error of `begin`, the connection is in no transaction, and its next statement begins one.
    """

    def _note(connection: Connection) -> None:
        connection.info[_BEGINNING] = connection

    def _do_begin(pooled: Any) -> None:
        begin(pooled.info.pop(_BEGINNING))

    event.listen(engine.sync_engine, "begin", _note)
    dialect: Any = engine.dialect
    dialect.do_begin = _do_begin  # SQLAlchemy handles its errors, but is not prepared for those of listeners
