"""The TCP front of the embedded Kafka: serves consumer groups itself, and forwards other requests to the emulator."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from integr8s_idem._util.tcp_server import Acceptor, Connections
from integr8s_idem.embedded.consumer_groups import Groups
from integr8s_idem.embedded.kafka_wire import Coordinator, Request

_log = logging.getLogger(__name__)

_SIZE = struct.Struct(">i")
_LARGEST_FRAME = 128 * 1024 * 1024

FIRST_REQUEST_SECONDS: Final = 10.0
"""Timeout for the first request of a connection."""

FRAME_SECONDS: Final = 60.0
"""Timeout for receiving the rest of a request."""

MAX_CONNECTIONS: Final = 1_000
"""Maximum number of connections.  Beyond it, the oldest is closed, preferably one without a request."""

_BACKLOG: Final = 1_024


_Take: TypeAlias = "Callable[[_Client, asyncio.StreamReader, asyncio.StreamWriter], None]"


class Front:
    """Serves in a separate thread, so that a blocked event loop of the application does not block the broker."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()
        self._loop = asyncio.new_event_loop()
        self._open = Connections(MAX_CONNECTIONS)
        self._acceptor = Acceptor(self._listening, self._protocol, self._open, "the embedded Kafka")
        self._clients: set[asyncio.Task[None]] = set()
        self._groups = Groups()
        self._coordinator = Coordinator(self._groups, self.host, self.port)
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded-kafka", daemon=True)

    def start(self) -> None:
        """Start serving connections."""
        self._thread.start()
        self._serving.wait()  # a loop that is stopped before it runs is never closed

    def stop(self) -> None:
        """Close all connections, and wait for the thread to end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._begin)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close())
            self._loop.close()

    def _begin(self) -> None:
        self._acceptor.start()
        self._serving.set()

    async def _close(self) -> None:
        await self._acceptor.stop()
        self._listening.close()
        self._groups.close()
        # All tasks of this loop serve clients.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for client in self._clients:
                client.cancel()
            await asyncio.wait(tasks)

    def _protocol(self) -> _Client:
        return _Client(self._open, self._take, self._loop)

    def _take(self, client: _Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(client, reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, client: _Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(FIRST_REQUEST_SECONDS):
                first = await _read_frame(reader)
            client.is_waiting = False
            await self._talk(first, reader, writer)
        except (asyncio.IncompleteReadError, OSError) as error:
            _log.debug("a client of the embedded Kafka disconnected or timed out: %r", error)
        except (struct.error, ValueError, KeyError):
            _log.exception("the embedded Kafka received an invalid request, and closes the connection")
        finally:
            await _disconnect(writer)

    async def _talk(self, frame: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        try:
            while True:
                request = Request.read(frame)
                answer = await self._coordinator.answer(request)
                if answer is None:
                    await _write_frame(upstream_writer, request.for_emulator)
                    answer = self._coordinator.rewrite(request, await _read_frame(upstream_reader))
                if request.wants_answer:
                    await _write_frame(writer, answer)
                frame = await _read_frame(reader)
        finally:
            await _disconnect(upstream_writer)


class _Client(asyncio.StreamReaderProtocol):
    """One connection of a client; `take` serves it."""

    def __init__(self, connections: Connections, take: _Take, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(asyncio.StreamReader(loop=loop), partial(take, self), loop=loop)
        self._connections = connections
        self.is_waiting = True
        """Whether the client has not sent a request yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.abort = transport.abort
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(exc)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if not 0 < size <= _LARGEST_FRAME:
        raise ConnectionError(f"invalid size of a Kafka request: {size} bytes")
    async with asyncio.timeout(FRAME_SECONDS):
        return await reader.readexactly(size)


async def _write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(_SIZE.pack(len(frame)) + frame)
    await writer.drain()


async def _disconnect(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
