"""The TCP front of the embedded Kafka: takes every connection, answers for groups, hands the rest on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading

from integr8s_idem.embedded.groups import Groups
from integr8s_idem.embedded.wire import Coordinator, Request
from integr8s_idem.listening import accept_no_more

_log = logging.getLogger(__name__)

_SIZE = struct.Struct(">i")
_LARGEST_FRAME = 128 * 1024 * 1024


class Front:
    """Serves in a thread of its own, so that a blocked event loop of the application does not stop the broker."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listening.getsockname()
        self._loop = asyncio.new_event_loop()
        self._clients: set[asyncio.Task[None]] = set()
        self._groups = Groups()
        self._coordinator = Coordinator(self._groups, self.host, self.port)
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded-kafka", daemon=True)

    def start(self) -> None:
        """From now on connections are answered."""
        self._thread.start()
        self._serving.wait()  # a loop that is stopped before it serves would never be closed

    def stop(self) -> None:
        """Close every connection; returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._take, sock=self._listening))
        self._loop.call_soon(self._serving.set)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close(server))
            self._loop.close()

    async def _close(self, server: asyncio.Server) -> None:
        await accept_no_more(server.sockets)
        server.close()
        self._groups.close()
        # The loop is ours alone: what goes on within it serves a client.
        while under_way := asyncio.all_tasks() - {asyncio.current_task()}:
            for client in self._clients:
                client.cancel()
            await asyncio.wait(under_way)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.debug("a client of the embedded Kafka hung up")
        except (struct.error, ValueError, KeyError):
            _log.exception("the embedded Kafka does not understand a client, and hangs up")
        finally:
            await _hang_up(writer)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        try:
            while True:
                request = Request.read(await _read_frame(reader))
                answer = await self._coordinator.answer(request)
                if answer is None:
                    await _write_frame(upstream_writer, request.for_emulator)
                    answer = self._coordinator.mend(request, await _read_frame(upstream_reader))
                if request.wants_answer:
                    await _write_frame(writer, answer)
        finally:
            await _hang_up(upstream_writer)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    if not 0 < size <= _LARGEST_FRAME:
        raise ConnectionError(f"a frame of {size} bytes is none of Kafka's")
    return await reader.readexactly(size)


async def _write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(_SIZE.pack(len(frame)) + frame)
    await writer.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
