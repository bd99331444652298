"""TLS connections to a real Kafka, and to a real Redis with a TLS front, with certificates of a test authority."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem import EventPublisher
from integr8s_idem.config import KafkaSettings, RedisStoreSettings
from integr8s_idem.errors import PublishError, StoreUnavailableError
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from tests.kafka_faults.tools import need_kafka
from tests.support.accepting import Acceptor
from tests.support.kafka.broker import KafkaBroker
from tests.support.redis import RedisServer
from tests.support.tls import Authority, TlsFront
from tests.support.workers import OrderPlaced

pytestmark = pytest.mark.scenario(102)

WRONG: dict[str, dict[str, Any]] = {
    "another authority": {},
    "another host": {"host": "redis.example"},
    "an expired certificate": {"expired": True},
}


@asynccontextmanager
async def redis_behind_tls(
    server: RedisServer, trusted: Authority, signing: Authority, **certificate: Any
) -> AsyncIterator[RedisIdempotencyRepository]:
    async with TlsFront(server.socket_path, signing.server_context(**certificate)) as front:
        settings = RedisStoreSettings(
            url=f"rediss://127.0.0.1:{front.port}/0", tls_ca_file=str(trusted.ca_file), timeout_seconds=2
        )
        client = redis_client(settings)
        try:
            yield RedisIdempotencyRepository(client)
        finally:
            await client.aclose()


async def test_a_client_connects_to_redis_with_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async with redis_behind_tls(redis_server, authority, authority) as store:
        health = await store.ping()

    assert health.version.startswith(("6.", "7.", "8."))


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_certificate_of_redis_is_rejected(redis_server: RedisServer, tmp_path: Path, wrong: str) -> None:
    trusted = Authority(tmp_path)
    signing = Authority(tmp_path, "other") if wrong == "another authority" else trusted

    async with redis_behind_tls(redis_server, trusted, signing, **WRONG[wrong]) as store:
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await store.ping()


async def test_a_redis_without_tls_is_rejected(redis_server: RedisServer, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"+PONG\r\n")
        await writer.drain()

    async with Acceptor(answer) as plain:
        settings = RedisStoreSettings(
            url=f"rediss://127.0.0.1:{plain.port}/0", tls_ca_file=str(Authority(tmp_path).ca_file)
        )
        client = redis_client(settings)

        with pytest.raises(StoreUnavailableError, match="SSL"):
            await RedisIdempotencyRepository(client).ping()

        await client.aclose()


@dataclass(frozen=True)
class Listeners:
    """Loopback ports of one broker."""

    tls: int
    plain: int
    authority: Authority


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listeners]:
    """Start a broker whose certificate is valid only for 127.0.0.1."""
    need_kafka(own=True)
    folder = tmp_path_factory.mktemp("kafka")
    authority = Authority(folder)
    broker = KafkaBroker(folder, {"auto.create.topics.enable": "true"})
    port = _add_tls(folder / "server.properties", authority)
    broker.start()
    try:
        yield Listeners(port, int(broker.bootstrap.rpartition(":")[2]), authority)
    finally:
        broker.kill()


@pytest.mark.kafka
async def test_a_publisher_connects_to_kafka_with_tls(listeners: Listeners) -> None:
    await _publish(f"127.0.0.1:{listeners.tls}", listeners.authority)


@pytest.mark.kafka
# aiokafka leaves the socket of a handshake that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("another authority", "unable to get local issuer certificate"),
        ("another host", "Hostname mismatch, certificate is not valid for 'localhost'"),
        ("an expired certificate", "certificate has expired"),
        ("plain text", ""),  # the broker closes the connection without a readable response
    ],
)
async def test_a_wrong_or_missing_certificate_of_kafka_is_rejected(
    listeners: Listeners, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, reason: str
) -> None:
    trusted = Authority(tmp_path, "other") if wrong == "another authority" else listeners.authority

    async with TlsFront(listeners.plain, listeners.authority.server_context(expired=True)) as expired:
        address = {
            "another host": f"localhost:{listeners.tls}",
            "an expired certificate": f"127.0.0.1:{expired.port}",
            "plain text": f"127.0.0.1:{listeners.plain}",
        }.get(wrong, f"127.0.0.1:{listeners.tls}")
        with pytest.raises(PublishError, match="Unable to bootstrap"):
            await _publish(address, trusted)

    [refused] = [record.message for record in caplog.records if record.message.startswith("Unable connect to")]
    assert reason in refused


def _add_tls(properties: Path, authority: Authority) -> int:
    """Add a TLS listener, and return its port."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = int(held.getsockname()[1])
    added = {
        "listeners": f"SSL://127.0.0.1:{port}",
        "advertised.listeners": f"SSL://127.0.0.1:{port}",
    }
    settings = [line.partition("=") for line in properties.read_text().splitlines()]
    lines = [f"{name}={value},{added[name]}" if name in added else f"{name}={value}" for name, _, value in settings]
    lines.append("listener.security.protocol.map=SSL:SSL,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT")
    lines += [f"{name}={value}" for name, value in authority.broker_settings().items()]
    properties.write_text("\n".join(lines) + "\n")
    return port


async def _publish(address: str, trusted: Authority) -> None:
    settings = KafkaSettings(
        bootstrap_servers=address,
        security_protocol="SSL",
        ssl_ca_file=str(trusted.ca_file),
        request_timeout_seconds=10,
    )
    publisher = EventPublisher(settings)
    try:
        await publisher.publish(OrderPlaced(order_id="0"))
    finally:
        await publisher.close()
