"""A proxy before a server, on a TCP port or a Unix socket, that does to the bytes what networks do.

    async with FaultProxy(server.address) as proxy:
        client = connect(proxy.address)
        with proxy.fault(Delay(0.5)):
            ...
        swallowed = proxy.put(Cut(matching=b"EVALSHA"))   # the server executes, the client never learns
        ...
        assert swallowed.struck == 1

The address is known as soon as the object is made, before it is started and before the server runs: a
Kafka broker can advertise it.  Faults are data, act on all connections, and add up.  The proxy knows no
protocol: a request is what one read brings, which holds for clients that wait for their answers.
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
"""A Unix socket, or a port of 127.0.0.1."""

_CHUNK: Final = 1 << 16
_DRIP: Final = 20
"""Writes a second of a dripping connection."""


class Way(Enum):
    """Where bytes go."""

    TO_SERVER = "requests"
    TO_CLIENT = "answers"


@dataclass(frozen=True)
class Delay:
    """Each read is passed on so many seconds later."""

    seconds: float
    way: Way = Way.TO_CLIENT


@dataclass(frozen=True)
class Drip:
    """So many bytes a second and connection, a few at a time."""

    bytes_per_second: float
    way: Way = Way.TO_CLIENT


@dataclass(frozen=True)
class Cut:
    """End the connection at a request that holds `matching`, after `after` bytes.

    `TO_CLIENT` counts the bytes of the answer: with 0 the server has executed and nobody learns of it.
    `TO_SERVER` counts those of the request: with 0 it never arrives.
    """

    matching: bytes = b""
    also: bytes = b""
    """A second piece that the request must hold."""
    way: Way = Way.TO_CLIENT
    after: int = 0
    reset: bool = False
    """By RST instead of FIN.  A Unix socket knows only its close."""
    times: int | None = 1
    """How often; `None`: until it is taken away."""
    every: int = 1
    """Only each so-many-th matching request."""
    chance: float = 1.0
    """Of those, the share that is struck, drawn from `seed`."""
    seed: int = 0


@dataclass(frozen=True)
class Corrupt:
    """Flip bits of one byte on its way to the client: `offset` bytes behind the start of `marker`.

    Without a marker: behind the start of what is read next.
    """

    marker: bytes = b""
    offset: int = 0
    mask: int = 0xFF
    times: int | None = 1


@dataclass(frozen=True)
class Stall:
    """Nothing passes while it is there; then everything does, late."""


@dataclass(frozen=True)
class HalfOpen:
    """Connections that have something to pass meanwhile, and new ones, pass nothing ever again and never end."""


@dataclass(frozen=True)
class Refuse:
    """New connections are reset at once."""

    times: int | None = None


Fault: TypeAlias = Delay | Drip | Cut | Corrupt | Stall | HalfOpen | Refuse


@dataclass
class Placed:
    """A fault at work."""

    fault: Fault
    struck: int = 0
    """How often it has done its harm."""
    seen: int = 0
    chance: random.Random = field(default_factory=random.Random)

    def spent(self) -> bool:
        times = getattr(self.fault, "times", None)
        return times is not None and self.struck >= times


class FaultProxy:
    """Passes bytes between its own address and `target`.

    Args:
        target: The server's address; may be set or changed later, for new connections.
        listen: The own address: a free port, or a Unix socket in a folder of its own where the
            target is one, if not given.
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
        """Connections so far."""
        self._placed: list[Placed] = []
        self._changed = asyncio.Event()
        self._links: set[_Link] = set()
        self._acceptor = Acceptor(self._serve)

    def put(self, fault: Fault) -> Placed:
        """Let `fault` act from now on."""
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
        """Take all faults away."""
        self._placed.clear()
        self._wake()

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[Placed]:
        """`fault` within the block."""
        placed = self.put(fault)
        try:
            yield placed
        finally:
            self.take_away(placed)

    async def hold(self, seconds: float) -> None:
        """A black hole for a while."""
        with self.fault(Stall()):
            await asyncio.sleep(seconds)

    def reset(self) -> None:
        """RST to both ends of every connection, now."""
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

    # What connections ask.

    def active(self, kind: type) -> list[Placed]:
        return [placed for placed in self._placed if isinstance(placed.fault, kind) and not placed.spent()]

    async def change(self) -> None:
        """Return when faults have been taken away."""
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
    """One connection."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = reader, writer
        self._writers = [writer]
        self._cut: Placed | None = None
        """What will end this connection."""
        self._left = 0
        """Bytes until then."""

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
        for writer in self._writers:  # all are closed by now, should this be cancelled
            with suppress(OSError):
                await writer.wait_closed()

    def sever(self, *, reset: bool) -> None:
        """End both sides now."""
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
                for placed in self._at_work(Delay, way):
                    await asyncio.sleep(placed.fault.seconds)  # type: ignore[union-attr]
                if not await self._deliver(way, data, writer):
                    return
            if way is Way.TO_SERVER:
                # The client has no more to say; it may still want to hear.
                writer.write_eof()
                await asyncio.Event().wait()

    async def _may_pass(self) -> None:
        if opened := self._proxy.active(HalfOpen):
            opened[0].struck += 1
            await asyncio.Event().wait()
        while stalled := self._proxy.active(Stall):
            stalled[0].struck += 1
            await self._proxy.change()

    def _at_work(self, kind: type, way: Way) -> list[Placed]:
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
        """`False`: the connection has been cut."""
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
        slowest = min((p.fault.bytes_per_second for p in self._at_work(Drip, way)), default=0.0)  # type: ignore[union-attr]
        piece = max(1, int(slowest / _DRIP)) if slowest else max(1, len(data))
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
            await writer.drain()
            if slowest:
                await asyncio.sleep(piece / slowest)


def bound(address: Address) -> socket.socket:
    """A socket that has its address, and refuses until somebody listens."""
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
