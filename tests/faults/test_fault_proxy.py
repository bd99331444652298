"""The fault proxy does what its faults say, before a server that answers every read with the same bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.accepting import Acceptor
from tests.support.conditions import eventually
from tests.support.fault_proxy import (
    Address,
    Corrupt,
    Cut,
    Delay,
    Drip,
    FaultProxy,
    HalfOpen,
    Refuse,
    Stall,
    Way,
    bound,
)


@dataclass
class Echo:
    """A server that remembers what reached it."""

    heard: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.heard.append(data)
            writer.write(data)
        writer.close()


class Caller:
    """One connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes, size: int | None = None) -> bytes:
        self.writer.write(request)
        return await asyncio.wait_for(self.reader.readexactly(len(request) if size is None else size), 5)

    async def rest(self) -> bytes:
        """What still comes until the end."""
        return await asyncio.wait_for(self.reader.read(), 5)


@dataclass
class Line:
    echo: Echo
    proxy: FaultProxy
    callers: list[Caller] = field(default_factory=list)

    async def call(self) -> Caller:
        address = self.proxy.address
        ends = (
            await asyncio.open_unix_connection(address)
            if isinstance(address, Path)
            else await asyncio.open_connection("127.0.0.1", address)
        )
        self.callers.append(Caller(*ends))
        return self.callers[-1]


@asynccontextmanager
async def echoing(echo: Echo, path: Path | None) -> AsyncIterator[Address]:
    """Where `echo` is served: the Unix socket `path`, or a free port."""
    server = Acceptor(echo.serve)
    with bound(path or 0) as listening:
        await server.start(listening)
        try:
            yield path or server.port
        finally:
            await server.close()


@asynccontextmanager
async def open_line(tmp_path: Path | None = None) -> AsyncIterator[Line]:
    echo = Echo()
    async with echoing(echo, tmp_path and tmp_path / "echo.sock") as target, FaultProxy(target) as proxy:
        line = Line(echo, proxy)
        yield line
        for caller in line.callers:
            caller.writer.transport.abort()


@pytest.fixture(params=["tcp", "socket"])
async def line(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path if request.param == "socket" else None) as line:
        yield line


@pytest.fixture
async def tcp_line() -> AsyncIterator[Line]:
    async with open_line() as line:
        yield line


async def test_the_proxy_passes_everything_without_a_fault(line: Line) -> None:
    caller = await line.call()

    assert await caller.ask(b"x" * 300_000) == b"x" * 300_000


async def test_a_request_whose_response_is_cut_is_executed(line: Line) -> None:
    caller = await line.call()
    cut = line.proxy.put(Cut(matching=b"pay"))

    assert await caller.ask(b"look") == b"look"
    caller.writer.write(b"pay 5")

    assert await caller.rest() == b""
    assert line.echo.heard == [b"look", b"pay 5"]
    assert cut.struck == 1
    assert await (await line.call()).ask(b"pay 5") == b"pay 5"


async def test_a_cut_request_arrives_partially(line: Line) -> None:
    caller = await line.call()
    line.proxy.put(Cut(way=Way.TO_SERVER, after=3))

    caller.writer.write(b"pay 5")

    assert await caller.rest() == b""
    await eventually(lambda: line.echo.heard == [b"pay"])


async def test_a_response_is_cut_after_a_number_of_bytes(line: Line) -> None:
    caller = await line.call()
    line.proxy.put(Cut(after=2))

    caller.writer.write(b"pay 5")

    assert await caller.rest() == b"pa"


async def test_each_third_matching_request_is_cut(line: Line) -> None:
    cut = line.proxy.put(Cut(matching=b"pay", every=3, times=None))
    answers = []

    for _ in range(9):
        caller = await line.call()
        caller.writer.write(b"pay 5")
        caller.writer.write_eof()
        answers.append(await caller.rest())

    assert [answer == b"" for answer in answers] == [False, False, True] * 3
    assert cut.struck == 3


async def test_a_reset_raises_a_connection_reset_error(tcp_line: Line) -> None:
    caller = await tcp_line.call()
    await caller.ask(b"look")

    tcp_line.proxy.reset()

    with pytest.raises(ConnectionResetError):
        await caller.rest()


async def test_a_cut_can_reset_the_connection(tcp_line: Line) -> None:
    caller = await tcp_line.call()
    tcp_line.proxy.put(Cut(reset=True))
    caller.writer.write(b"pay 5")

    with pytest.raises(ConnectionResetError):
        await caller.rest()


async def test_refused_connections_are_reset_immediately(tcp_line: Line) -> None:
    with tcp_line.proxy.fault(Refuse()):
        caller = await tcp_line.call()
        with pytest.raises(ConnectionResetError):
            await caller.rest()

    assert await (await tcp_line.call()).ask(b"look") == b"look"


async def test_a_half_open_connection_stays_silent_and_a_new_one_works(line: Line) -> None:
    caller = await line.call()
    await caller.ask(b"look")
    with line.proxy.fault(HalfOpen()) as half_open:
        caller.writer.write(b"pay 5")
        await eventually(lambda: half_open.struck)

    assert await (await line.call()).ask(b"look") == b"look"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reader.read(1), 0.1)
    assert b"pay 5" not in line.echo.heard


async def test_stalled_data_passes_when_the_stall_ends(line: Line) -> None:
    caller = await line.call()
    with line.proxy.fault(Stall()) as stall:
        caller.writer.write(b"pay 5")
        await eventually(lambda: stall.struck)
        assert line.echo.heard == []

    assert await asyncio.wait_for(caller.reader.readexactly(5), 5) == b"pay 5"


async def test_delayed_and_throttled_responses_take_time(line: Line) -> None:
    caller = await line.call()
    began = time.monotonic()

    with line.proxy.fault(Delay(0.2)):
        assert await caller.ask(b"look") == b"look"
    delayed = time.monotonic()
    with line.proxy.fault(Drip(bytes_per_second=1_000)):
        assert await caller.ask(b"x" * 300) == b"x" * 300

    assert delayed - began >= 0.2
    assert time.monotonic() - delayed >= 0.25


async def test_one_byte_after_the_marker_is_flipped_once(line: Line) -> None:
    caller = await line.call()
    line.proxy.put(Corrupt(marker=b"order", offset=6, mask=1))

    assert await caller.ask(b"order-700") == b"order-600"
    assert await caller.ask(b"order-700") == b"order-700"


async def test_the_address_is_known_before_the_start_and_the_target_can_be_set_later(tmp_path: Path) -> None:
    echo = Echo()
    proxy = FaultProxy(listen=tmp_path / "ours.sock")
    assert proxy.address == tmp_path / "ours.sock"

    async with echoing(echo, tmp_path / "late.sock") as proxy.target, proxy:
        line = Line(echo, proxy)
        caller = await line.call()
        assert await caller.ask(b"look") == b"look"
        caller.writer.transport.abort()
