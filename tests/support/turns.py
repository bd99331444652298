"""A proxy that counts round trips between a client and a server.

    async with TurnCounter(server.address) as counter:
        client = connect(counter.port)
        ...
        assert counter.turns == 1

A turn starts when a client sends something after an answer, or for the first time. A pipeline is therefore one turn,
and a statement that is prepared before it is executed is two, in any protocol.
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
    """Listens on a free port of 127.0.0.1 and forwards everything to `target`.

    Args:
        target: The server's address.
        strangers: Connections whose first bytes contain this are forwarded, but not counted.
    """

    def __init__(self, target: Address, *, strangers: bytes | None = None) -> None:
        self.turns = 0
        self.requests = bytearray()
        """What clients have sent, except strangers."""
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
    """A connection."""

    def __init__(self, counter: TurnCounter, strangers: bytes | None) -> None:
        self._counter = counter
        self._strangers = strangers
        self._counts: bool | None = None
        """Unknown before the first bytes."""
        self._heard = True

    async def requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self._counts is None:
                self._counts = self._strangers is None or self._strangers not in data
            self._counter.turns += self._counts and self._heard
            self._heard = False
            if self._counts:
                self._counter.requests += data
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
