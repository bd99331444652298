"""The front of the embedded Kafka, stopped while clients come."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import ExitStack

import pytest

from integr8s_idem.embedded.tcp_front import Front
from tests.support.accepting import Acceptor

ROUNDS = 30
CLIENTS = 20


def connect(port: int, stack: ExitStack) -> None:
    """Ask for many connections, and wait for none."""
    for _ in range(CLIENTS):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_stopping_the_front_while_clients_connect_closes_all_sockets() -> None:
    for _ in range(ROUNDS):
        with socket.create_server(("127.0.0.1", 0)) as nobody, ExitStack() as stack:
            front = Front(nobody.getsockname())
            front.start()
            connect(front.port, stack)
            front.stop()

    gc.collect()  # pytest fails the test for what this finds open


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("turns", range(8))
def test_closing_an_acceptor_while_clients_connect_closes_all_sockets(turns: int) -> None:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        with ExitStack() as stack:
            acceptor = Acceptor(served)
            await acceptor.start()
            connect(acceptor.port, stack)
            for _ in range(turns):
                await asyncio.sleep(0)
            await acceptor.close()

    asyncio.run(main())
    gc.collect()
