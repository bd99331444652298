"""Loopback ports for servers that cannot choose one themselves, or that must keep it while they are down."""

from __future__ import annotations

import socket
import sys
from typing import Final

_RESERVED: Final[list[socket.socket]] = []
_LARGEST: Final = 65_535


def reserve_port(beside: int = 0) -> int:
    """Return a port that the system chooses for nobody else until this process ends.

    A socket remains bound to it without listening.  On Linux, a server can listen beside it, since servers set
    `SO_REUSEADDR`, while port 0 and outgoing connections avoid it, and connections are refused while no server listens.
    A port that is only free can be taken before its server starts, or connect to itself.

    Args:
        beside: Distance to a second port that the server needs, which is reserved too.
    """
    while True:
        held = _bind(0)
        port: int = held.getsockname()[1]
        sockets = [held]
        try:
            if beside:
                if port + beside > _LARGEST:
                    raise OSError(f"port {port} is too high")
                sockets.append(_bind(port + beside))
        except OSError:
            # Another port may do.  This socket is kept until the process ends, so that the system does not repeat it.
            _RESERVED.append(held)
            continue
        for each in sockets:
            _keep(each)
        return port


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


def _keep(bound: socket.socket) -> None:
    """Let a server listen on the port of a socket, and nobody else bind it by chance."""
    if sys.platform == "linux":
        # Not before it was bound: two sockets with this option may share a port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _RESERVED.append(bound)
    else:
        bound.close()
