"""A proxy before a Redis server that loses answers on order."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class LossyProxy:
    """Passes bytes on between a Unix socket of its own and the server's.

    After `lose(command)` the next answer to a request that holds `command` is thrown away
    and its connection cut: the server has executed it, the client does not know.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder = tempfile.TemporaryDirectory(prefix="idem-proxy-")
        self._wanted = b""
        self._links: set[asyncio.Task[None]] = set()
        self.lost = 0

    @property
    def url(self) -> str:
        return f"unix://{self._folder.name}/proxy.sock?db=0"

    def lose(self, command: str) -> None:
        self._wanted = command.encode()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, f"{self._folder.name}/proxy.sock")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        self._folder.cleanup()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        try:
            await self._relay(reader, writer, server_reader, server_writer)
        except asyncio.CancelledError:
            # Only the end of the test cancels: nobody waits for more.
            return
        finally:
            for end in (writer, server_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        while request := await reader.read(1 << 20):
            server_writer.write(request)
            answer = await server_reader.read(1 << 20)
            if self._wanted and self._wanted in request:
                self._wanted = b""
                self.lost += 1
                return
            writer.write(answer)
