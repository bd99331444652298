"""Temporary listeners for the commits of the application's connections.

Adding and removing a SQLAlchemy listener on a connection costs half as much as a statement.  So this module listens to
each engine once and keeps its own registry of listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

Listener: TypeAlias = Callable[[Connection], None]

_engines: Final[WeakSet[Engine]] = WeakSet()
_listeners: Final[WeakKeyDictionary[Connection, list[Listener]]] = WeakKeyDictionary()


@contextmanager
def before_commit(connection: Connection, listener: Listener) -> Iterator[None]:
    """Call `listener` before each COMMIT of `connection` within the block; an exception it raises stops the commit."""
    engine = connection.engine
    if engine not in _engines:
        event.listen(engine, "commit", _on_commit)
        _engines.add(engine)
    listeners = _listeners.setdefault(connection, [])
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
        if not listeners:
            del _listeners[connection]


def _on_commit(connection: Connection) -> None:
    for listener in list(_listeners.get(connection, ())):
        listener(connection)
