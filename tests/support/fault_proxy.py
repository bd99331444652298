"""A proxy for a server on a TCP port or Unix socket that injects network faults.

    async with FaultProxy(server.address) as proxy:
        client = connect(proxy.address)
        with proxy.fault(Delay(0.5)):
            ...
        swallowed = proxy.put(Cut(matching=b"EVALSHA"))   # the server executes it, the client gets no answer
        ...
        assert swallowed.struck == 1

The address is known as soon as the object is created, before the proxy and the server are started, so that a Kafka
broker can advertise it. Faults affect all connections and can be combined. The proxy knows no protocol: it treats the
bytes of one read as a request, which is correct for clients that wait for their answers.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

from tests.support.accepting import Acceptor

Address: TypeAlias = Path | int
"""Path of a Unix socket, or a port of 127.0.0.1."""

_CHUNK: Final = 1 << 16
_DRIP: Final = 20
"""Writes per second on a slow connection."""


class Way(Enum):
    """Direction of the bytes."""

    TO_SERVER = "requests"
    TO_CLIENT = "answers"


@dataclass(frozen=True)
class Delay:
    """Pass on each read after a delay in seconds."""

    seconds: float
    way: Way = Way.TO_CLIENT


@dataclass(frozen=True)
class Drip:
    """Limit each connection to a number of bytes per second, a few at a time."""

    bytes_per_second: float
    way: Way = Way.TO_CLIENT


@dataclass(frozen=True)
class Cut:
    """End the connection at a request that contains `matching`, after `after` bytes.

    `TO_CLIENT` counts the bytes of the answer: with 0, the server executes the request and the client gets no answer.
    `TO_SERVER` counts the bytes of the request: with 0, it never arrives.
    """

    matching: bytes = b""
    also: bytes = b""
    """A second text that the request must contain."""
    way: Way = Way.TO_CLIENT
    after: int = 0
    reset: bool = False
    """Whether to send RST instead of FIN; a Unix socket can only be closed."""
    times: int | None = 1
    """How often; `None` until the fault is removed."""
    every: int = 1
    """Affect only every n-th matching request."""
    chance: float = 1.0
    """Probability with which such a request is affected, drawn from `seed`."""
    seed: int = 0


@dataclass(frozen=True)
class Corrupt:
    """Flip bits of a byte on its way to the client, `offset` bytes after the start of `marker`.

    Without a marker, `offset` counts from the start of the next read.
    """

    marker: bytes = b""
    offset: int = 0
    mask: int = 0xFF
    times: int | None = 1


@dataclass(frozen=True)
class Stall:
    """Hold back all bytes while the fault is active, and pass them on afterwards."""


@dataclass(frozen=True)
class HalfOpen:
    """Connections that are used while the fault is active, and new ones, never pass anything again and stay open."""


@dataclass(frozen=True)
class Refuse:
    """Reset new connections immediately."""

    times: int | None = None


Fault: TypeAlias = Delay | Drip | Cut | Corrupt | Stall | HalfOpen | Refuse


@dataclass
class Placed:
    """An active fault."""

    fault: Fault
    struck: int = 0
    """How often the fault has occurred."""
    seen: int = 0
    chance: random.Random = field(default_factory=random.Random)

    def spent(self) -> bool:
        times = getattr(self.fault, "times", None)
        return times is not None and self.struck >= times


class FaultProxy:
    """Passes bytes between its address and `target`.

    Args:
        target: The server's address; it can be set or changed later, for new connections.
        listen: The address of the proxy. By default a free port, or a temporary Unix socket if the target is one.
    """

    def __init__(self, target: Address | None = None, *, listen: Address | None = None) -> None:
        self.target = target
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if listen is None and isinstance(target, Path):
            self._folder = tempfile.TemporaryDirectory(prefix="idem-proxy-")
            listen = Path(self._folder.name) / "proxy.sock"
        self._socket = bound(listen or 0)
        self.address: Address = listen if isinstance(listen, Path) else int(self._socket.getsockname()[1])
        self.accepted = 0
        """Number of connections so far."""
        self._placed: list[Placed] = []
        self._changed = asyncio.Event()
        self._links: set[_Link] = set()
        self._acceptor = Acceptor(self._serve)

    def put(self, fault: Fault) -> Placed:
        """Activate `fault`."""
        placed = Placed(fault)
        if isinstance(fault, Cut):
            placed.chance.seed(fault.seed)
        self._placed.append(placed)
        return placed

    def take_away(self, placed: Placed) -> None:
        if placed in self._placed:
            self._placed.remove(placed)
        self._wake()

    def heal(self) -> None:
        """Remove all faults."""
        self._placed.clear()
        self._wake()

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[Placed]:
        """Activate `fault` within the block."""
        placed = self.put(fault)
        try:
            yield placed
        finally:
            self.take_away(placed)

    async def hold(self, seconds: float) -> None:
        """Stall all connections for some seconds."""
        with self.fault(Stall()):
            await asyncio.sleep(seconds)

    def reset(self) -> None:
        """Send RST to both ends of every connection."""
        for link in self._links:
            link.sever(reset=True)

    async def start(self) -> Self:
        await self._acceptor.start(self._socket)
        return self

    async def close(self) -> None:
        await self._acceptor.close()
        self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Used by the connections.

    def active(self, kind: type) -> list[Placed]:
        return [placed for placed in self._placed if isinstance(placed.fault, kind) and not placed.spent()]

    async def change(self) -> None:
        """Return when a fault has been removed."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            await link.close()


class _Link:
    """A connection."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = reader, writer
        self._writers = [writer]
        self._cut: Placed | None = None
        """The fault that will end this connection."""
        self._left = 0
        """Number of bytes until then."""

    async def run(self) -> None:
        await self._may_pass()
        target = self._proxy.target
        try:
            if refused := self._proxy.active(Refuse):
                refused[0].struck += 1
                raise ConnectionRefusedError
            assert target is not None, "the proxy has no target"
            server = await _connect(target)
        except OSError:
            self.sever(reset=True)
            return
        self._writers.append(server[1])
        pumps = [
            asyncio.ensure_future(self._pump(Way.TO_SERVER, self._client[0], server[1])),
            asyncio.ensure_future(self._pump(Way.TO_CLIENT, server[0], self._client[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for writer in self._writers:  # all are closing already if this is cancelled
            with suppress(OSError):
                await writer.wait_closed()

    def sever(self, *, reset: bool) -> None:
        """Close both sides immediately."""
        for writer in self._writers:
            end = writer.get_extra_info("socket")
            if reset and end is not None and end.family != socket.AF_UNIX and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if reset:
                writer.transport.abort()
            else:
                writer.close()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._may_pass()
                if way is Way.TO_SERVER:
                    self._choose_cut(data)
                else:
                    data = self._corrupted(data)
                for placed in self._active_for(Delay, way):
                    await asyncio.sleep(placed.fault.seconds)  # type: ignore[union-attr]
                if not await self._deliver(way, data, writer):
                    return
            if way is Way.TO_SERVER:
                # The client has finished sending, but may still read.
                writer.write_eof()
                await asyncio.Event().wait()

    async def _may_pass(self) -> None:
        if opened := self._proxy.active(HalfOpen):
            opened[0].struck += 1
            await asyncio.Event().wait()
        while stalled := self._proxy.active(Stall):
            stalled[0].struck += 1
            await self._proxy.change()

    def _active_for(self, kind: type, way: Way) -> list[Placed]:
        return [placed for placed in self._proxy.active(kind) if placed.fault.way is way]  # type: ignore[union-attr]

    def _choose_cut(self, request: bytes) -> None:
        for placed in self._proxy.active(Cut):
            cut = placed.fault
            assert isinstance(cut, Cut)
            if self._cut is not None or cut.matching not in request or cut.also not in request:
                continue
            placed.seen += 1
            if placed.seen % cut.every == 0 and placed.chance.random() < cut.chance:
                placed.struck += 1
                self._cut, self._left = placed, cut.after

    def _corrupted(self, data: bytes) -> bytes:
        for placed in self._proxy.active(Corrupt):
            fault = placed.fault
            assert isinstance(fault, Corrupt)
            start = data.find(fault.marker)
            at = start + fault.offset
            if start >= 0 and 0 <= at < len(data):
                placed.struck += 1
                data = data[:at] + bytes((data[at] ^ fault.mask,)) + data[at + 1 :]
        return data

    async def _deliver(self, way: Way, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """Write the data; return `False` if the connection was cut."""
        cut = self._cut.fault if self._cut is not None else None
        ends = isinstance(cut, Cut) and cut.way is way and len(data) >= self._left
        if isinstance(cut, Cut) and cut.way is way:
            data, self._left = data[: self._left], self._left - min(self._left, len(data))
        await self._write(way, data, writer)
        if ends:
            assert isinstance(cut, Cut)
            self.sever(reset=cut.reset)
        return not ends

    async def _write(self, way: Way, data: bytes, writer: asyncio.StreamWriter) -> None:
        slowest = min((p.fault.bytes_per_second for p in self._active_for(Drip, way)), default=0.0)  # type: ignore[union-attr]
        piece = max(1, int(slowest / _DRIP)) if slowest else max(1, len(data))
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
            await writer.drain()
            if slowest:
                await asyncio.sleep(piece / slowest)


def bound(address: Address) -> socket.socket:
    """Return a socket that is bound, and refuses connections until it listens."""
    if isinstance(address, Path):
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(address))
    else:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", address))
    return bound


async def _connect(target: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(target, Path):
        return await asyncio.open_unix_connection(target)
    return await asyncio.open_connection("127.0.0.1", target)
