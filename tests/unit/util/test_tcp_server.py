"""Connections that arrive while their server closes."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest
from prometheus_client import CollectorRegistry

from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.worker.health import Health
from tests.support.conditions import eventually
from tests.support.listening import accept_no_more


async def connect(port: int) -> socket.socket:
    """Open a connection that the loop has accepted, but not yet handed to the server."""
    client = socket.create_connection(("127.0.0.1", port))
    await asyncio.sleep(0)  # the loop notices the connection
    await asyncio.sleep(0)  # the loop accepts it
    client.settimeout(5)
    return client


async def test_a_connection_accepted_during_shutdown_reaches_the_server() -> None:
    served: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: served.append(writer), "127.0.0.1", 0)

    with await connect(server.sockets[0].getsockname()[1]):
        assert not served
        await accept_no_more(server.sockets)
        server.close()
        (writer,) = served
        writer.close()
        await writer.wait_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # also raised in Python 3.13
async def test_asyncio_alone_leaks_a_connection_accepted_during_shutdown() -> None:
    server = await asyncio.start_server(lambda *_: pytest.fail("served"), "127.0.0.1", 0)
    with await connect(server.sockets[0].getsockname()[1]):
        server.close()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for _ in range(10):
                await asyncio.sleep(0)
            gc.collect()

    assert "unclosed transport" in " ".join(str(each.message) for each in caught)


async def test_endpoints_close_a_connection_accepted_during_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = Endpoints("127.0.0.1", 0, health=lambda: Health(()), registry=CollectorRegistry())
    clients: list[socket.socket] = []

    async def end_with_a_connection(tick: int) -> bool:
        clients.append(await connect(endpoints.port))
        return True

    async with endpoints:
        monkeypatch.setattr(endpoints._server, "on_tick", end_with_a_connection)
        await eventually(lambda: clients)

    with clients[0] as client:
        assert client.recv(1) == b""
