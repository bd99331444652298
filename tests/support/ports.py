"""Loopback ports for servers that cannot choose one themselves, or that must keep it while they are down."""

from __future__ import annotations

import socket
import sys
from typing import Final

_RESERVED: Final[list[socket.socket]] = []


def reserve_port(below: int = 65_536) -> int:
    """Return a port below `below` that the system chooses for nobody else until this process ends.

    A socket remains bound to it without listening.  On Linux, a server can listen beside it, since servers set
    `SO_REUSEADDR`, while port 0 and outgoing connections avoid it, and connections are refused while no server listens.
    A port that is only free can be taken before its server starts, or connect to itself.
    """
    while True:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        if sys.platform == "linux":
            _RESERVED.append(held)
        else:
            held.close()
        if port < below:
            return port
