"""The faults of the fault proxy, in front of an echo server."""

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
    """An echo server that records its input."""

    received: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received.append(data)
            writer.write(data)
        writer.close()


class Caller:
    """A connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes, size: int | None = None) -> bytes:
        self.writer.write(request)
        return await asyncio.wait_for(self.reader.readexactly(len(request) if size is None else size), 5)

    async def rest(self) -> bytes:
        """Read until the connection ends."""
        return await asyncio.wait_for(self.reader.read(), 5)


@dataclass
class Bench:
    """The echo server, the proxy in front of it, and connections through it."""

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
    """Serve `echo` at the Unix socket `path`, or at a free port."""
    server = Acceptor(echo.serve)
    with bound(path or 0) as listening:
        await server.start(listening)
        try:
            yield path or server.port
        finally:
            await server.close()


@asynccontextmanager
async def open_bench(tmp_path: Path | None = None) -> AsyncIterator[Bench]:
    echo = Echo()
    async with echoing(echo, tmp_path and tmp_path / "echo.sock") as target, FaultProxy(target) as proxy:
        bench = Bench(echo, proxy)
        yield bench
        for caller in bench.callers:
            caller.writer.transport.abort()


@pytest.fixture(params=["tcp", "socket"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path if request.param == "socket" else None) as bench:
        yield bench


@pytest.fixture
async def tcp_bench() -> AsyncIterator[Bench]:
    async with open_bench() as bench:
        yield bench


async def test_the_proxy_passes_everything_without_a_fault(bench: Bench) -> None:
    caller = await bench.call()

    assert await caller.ask(b"x" * 300_000) == b"x" * 300_000


async def test_a_request_whose_response_is_cut_is_executed(bench: Bench) -> None:
    caller = await bench.call()
    cut = bench.proxy.put(Cut(matching=b"pay"))

    assert await caller.ask(b"look") == b"look"
    caller.writer.write(b"pay 5")

    assert await caller.rest() == b""
    assert bench.echo.received == [b"look", b"pay 5"]
    assert cut.struck == 1
    assert await (await bench.call()).ask(b"pay 5") == b"pay 5"


async def test_a_cut_request_arrives_partially(bench: Bench) -> None:
    caller = await bench.call()
    bench.proxy.put(Cut(way=Way.TO_SERVER, after=3))

    caller.writer.write(b"pay 5")

    assert await caller.rest() == b""
    await eventually(lambda: bench.echo.received == [b"pay"])


async def test_a_response_is_cut_after_a_number_of_bytes(bench: Bench) -> None:
    caller = await bench.call()
    bench.proxy.put(Cut(after=2))

    caller.writer.write(b"pay 5")

    assert await caller.rest() == b"pa"


async def test_each_third_matching_request_is_cut(bench: Bench) -> None:
    cut = bench.proxy.put(Cut(matching=b"pay", every=3, times=None))
    answers = []

    for _ in range(9):
        caller = await bench.call()
        caller.writer.write(b"pay 5")
        caller.writer.write_eof()
        answers.append(await caller.rest())

    assert [answer == b"" for answer in answers] == [False, False, True] * 3
    assert cut.struck == 3


async def test_a_reset_raises_a_connection_reset_error(tcp_bench: Bench) -> None:
    caller = await tcp_bench.call()
    await caller.ask(b"look")

    tcp_bench.proxy.reset()

    with pytest.raises(ConnectionResetError):
        await caller.rest()


async def test_a_cut_can_reset_the_connection(tcp_bench: Bench) -> None:
    caller = await tcp_bench.call()
    tcp_bench.proxy.put(Cut(reset=True))
    caller.writer.write(b"pay 5")

    with pytest.raises(ConnectionResetError):
        await caller.rest()


async def test_refused_connections_are_reset_immediately(tcp_bench: Bench) -> None:
    with tcp_bench.proxy.fault(Refuse()):
        caller = await tcp_bench.call()
        with pytest.raises(ConnectionResetError):
            await caller.rest()

    assert await (await tcp_bench.call()).ask(b"look") == b"look"


async def test_a_half_open_connection_stays_silent_and_a_new_one_works(bench: Bench) -> None:
    caller = await bench.call()
    await caller.ask(b"look")
    with bench.proxy.fault(HalfOpen()) as half_open:
        caller.writer.write(b"pay 5")
        await eventually(lambda: half_open.struck)

    assert await (await bench.call()).ask(b"look") == b"look"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reader.read(1), 0.1)
    assert b"pay 5" not in bench.echo.received


async def test_stalled_data_passes_when_the_stall_ends(bench: Bench) -> None:
    caller = await bench.call()
    with bench.proxy.fault(Stall()) as stall:
        caller.writer.write(b"pay 5")
        await eventually(lambda: stall.struck)
        assert bench.echo.received == []

    assert await asyncio.wait_for(caller.reader.readexactly(5), 5) == b"pay 5"


async def test_delayed_and_throttled_responses_take_time(bench: Bench) -> None:
    caller = await bench.call()
    began = time.monotonic()

    with bench.proxy.fault(Delay(0.2)):
        assert await caller.ask(b"look") == b"look"
    delayed = time.monotonic()
    with bench.proxy.fault(Drip(bytes_per_second=1_000)):
        assert await caller.ask(b"x" * 300) == b"x" * 300

    assert delayed - began >= 0.2
    assert time.monotonic() - delayed >= 0.25


async def test_one_byte_after_the_marker_is_flipped_once(bench: Bench) -> None:
    caller = await bench.call()
    bench.proxy.put(Corrupt(marker=b"order", offset=6, mask=1))

    assert await caller.ask(b"order-700") == b"order-600"
    assert await caller.ask(b"order-700") == b"order-700"


async def test_the_address_is_known_before_the_start_and_the_target_can_be_set_later(tmp_path: Path) -> None:
    echo = Echo()
    proxy = FaultProxy(listen=tmp_path / "proxy.sock")
    assert proxy.address == tmp_path / "proxy.sock"

    async with echoing(echo, tmp_path / "late.sock") as proxy.target, proxy:
        bench = Bench(echo, proxy)
        caller = await bench.call()
        assert await caller.ask(b"look") == b"look"
        caller.writer.transport.abort()
