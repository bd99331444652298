"""TLS to a real Kafka, and to a real Redis behind a front; certificates of an authority of our own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem import EventPublisher
from integr8s_idem.config import KafkaSettings, RedisStoreSettings
from integr8s_idem.errors import PublishError, StoreUnavailableError
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
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


async def test_redis_is_reached_through_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async with redis_behind_tls(redis_server, authority, authority) as store:
        health = await store.ping()

    assert health.version.startswith(("6.", "7.", "8."))


@pytest.mark.parametrize("wrong", WRONG)
async def test_redis_with_a_wrong_certificate_is_refused(redis_server: RedisServer, tmp_path: Path, wrong: str) -> None:
    trusted = Authority(tmp_path)
    signing = Authority(tmp_path, "other") if wrong == "another authority" else trusted

    async with redis_behind_tls(redis_server, trusted, signing, **WRONG[wrong]) as store:
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await store.ping()


async def test_a_redis_that_speaks_no_tls_is_refused(redis_server: RedisServer, tmp_path: Path) -> None:
    plain = await asyncio.start_server(lambda _, writer: writer.write(b"+PONG\r\n"), "127.0.0.1", 0)
    settings = RedisStoreSettings(
        url=f"rediss://127.0.0.1:{plain.sockets[0].getsockname()[1]}/0", tls_ca_file=str(Authority(tmp_path).ca_file)
    )
    client = redis_client(settings)

    with pytest.raises(StoreUnavailableError, match="SSL"):
        await RedisIdempotencyRepository(client).ping()

    await client.aclose()
    plain.close()


@pytest.mark.kafka
# aiokafka leaves the socket of a handshake that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_kafka_is_reached_through_tls_and_a_wrong_certificate_is_refused(tmp_path: Path) -> None:
    trusted, other = Authority(tmp_path), Authority(tmp_path, "other")
    folder = tmp_path / "kafka"
    folder.mkdir()
    broker = KafkaBroker(folder, {"auto.create.topics.enable": "true"})
    port = _add_tls(folder / "server.properties", trusted)
    await asyncio.to_thread(broker.start)
    try:
        await _publish(port, trusted)

        with pytest.raises(PublishError):
            await _publish(port, other)
    finally:
        await asyncio.to_thread(broker.kill)


def _add_tls(properties: Path, authority: Authority) -> int:
    """A listener more, on the port that is returned."""
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


async def _publish(port: int, trusted: Authority) -> None:
    settings = KafkaSettings(
        bootstrap_servers=f"127.0.0.1:{port}",
        security_protocol="SSL",
        ssl_ca_file=str(trusted.ca_file),
        request_timeout_seconds=10,
    )
    publisher = EventPublisher(settings)
    try:
        await publisher.publish(OrderPlaced(order_id="0"))
    finally:
        await publisher.close()
