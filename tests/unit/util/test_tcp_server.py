"""Connections that arrive in the moment in which their server closes."""

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


async def come(port: int) -> socket.socket:
    """A connection that has been accepted, and that no server knows of."""
    client = socket.create_connection(("127.0.0.1", port))
    await asyncio.sleep(0)  # now the loop hears of it
    await asyncio.sleep(0)  # now it is accepted
    client.settimeout(5)
    return client


async def test_a_connection_that_has_just_been_accepted_reaches_the_server_that_closes() -> None:
    served: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: served.append(writer), "127.0.0.1", 0)

    with await come(server.sockets[0].getsockname()[1]):
        assert not served
        await accept_no_more(server.sockets)
        server.close()
        (writer,) = served
        writer.close()
        await writer.wait_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python 3.13 stumbles over it, too
async def test_asyncio_by_itself_loses_it() -> None:
    server = await asyncio.start_server(lambda *_: pytest.fail("served"), "127.0.0.1", 0)
    with await come(server.sockets[0].getsockname()[1]):
        server.close()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ResourceWarning)
            for _ in range(10):
                await asyncio.sleep(0)
            gc.collect()

    assert "unclosed transport" in " ".join(str(each.message) for each in told)


async def test_endpoints_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = Endpoints("127.0.0.1", 0, health=lambda: Health(()), registry=CollectorRegistry())
    came: list[socket.socket] = []

    async def end_with_a_connection(tick: int) -> bool:
        came.append(await come(endpoints.port))
        return True

    async with endpoints:
        monkeypatch.setattr(endpoints._server, "on_tick", end_with_a_connection)
        await eventually(lambda: came)

    with came[0] as client:
        assert client.recv(1) == b""
