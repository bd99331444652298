"""Secrets planted in every place that may contain one, and searched in all output.

Broker and store are in memory in the tests with a worker; the store that refuses credentials is a real Redis.
"""

from __future__ import annotations

import io
import logging
import time
import traceback
from collections.abc import Iterator
from typing import Literal

import pytest
from rich.console import Console

from integr8s_idem.cli.log_format import log_as_json, log_as_text
from integr8s_idem.config import IdempotencyConfig, KafkaSettings, RedisStoreSettings, Settings, load_settings
from integr8s_idem.config.urls import redacted
from integr8s_idem.engine.error_text import LONGEST_ERROR, describe_error
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import PublishError, StoreError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.stores.redis.client import redis_client
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.kafka_protocols import Partition
from tests.faults.conftest import Telemetry
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import virtual_store
from tests.support.redis import RedisServer

SECRET = "hunter2-canary"
PAYLOAD = "payload-canary"
TOPIC = Partition("order_placed", 0)
LONGEST_SECONDS = 5.0
"""Processor time of this thread: generous, and far below that of a quadratic search over megabytes."""


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    card: str = PAYLOAD


@pytest.fixture(params=["json", "text"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """Capture the log at DEBUG in both formats of the library."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    written = io.StringIO()
    if request.param == "json":
        log_as_json(written, "DEBUG")
    else:
        log_as_text(Console(file=written, width=10_000), "DEBUG")
    yield written
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.mark.scenario(104, 108)
@virtual_time
async def test_secrets_in_handler_errors_and_payloads_are_not_leaked(log: io.StringIO, telemetry: Telemetry) -> None:
    manager = IdempotencyManager(
        IdempotencyConfig(max_attempts=2), virtual_store(), telemetry.observer, scope="billing"
    )
    broker, router = FakeBroker(), EventRouter()

    @router.on(OrderPlaced, name="charge")
    async def charge(event: OrderPlaced) -> None:
        try:
            raise OSError(f"https://u:{SECRET}@pay.example refused")
        except OSError as error:
            raise ConnectionError(f"postgresql://app:{SECRET}@db:5432/shop?password={SECRET} is down") from error

    event = OrderPlaced()
    broker.publish(event)
    async with running(IdempotentEventDispatcher(router, manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values("order_placed.dlq")
    record = await manager.get(Key.of_event("charge", "order_placed", "id", event.event_id))
    assert record is not None
    output = {
        "log": log.getvalue(),
        "dead letter": repr(dead_letter.headers),
        "record": repr(record),
        **telemetry.output(),
    }
    assert [name for name, text in output.items() if SECRET in text] == []
    assert [name for name, text in output.items() if PAYLOAD in text] == []
    assert "postgresql://***@db:5432" in output["log"]
    assert "postgresql://***@db:5432" in output["record"]
    assert PAYLOAD in repr(dead_letter.value)  # the message itself is dead-lettered unchanged


@pytest.mark.scenario(81, 104)
@virtual_time
async def test_the_contents_of_an_undecodable_message_appear_only_in_its_dead_letter(log: io.StringIO) -> None:
    broker, router = FakeBroker(), EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None: ...

    bodies = [
        f'{{"event_id": "1", "event_type": "order_placed", "card": ["{SECRET}"]}}',
        f'{{"event_id": ["{SECRET}"], "event_type": "order_placed"}}',
        f'{{"event_id": "1", "event_type": "order_placed", "{SECRET}": 1, "{SECRET}": 2}}',
        f'{{"event_id": "1", "event_type": "order_placed", "card": "{SECRET}',
        f"{SECRET}",
        f'["{SECRET}"]',
    ]
    for body in bodies:
        broker.put("order_placed", body.encode())
    manager = IdempotencyManager(IdempotencyConfig(), virtual_store(), scope="billing")
    async with running(IdempotentEventDispatcher(router, manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == len(bodies))

    dead_letters = broker.values("order_placed.dlq")
    assert len(dead_letters) == len(bodies)
    assert SECRET not in log.getvalue()
    assert all(SECRET not in repr(dead_letter.headers) for dead_letter in dead_letters)


@pytest.mark.scenario(104)
def test_printed_settings_and_clients_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_KAFKA__SASL_PASSWORD", SECRET)
    monkeypatch.setenv("INTEGR8S_IDEM_STORE__URL", f"redis://user:{SECRET}@localhost:1/0")
    monkeypatch.setenv("INTEGR8S_IDEM_TELEMETRY__OTLP_ENDPOINT", f"http://user:{SECRET}@collector:4318")
    settings = load_settings()
    assert isinstance(settings.store, RedisStoreSettings)
    client = redis_client(settings.store)
    printed = [settings, settings.store, settings.kafka, settings.telemetry, client, client.connection_pool]
    printed += [RedisIdempotencyRepository(client), EventPublisher(settings.kafka)]

    assert [type(value) for value in printed if SECRET in f"{value!r}{value}"] == []
    assert "redis://***@localhost:1/0" in repr(settings)


@pytest.mark.scenario(52, 104)
@pytest.mark.parametrize("where", ["password", "url", "query"])
async def test_errors_of_a_refusing_or_unreachable_store_do_not_contain_the_password(
    log: io.StringIO, where: str
) -> None:
    with RedisServer(tcp=True, config={"requirepass": "another"}) as server:
        address = f"127.0.0.1:{server.port}"
        settings = {
            "password": RedisStoreSettings.model_validate({"url": f"redis://{address}/0", "password": SECRET}),
            "url": RedisStoreSettings(url=f"redis://user:{SECRET}@{address}/0"),
            "query": RedisStoreSettings(url=f"redis://{address}/0?password={SECRET}"),
        }[where]
        refused = await error_of(settings)
    unreachable = await error_of(settings)

    for error in (refused, unreachable):
        assert SECRET not in "".join(traceback.format_exception(error)) + repr(error)
    assert SECRET not in log.getvalue()


async def error_of(settings: RedisStoreSettings) -> StoreError:
    client = redis_client(settings)
    try:
        with pytest.raises(StoreError) as caught:
            await RedisIdempotencyRepository(client).ping()
        return caught.value
    finally:
        await client.aclose()


@pytest.mark.scenario(104)
async def test_errors_of_an_unreachable_broker_do_not_contain_the_password(log: io.StringIO) -> None:
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": "127.0.0.1:1",
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_username": "app",
            "sasl_password": SECRET,
            "request_timeout_seconds": 1,
        }
    )
    publisher = EventPublisher(settings)

    with pytest.raises(PublishError) as caught:
        await publisher.publish(OrderPlaced())
    await publisher.close()

    assert SECRET not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in log.getvalue()
    assert PAYLOAD not in log.getvalue()


@pytest.mark.scenario(104, 108)
@pytest.mark.parametrize(
    ("text", "redacted_text"),
    [
        (f"redis://user:{SECRET}@h:1/0 is down", "redis://***@h:1/0 is down"),
        (f"redis://:{SECRET}@h", "redis://***@h"),
        (f"at 'amqp://a:{SECRET}@h/x', twice: http://b:{SECRET}@h", "at 'amqp://***@h/x', twice: http://***@h"),
        (f"postgresql://u:p@{SECRET}@h/db", "postgresql://***@h/db"),
        (f"postgresql://u:a/{SECRET}@h/db", "postgresql://***@h/db"),
        (f"connect(password={SECRET}, port=1)", "connect(password=*** port=1)"),
        (f"?token={SECRET}&x=1", "?token=***&x=1"),
        (f"sasl_plain_password='{SECRET}'", "sasl_plain_password=***"),
        ("a@b.example wrote to http://h/x", "a@b.example wrote to http://h/x"),
        ("unexpected token: x", "unexpected token: x"),
    ],
)
def test_credentials_in_error_texts_are_redacted(text: str, redacted_text: str) -> None:
    assert redacted(text) == redacted_text
    assert describe_error(ValueError(text)) == f"ValueError: {redacted_text}"


@pytest.mark.scenario(108, 110)
@pytest.mark.parametrize("message", ["", " \n"])
def test_an_error_without_a_message_has_no_colon(message: str) -> None:
    assert describe_error(ValueError(message)) == "ValueError"


@pytest.mark.parametrize("piece", ["://", "password=", "x", "a://b:", " ", "@", "://@"])
def test_an_error_text_of_megabytes_is_truncated_quickly(piece: str) -> None:
    error = ValueError(piece * 1_000_000)
    began = time.thread_time()

    text = describe_error(error)

    assert time.thread_time() - began < LONGEST_SECONDS
    assert len(text) <= LONGEST_ERROR


@pytest.mark.scenario(108)
def test_a_secret_at_the_truncation_point_is_redacted() -> None:
    for before in range(LONGEST_ERROR - 60, LONGEST_ERROR + 1):
        text = describe_error(ValueError("x" * before + f" redis://user:{SECRET}@h:1/0"))

        assert SECRET[:4] not in text


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.scenario(108)
@virtual_time
async def test_an_error_whose_str_fails_is_dead_lettered() -> None:
    broker, router = FakeBroker(), EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        raise UnprintableError

    broker.publish(OrderPlaced())
    manager = IdempotencyManager(IdempotencyConfig(max_attempts=2), virtual_store(), scope="billing")
    async with running(IdempotentEventDispatcher(router, manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values("order_placed.dlq")
    assert dict(dead_letter.headers)["idempotency-dlq-error-class"] == b"UnprintableError"


def test_settings_without_secrets_are_printed_unchanged() -> None:
    assert "bootstrap_servers='localhost:9092'" in repr(Settings())
