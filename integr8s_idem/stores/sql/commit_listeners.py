"""Who looks on, for a while, when transactions of the application's are about to commit.

To listen to one connection and to leave off takes SQLAlchemy as long as half a statement.  So its engine is listened
to, once, and those who look on are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

Look: TypeAlias = Callable[[Connection], None]

_engines: Final[WeakSet[Engine]] = WeakSet()
_looks: Final[WeakKeyDictionary[Connection, list[Look]]] = WeakKeyDictionary()


@contextmanager
def watching(connection: Connection, look: Look) -> Iterator[None]:
    """Within the block `look` is called before each COMMIT of `connection`; what it raises is raised instead."""
    engine = connection.engine
    if engine not in _engines:
        event.listen(engine, "commit", _committing)
        _engines.add(engine)
    looks = _looks.setdefault(connection, [])
    looks.append(look)
    try:
        yield
    finally:
        looks.remove(look)
        if not looks:
            del _looks[connection]


def _committing(connection: Connection) -> None:
    for look in list(_looks.get(connection, ())):
        look(connection)
