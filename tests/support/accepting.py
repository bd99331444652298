"""A server whose connections are all gone when it is closed, those that have just been accepted as well.

What asyncio offers leaves open what it accepted a moment before the end, and a task that is cancelled before it has
begun closes nothing: such a socket would be told as unclosed in some later test.
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
"""Of the loop: a socket that is aborted is closed in the next one."""


class Acceptor:
    """Runs `serve` for each connection, and aborts that when it ends.  Cancellation comes from `close` alone."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._open: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, asyncio.WriteTransport]] = {}
        """The writers too: one that is forgotten before its end says that it is unclosed."""
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "it was not started"
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        """On a free port of loopback."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, listening: socket.socket | None = None) -> None:
        """Accept connections to `listening`; without one, to a free port of loopback."""
        if listening is None:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        elif listening.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._take, sock=listening)
        else:
            self._server = await asyncio.start_server(self._take, sock=listening)

    async def close(self) -> None:
        """End all; when this returns every socket is closed."""
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
        bare.abort()  # below TLS, if that was begun since
        error = None if task.cancelled() else task.exception()
        if error is not None:
            told = {"message": "a connection's server failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(told)
