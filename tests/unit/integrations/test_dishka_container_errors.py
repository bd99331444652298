"""`run`, `graph` and `doctor` report a broken container in the same sentence, with the remedy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from dishka import STRICT_VALIDATION, Provider, Scope, make_async_container, provide
from sqlalchemy.ext.asyncio import AsyncSession

from integr8s_idem import EventRouter, IdempotencyManager, Platform, Service, Settings
from integr8s_idem.doctor.application_checks import check_application
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.operations.graphs import make_graphs
from integr8s_idem.runtime import ServiceGroup
from tests.support.workers import OrderPlaced

if TYPE_CHECKING:
    from tests.support.workers import Unimported  # type: ignore[attr-defined]

SETTINGS = Settings(store={"kind": "memory"}, telemetry={"metrics_enabled": False})


class Payments: ...


class Ledger:
    def __init__(self, payments: Payments) -> None: ...


class LedgerProvider(Provider):
    scope = Scope.APP
    ledger = provide(Ledger)


class BrokenManagerProvider(Provider):
    scope = Scope.APP

    @provide
    def manager(self) -> IdempotencyManager:
        raise RuntimeError("no card reader")


plain, direct, indirect, unknown = (EventRouter() for _ in range(4))


@plain.on(OrderPlaced)
async def handle(event: OrderPlaced) -> None: ...


@direct.on(OrderPlaced)
async def charge(event: OrderPlaced, payments: FromDishka[Payments]) -> None: ...


@indirect.on(OrderPlaced)
async def book(event: OrderPlaced, ledger: FromDishka[Ledger]) -> None: ...


@unknown.on(OrderPlaced)
async def ship(event: OrderPlaced, parcels: FromDishka[Unimported]) -> None: ...


def container(
    *providers: Callable[[], Provider], router: EventRouter = plain, named: bool = True, **options: Any
) -> Callable[[Settings], Any]:
    def make(settings: Settings) -> Any:
        context = {Settings: settings, ServiceName: ServiceName("billing")}
        return make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            IdempotentDispatcherProvider(router, **options),
            *(provider() for provider in providers),
            context={key: value for key, value in context.items() if named or key is not ServiceName},
            validation_settings=STRICT_VALIDATION,
        )

    return make


def without_parameters() -> Any: ...


async def with_await(settings: Settings) -> Any: ...


def failing(settings: Settings) -> Any:
    raise RuntimeError("no card reader")


BOTH = (IdempotencyProvider, KafkaProvider)
FAULTS: dict[str, tuple[Any, str]] = {
    "an application's provider": (
        container(*BOTH, router=direct),
        "cannot be created: nothing provides Payments, which handler charge asks for. Add a provider of Payments",
    ),
    "a dependency of an application's provider": (
        container(*BOTH, LedgerProvider, router=indirect),
        "cannot be created: nothing provides Payments, which Ledger asks for. Add a provider of Payments",
    ),
    "IdempotencyProvider": (
        container(KafkaProvider),
        "nothing provides IdempotencyManager, which IdempotentDispatcherProvider.dispatcher asks for. "
        "Add IdempotencyProvider()",
    ),
    "KafkaProvider": (container(IdempotencyProvider), "Add KafkaProvider()"),
    "ServiceName": (
        container(*BOTH, named=False),
        'Add ServiceName: ServiceName("billing") to the context of make_async_container',
    ),
    "AsyncSession": (
        container(*BOTH, transaction=AsyncSession),
        "nothing provides AsyncSession, which IdempotentDispatcherProvider(transaction=AsyncSession) asks for. "
        "Add a provider of AsyncSession with scope REQUEST that commits after its yield",
    ),
    "a dispatcher": (
        lambda settings: make_async_container(),
        "does not provide a dispatcher: nothing provides EventDispatcher. Add IdempotentDispatcherProvider(router) or",
    ),
    "an import": (
        container(*BOTH, router=unknown),
        'handler ship: its annotations use "Unimported", which module '
        "tests.unit.integrations.test_dishka_container_errors does not define at run time",
    ),
    "a parameter of the factory": (
        without_parameters,
        "its factory is called with the settings, but without_parameters() does not accept them",
    ),
    "a container": (with_await, "the factory of service billing returns an object of type coroutine"),
}


@pytest.mark.parametrize(("factory", "sentence"), FAULTS.values(), ids=FAULTS)
async def test_run_graph_and_doctor_report_the_missing_part_in_one_sentence(
    factory: Any, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service("billing", container=factory)
    platform = Platform(service)
    with pytest.raises(ApplicationError) as caught:
        await make_graphs(platform, SETTINGS)
    group = ServiceGroup([service], SETTINGS)
    with caplog.at_level(logging.ERROR):
        assert await group.run() == 1
    (record,) = caplog.records
    (finding,) = (await check_application(platform, SETTINGS)).findings

    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert record.getMessage() == f"service billing failed: ApplicationError: {message}"
    assert record.exc_info is None, "a traceback would hide the sentence"
    assert group.reports()[0].reason == message
    assert sentence in finding.what


@pytest.mark.parametrize(
    ("factory", "location"),
    [
        (
            failing,
            "the container of service billing cannot be created: RuntimeError: no card reader (raised in failing, ",
        ),
        (container(KafkaProvider, BrokenManagerProvider), "(raised in BrokenManagerProvider.manager, "),
    ],
)
def test_errors_of_application_code_are_logged_with_a_traceback(
    factory: Any, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service("billing", container=factory)
    with pytest.raises(ApplicationError) as caught:
        asyncio.run(make_graphs(Platform(service), SETTINGS))
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(ServiceGroup([service], SETTINGS).run()) == 1
    (record,) = caplog.records

    message = str(caught.value)
    assert location in message
    assert record.getMessage() == f"service billing failed: ApplicationError: {message}"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)


class EventPublisher:
    """An application class with the name of a library class."""


class Archive:
    def __init__(self, publisher: EventPublisher) -> None: ...


class ArchiveProvider(Provider):
    scope = Scope.APP
    archive = provide(Archive)


async def test_an_application_class_named_like_a_library_class_is_reported_as_its_own() -> None:
    with pytest.raises(ApplicationError, match=r"Add a provider of EventPublisher"):
        await make_graphs(Platform(Service("billing", container=container(*BOTH, ArchiveProvider))), SETTINGS)
