"""Groups of services, and errors of services that cannot start."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from io import StringIO
from typing import Any, cast
from unittest import mock

import pytest
from dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    Provider,
    Scope,
    make_async_container,
    make_container,
    provide,
)
from rich.console import Console

from integr8s_idem import (
    BaseEvent,
    EventPublisher,
    EventRouter,
    IdempotencyRepository,
    MemoryIdempotencyRepository,
    Service,
    Settings,
)
from integr8s_idem.cli.run_table import report_table
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.runtime import ServiceGroup, service_group
from integr8s_idem.runtime.background import wait_forever
from integr8s_idem.runtime.service_group import RunningService
from integr8s_idem.worker.isolation_gate import IsolationGate
from tests.support.conditions import eventually
from tests.support.ports import reserve_port
from tests.support.workers import OrderPlaced

SETTINGS = Settings(store={"kind": "memory"}, telemetry={"metrics_enabled": False})


def router() -> EventRouter:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    return router


def container(
    settings: Settings, name: str = "billing", handlers: EventRouter | None = None, more: Sequence[Provider] = ()
) -> AsyncContainer:
    return make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(handlers or router()),
        *more,
        context={Settings: settings, ServiceName: ServiceName(name)},
        validation_settings=STRICT_VALIDATION,
    )


async def failure_of(service: Service, caplog: pytest.LogCaptureFixture) -> str:
    """Return the log message about a service that cannot start."""
    with caplog.at_level(logging.ERROR):
        assert await ServiceGroup([service], SETTINGS).run() == 1
    (record,) = [record for record in caplog.records if "failed" in record.message]
    assert record.exc_info is None, "the message needs no traceback"
    return record.message


async def test_a_service_with_the_container_of_another_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """They would share their keys, so that each event would be handled by only one of them."""
    message = await failure_of(Service("shipping", container=container), caplog)

    assert "service shipping uses the container of billing" in message
    assert 'ServiceName("shipping")' in message


async def test_a_service_without_handlers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def empty(settings: Settings) -> AsyncContainer:
        return container(settings, handlers=EventRouter())

    assert "has no topics" in await failure_of(Service("billing", container=empty), caplog)


class Hanging(Provider):
    """A publisher that is closed before the store, and ends `close` in an unusual way."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(scope=Scope.APP)
        self._close = close
        self.closed_store = False

    @provide(override=True)
    async def publisher(self, settings: Settings, store: IdempotencyRepository) -> AsyncIterable[EventPublisher]:
        yield EventPublisher(settings.kafka)
        await self._close()

    @provide(override=True)
    async def store(self) -> AsyncIterable[IdempotencyRepository]:
        yield MemoryIdempotencyRepository()
        self.closed_store = True


async def cancelled() -> None:
    raise asyncio.CancelledError


async def exiting() -> None:
    sys.exit(5)


@pytest.mark.parametrize("close", [wait_forever, cancelled, exiting])
async def test_the_store_is_closed_although_another_object_does_not_close(
    close: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_group, "_FIRST_CLOSE_SECONDS", 0.05)
    hanging = Hanging(close)

    def without_topics(settings: Settings) -> AsyncContainer:
        return container(settings, handlers=EventRouter(), more=[hanging])

    assert await ServiceGroup([Service("billing", container=without_topics)], SETTINGS).run() == 1

    assert hanging.closed_store


async def test_a_container_that_is_not_async_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    service = Service("billing", container=lambda settings: make_container())  # type: ignore[arg-type,return-value]

    assert "return make_async_container(…) from a plain def" in await failure_of(service, caplog)


@pytest.mark.scenario(99)
async def test_a_missing_dependency_of_a_handler_is_reported_without_validation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Payments: ...

    async def charge(event: BaseEvent, payments: object) -> None: ...

    charge.__annotations__ = {"event": OrderPlaced, "payments": cast(Any, FromDishka)[Payments]}
    handlers = EventRouter()
    handlers.on(OrderPlaced)(charge)

    incomplete_providers = [
        KafkaProvider(),
        DispatcherProvider(handlers),
    ]

    assert "Payments" in await failure_of(Service("billing", providers=incomplete_providers), caplog)


async def test_on_metrics_is_called_with_the_address_of_the_endpoint() -> None:
    addresses: list[tuple[str, int]] = []
    settings = Settings(store={"kind": "memory"}, telemetry={"metrics_host": "127.0.0.1", "metrics_port": 0})
    service = Service("billing", container=lambda settings: make_container())  # type: ignore[arg-type,return-value]

    await ServiceGroup([service], settings, lambda host, port: addresses.append((host, port))).run()

    ((host, port),) = addresses
    assert host == "127.0.0.1"
    assert port > 0


async def test_if_kafka_and_the_store_are_down_both_are_reported() -> None:
    broker, store = reserve_port(), reserve_port()
    settings = Settings(
        kafka={"bootstrap_servers": f"127.0.0.1:{broker}"},
        store={"url": f"redis://127.0.0.1:{store}/0", "timeout_seconds": 0.2},
        telemetry={"metrics_enabled": False},
    )
    group = ServiceGroup([Service("billing", container=container)], settings)
    running = asyncio.create_task(group.run())

    def reason() -> str:
        return group.reports()[0].reason

    await eventually(lambda: f"127.0.0.1:{broker}" in reason() and f"127.0.0.1:{store}" in reason(), state=reason)
    file = StringIO()
    Console(width=400, file=file).print(report_table(group.reports(), 400))
    message = file.getvalue()
    group.stop()
    await running

    assert f"cannot reach Kafka at 127.0.0.1:{broker}" in message
    assert f"no connection to Redis: connection refused (Error 111 connecting to 127.0.0.1:{store}" in message


class Panic(BaseException):
    """As the panics of Rust extensions."""


@pytest.mark.parametrize(
    "error",
    [Panic("broken"), GeneratorExit(), SystemExit(0), asyncio.CancelledError(), BaseExceptionGroup("g", [Panic()])],
    ids=lambda error: type(error).__name__,
)
async def test_a_service_that_ends_with_any_error_has_failed(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(settings: Settings) -> AsyncContainer:
        raise error

    group = ServiceGroup([Service("billing", container=broken)], SETTINGS)
    with caplog.at_level(logging.ERROR):
        assert await group.run() == 1

    assert "service billing failed" in caplog.messages
    assert group.reports()[0].state == "failed"
    assert not group.health().live


async def test_a_service_that_is_cancelled_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(running: RunningService) -> None:
        await wait_forever()

    running = RunningService(Service("billing", container=container), SETTINGS, IsolationGate())
    with mock.patch.object(RunningService, "_run", serve):
        task = asyncio.create_task(running.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    assert task.cancelled()
    assert running.error is None
    assert "service billing failed" not in caplog.messages
