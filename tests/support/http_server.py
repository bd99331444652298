"""A real HTTP server in the event loop of the test, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from tests.support.listening import accept_no_more


class _Server(uvicorn.Server):
    """A server that installs no signal handlers."""

    @asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        serving = asyncio.create_task(self._serve([listener]))
        try:
            yield
        finally:
            await accept_no_more([listener])
            self.should_exit = True
            await serving


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve `app` and yield its port; connections made before the server accepts wait in the socket."""
    config = uvicorn.Config(app, ws="none", log_config=None, timeout_graceful_shutdown=10, **options)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        listener.setblocking(False)
        async with _Server(config).running(listener):
            yield int(listener.getsockname()[1])


@asynccontextmanager
async def client_of(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `app` and yield a client for it."""
    async with (
        serving(app, **options) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        yield client
