"""How a server stops taking connections without losing one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

_TURNS: Final = 10
"""Of the loop: what was accepted is a connection, with its task, after three."""


class _Listening(Protocol):
    def fileno(self) -> int: ...


async def accept_no_more(sockets: Iterable[_Listening]) -> None:
    """Return once each connection that was accepted is known to its server, which may be closed then.

    A server of asyncio that is closed between accepting and making a connection leaves that open, until the garbage
    collector finds it and warns of a socket that was never closed (seen with Python 3.11).  uvloop makes the
    connection as it accepts it.

    Args:
        sockets: On which the servers of the running event loop listen; they stay open.
    """
    loop = asyncio.get_running_loop()
    for listening in sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
