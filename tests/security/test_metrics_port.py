"""Clients that send incomplete requests to the port of `/metrics` and `/healthz` or to the embedded Kafka."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from integr8s_idem.embedded import tcp_front as embedded_front
from integr8s_idem.embedded.tcp_front import Front
from integr8s_idem.runtime import endpoints as endpoints_module
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.worker.health import Health, ServiceHealth

pytestmark = pytest.mark.scenario(132)

HALF: Final = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
GOOD: Final = Health((ServiceHealth("billing", live=True, ready=True),))


def endpoints() -> Endpoints:
    return Endpoints("127.0.0.1", 0, health=lambda: GOOD, registry=CollectorRegistry())


@contextmanager
def half_sent(port: int, count: int, sent: bytes = HALF) -> Iterator[list[socket.socket]]:
    """Open connections and send the beginning of a request."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            client.sendall(sent)
            clients.append(client)
        yield clients


def closed(client: socket.socket) -> bool:
    """Wait for the end of the connection, and return whether the server sent nothing."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


async def health_of(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HALF + b"\r\n")
    status = await reader.readline()
    writer.close()
    return int(status.split()[1])


@pytest.mark.parametrize("sent", [b"", b"G", HALF], ids=["nothing", "one byte", "half"])
async def test_a_connection_with_an_incomplete_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(endpoints_module, "REQUEST_SECONDS", 0.05)
    async with endpoints() as here:
        with half_sent(here.port, 3, sent) as clients:
            assert all([await asyncio.to_thread(closed, client) for client in clients])


async def test_sending_single_bytes_does_not_extend_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "REQUEST_SECONDS", 0.2)

    def drip(client: socket.socket) -> bool:
        client.settimeout(0.01)
        while True:
            try:
                client.sendall(b"a")
                if client.recv(1) == b"":
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True

    async with endpoints() as here:
        with half_sent(here.port, 1, b"GET /healthz HTTP/1.1\r\nA: ") as (client,):
            assert await asyncio.to_thread(drip, client)


async def test_an_idle_keep_alive_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "REQUEST_SECONDS", 0.2)
    async with endpoints() as here:
        with half_sent(here.port, 1, HALF + b"\r\n") as (client,):
            answer = b""
            while chunk := await asyncio.to_thread(client.recv, 4_096):
                answer += chunk
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


async def test_the_number_of_connections_is_limited() -> None:
    async with endpoints() as here:
        with half_sent(here.port, 3 * endpoints_module.MOST_CONNECTIONS) as clients:
            assert await health_of(here.port) == 200
            assert len(here._server._open) <= endpoints_module.MOST_CONNECTIONS
            oldest = clients[: endpoints_module.MOST_CONNECTIONS]
            assert all([await asyncio.to_thread(closed, client) for client in oldest])


async def test_a_request_being_answered_is_not_closed_for_waiting_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "MOST_CONNECTIONS", 2)
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(CollectorRegistry):
        def collect(self):  # type: ignore[no-untyped-def]
            loop.call_soon_threadsafe(asked.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
            return iter(())

    loop = asyncio.get_running_loop()
    here = Endpoints("127.0.0.1", 0, health=lambda: GOOD, registry=Slow())
    async with here, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        scrape = asyncio.create_task(client.get(f"http://127.0.0.1:{here.port}/metrics"))
        await asked.wait()
        with half_sent(here.port, 20):
            assert await health_of(here.port) == 200
        go_on.set()
        assert (await scrape).status_code == 200


SHORT_OF_DESCRIPTORS: Final = """
    import asyncio, json, logging, resource, sys

    from prometheus_client import CollectorRegistry

    from integr8s_idem.runtime.endpoints import Endpoints
    from integr8s_idem.worker.health import Health, ServiceHealth

    async def main():
        health = Health((ServiceHealth("billing", live=True, ready=True),))
        async with Endpoints("127.0.0.1", 0, health=lambda: health, registry=CollectorRegistry()) as here:
            print(here.port, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
    asyncio.run(main())
"""


def test_a_process_out_of_file_descriptors_answers_and_logs_little() -> None:
    """There are fewer file descriptors than allowed connections, so accepting fails."""
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SHORT_OF_DESCRIPTORS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with half_sent(port, 260):
            assert [asyncio.run(health_of(port)) for _ in range(5)] == [200] * 5
        _, log = server.communicate("")
    assert server.returncode == 0, log
    assert log.count("cannot accept all connections") == 1
    assert len(log.splitlines()) < 20, log


async def test_malformed_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with endpoints() as here:
        with half_sent(here.port, 50, b"\x00\xff nonsense\r\n\r\n") as clients:
            for client in clients:
                await asyncio.to_thread(client.recv, 4_096)
        assert await health_of(here.port) == 200
    assert not caplog.records


@pytest.fixture
def kafka_front() -> Iterator[Front]:
    """Start a proxy with an upstream that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        front = Front(upstream.getsockname())
        front.start()
        try:
            yield front
        finally:
            front.stop()


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", struct.pack(">i", 100) + b"half"], ids=["nothing", "size", "half"])
def test_the_embedded_kafka_closes_connections_without_a_request(
    monkeypatch: pytest.MonkeyPatch, kafka_front: Front, sent: bytes
) -> None:
    monkeypatch.setattr(embedded_front, "FIRST_REQUEST_SECONDS", 0.05)
    with half_sent(kafka_front.port, 3, sent) as clients:
        assert all(closed(client) for client in clients)


def test_the_embedded_kafka_closes_the_oldest_connections(monkeypatch: pytest.MonkeyPatch, kafka_front: Front) -> None:
    monkeypatch.setattr(kafka_front._open, "_most", 10)
    with half_sent(kafka_front.port, 30, b"\x00") as clients:
        assert all(closed(client) for client in clients[:20])
        assert len(kafka_front._open) == 10


HALF_OPEN: Final = 20_000
"""Opened by several processes, since each has a limit of file descriptors."""

FLOOD: Final = """
    import socket, sys

    port, count = int(sys.argv[1]), int(sys.argv[2])
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        try:
            client.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: a\\r\\n")
        except ConnectionError:
            pass
        clients.append(client)
    print(len(clients), flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(300)
async def test_health_is_answered_during_20_000_incomplete_requests() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    each = min(most, 5_000)
    answered = 0
    async with endpoints() as here:
        floods = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", textwrap.dedent(FLOOD), str(here.port), str(each)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(-(-HALF_OPEN // each))
        ]
        counts = [asyncio.create_task(flood.stdout.readline()) for flood in floods if flood.stdout]
        while not all(one.done() for one in counts):
            assert await health_of(here.port) == 200
            answered += 1
        assert [int(await one) for one in counts] == [each] * len(floods)
        assert await health_of(here.port) == 200
        for flood in floods:
            await flood.communicate(b"")
    assert answered
