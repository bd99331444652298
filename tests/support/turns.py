"""How often a client waits for a server: a proxy that counts its turns to speak.

    async with TurnCounter(server.address) as counter:
        client = connect(counter.port)
        ...
        assert counter.turns == 1

A turn begins when a client says something after it has heard an answer, or for the first time: so a pipeline is one
turn, and a statement that is prepared before it is executed is two, whatever the protocol.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from tests.support.accepting import Acceptor
from tests.support.fault_proxy import Address

_CHUNK: Final = 1 << 16

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TurnCounter:
    """Listens on a free port of 127.0.0.1 and passes everything on to `target`.

    Args:
        target: The server's address.
        strangers: Connections whose first words hold this are passed on and not counted.
    """

    def __init__(self, target: Address, *, strangers: bytes | None = None) -> None:
        self.turns = 0
        self._target = target
        self._strangers = strangers
        self._acceptor = Acceptor(self._serve)

    @property
    def port(self) -> int:
        return self._acceptor.port

    async def __aenter__(self) -> Self:
        await self._acceptor.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._acceptor.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await _connect(self._target)
        try:
            await self._pass_on((reader, writer), server)
        finally:
            server[1].transport.abort()

    async def _pass_on(self, client: _Ends, server: _Ends) -> None:
        link = _Link(self, self._strangers)
        pumps = [
            asyncio.ensure_future(link.requests(client[0], server[1])),
            asyncio.ensure_future(link.answers(server[0], client[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


class _Link:
    """One connection."""

    def __init__(self, counter: TurnCounter, strangers: bytes | None) -> None:
        self._counter = counter
        self._strangers = strangers
        self._counts: bool | None = None
        """Unknown before the first words."""
        self._heard = True

    async def requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self._counts is None:
                self._counts = self._strangers is None or self._strangers not in data
            self._counter.turns += self._counts and self._heard
            self._heard = False
            writer.write(data)
            await writer.drain()

    async def answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            self._heard = True
            writer.write(data)
            await writer.drain()


async def _connect(target: Address) -> _Ends:
    if isinstance(target, int):
        return await asyncio.open_connection("127.0.0.1", target)
    return await asyncio.open_unix_connection(target)
