"""Stop accepting connections without losing one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

_TURNS: Final = 10
"""Iterations of the event loop: an accepted socket becomes a connection with a task after three."""


class _Listening(Protocol):
    def fileno(self) -> int: ...


async def accept_no_more(sockets: Iterable[_Listening]) -> None:
    """Return once every accepted connection is known to its server, which can be closed then.

    If an asyncio server is closed between accepting a socket and creating its connection, the socket stays open until
    the garbage collector reports it as unclosed (seen with Python 3.11). uvloop creates the connection immediately.

    Args:
        sockets: The listening sockets of servers in the running event loop; they stay open.
    """
    loop = asyncio.get_running_loop()
    for listening in sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
