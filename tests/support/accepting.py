"""A server that closes all its connections when it is closed, including those just accepted.

asyncio's own server leaves connections open that it accepted just before it was closed, and a task that is cancelled
before it starts closes nothing. A later test would then report such a socket as unclosed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, TypeAlias

from tests.support.listening import accept_no_more

Serve: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_TURNS: Final = 3
"""Iterations of the event loop; an aborted socket is closed in the next iteration."""


class Acceptor:
    """Runs `serve` for each connection, and aborts the connection afterwards. Only `close` cancels `serve`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._open: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, asyncio.WriteTransport]] = {}
        """Includes the writers: a writer that is garbage-collected while open warns that it is unclosed."""
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "the server was not started"
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        """Start on a free loopback port."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, listening: socket.socket | None = None) -> None:
        """Accept connections on `listening`, or on a free loopback port."""
        if listening is None:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        elif listening.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._take, sock=listening)
        else:
            self._server = await asyncio.start_server(self._take, sock=listening)

    async def close(self) -> None:
        """End all connections; every socket is closed when this returns."""
        if self._server is None or not self._server.is_serving():
            return
        await accept_no_more(self._server.sockets)
        self._server.close()
        for task in self._open:
            task.cancel()
        while self._open:
            await asyncio.wait(self._open)
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._served(reader, writer))
        self._open[task] = writer, writer.transport
        task.add_done_callback(self._ended)

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        writer, bare = self._open.pop(task)
        writer.transport.abort()
        bare.abort()  # the transport below TLS, if TLS was started since
        error = None if task.cancelled() else task.exception()
        if error is not None:
            context = {"message": "serving a connection failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)
