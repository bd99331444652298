from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from dishka.provider import BaseProvider
from sqlalchemy import select

from integr8s_idem import EventDispatcher, EventPublisher, EventRouter, IdempotentEventDispatcher, KeyStrategy, Service
from integr8s_idem.config.durations import delay_in_name
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import DispatcherProvider, IdempotentDispatcherProvider
from integr8s_idem.runtime import make_container
from integr8s_idem.runtime.key_warnings import key_warnings
from providers import containers, platform
from providers.services import CoordinatorProvider
from providers.settings import PlatformSettings
from services.coordinator.admission import Admission
from services.coordinator.handlers import router as coordinator_router
from services.database import Database, results
from services.events import ExecutionCompleted, ExecutionRequested
from services.k8s_worker.handlers import CAPACITY_DELAY
from services.k8s_worker.worker import PodWorker
from services.result_processor.results import Results
from services.saga_orchestrator.saga import Sagas


@pytest.fixture
def settings(database_url: str) -> PlatformSettings:
    platform = {"database_url": database_url, "runner": "subprocess", "scripts_as_root": True}
    return PlatformSettings.model_validate({"store": {"kind": "memory"}, "platform": platform})


@pytest.mark.parametrize("service", platform.services.values(), ids=lambda service: service.name)
async def test_every_service_has_all_its_dependencies(service: Service, settings: PlatformSettings) -> None:
    container = make_container(service, settings)

    assert isinstance(await container.get(EventDispatcher), EventDispatcher)
    assert isinstance(await container.get(EventPublisher), EventPublisher)

    await container.close()


def test_the_keys_of_no_service_change_with_a_new_field_of_an_event(settings: PlatformSettings) -> None:
    assert key_warnings(platform, settings) == []


@pytest.mark.parametrize(
    ("service", "ttl", "strategy"),
    [
        (containers.coordinator, 7_200, KeyStrategy.EVENT_BASED),
        (containers.k8s_worker, 3_600, KeyStrategy.CONTENT_HASH),
        (containers.result_processor, 7_200, KeyStrategy.CONTENT_HASH),
        (containers.saga_orchestrator, None, None),
    ],
    ids=["coordinator", "k8s worker", "result processor", "saga orchestrator"],
)
async def test_each_service_gets_its_dispatcher(
    service: Service,
    ttl: int | None,
    strategy: KeyStrategy | None,
    settings: PlatformSettings,
) -> None:
    container = make_container(service, settings)
    dispatcher = await container.get(EventDispatcher)

    if ttl is None:
        assert type(dispatcher) is EventDispatcher
    else:
        assert isinstance(dispatcher, IdempotentEventDispatcher)
        handler = dispatcher.wrap(dispatcher.router.handlers[0])
        assert (handler.ttl, handler.resolver.strategy) == (timedelta(seconds=ttl), strategy)

    await container.close()


async def test_one_provider_replaces_the_dispatcher_of_a_service(settings: PlatformSettings) -> None:
    """Handlers and all other providers are unchanged."""
    plain = DispatcherProvider(coordinator_router)
    providers = [plain if isinstance(each, IdempotentDispatcherProvider) else each for each in coordinator_providers()]
    container = make_container(replace(containers.coordinator, providers=providers), settings)

    dispatcher = await container.get(EventDispatcher)

    assert type(dispatcher) is EventDispatcher
    assert dispatcher.router is coordinator_router
    await container.close()


async def test_two_dispatchers_in_one_container_are_refused(settings: PlatformSettings) -> None:
    """Otherwise the last one would silently win."""
    providers = [*coordinator_providers(), DispatcherProvider(EventRouter())]

    with pytest.raises(ApplicationError, match="EventDispatcher"):
        make_container(replace(containers.coordinator, providers=providers), settings)


async def test_a_container_without_a_dependency_of_a_handler_is_refused(settings: PlatformSettings) -> None:
    providers = [each for each in coordinator_providers() if not isinstance(each, CoordinatorProvider)]

    with pytest.raises(ApplicationError, match=r"nothing provides Admission, which handler .* asks for"):
        make_container(replace(containers.coordinator, providers=providers), settings)


def coordinator_providers() -> list[BaseProvider]:
    providers = containers.coordinator.providers
    assert isinstance(providers, list)
    return providers


async def test_a_failed_handler_changes_nothing_in_the_database(settings: PlatformSettings) -> None:
    container = make_container(containers.coordinator, settings)
    event = ExecutionRequested(execution_id="e1", script="print()")

    async def fail() -> None:
        async with container() as request:
            await (await request.get(Admission)).request("k1", event)
            raise RuntimeError("the handler failed")

    with pytest.raises(RuntimeError, match="the handler failed"):
        await fail()

    async with container() as request:
        decision = await (await request.get(Admission)).request("k2", event)
    assert [admitted.execution_id for admitted in decision.scheduled] == ["e1"]
    await container.close()


async def test_changes_by_a_handler_are_committed_when_its_scope_closes(settings: PlatformSettings) -> None:
    container = make_container(containers.result_processor, settings)
    database = await container.get(Database)

    async with container() as request:
        await (await request.get(Results)).store("k1", ExecutionCompleted(execution_id="e1"))

    async with database.reading() as connection:
        assert (await connection.execute(select(results.c.status))).scalar_one() == "completed"
    await container.close()


async def test_a_process_has_one_pod_worker(settings: PlatformSettings) -> None:
    """Handlers and background tasks share it."""
    container = make_container(containers.k8s_worker, settings)

    async with container() as first, container() as second:
        assert await first.get(PodWorker) is await second.get(PodWorker)

    await container.close()


async def test_the_saga_orchestrator_opens_no_idempotency_store(settings: PlatformSettings) -> None:
    container = make_container(containers.saga_orchestrator, settings)

    assert (await container.get(EventDispatcher)).manager is None
    assert isinstance(await container.get(Sagas), Sagas)

    await container.close()


def test_only_the_k8s_worker_has_retry_topics(settings: PlatformSettings) -> None:
    assert {name: settings.service(name).retry_topics for name in platform.services} == {
        "coordinator": (),
        "k8s-worker": ("5s",),
        "result-processor": (),
        "saga-orchestrator": (),
    }


@pytest.mark.parametrize("section", ["k8s-worker", "k8s_worker"])
def test_settings_replace_the_retry_topics_of_the_k8s_worker(section: str) -> None:
    own = {"services": {section: {"retry_topics": ["1m"], "concurrency": 3}}}

    found = PlatformSettings.model_validate(own).service("k8s-worker")

    assert (found.retry_topics, found.concurrency) == (("1m",), 3)


def test_a_command_waits_at_least_as_long_as_its_retry_topic(settings: PlatformSettings) -> None:
    """A shorter delay would make it wait in its topic for longer than its rule says."""
    assert [delay_in_name(tier) for tier in settings.service("k8s-worker").retry_topics] == [CAPACITY_DELAY]


def test_the_services_have_the_groups_of_the_specification() -> None:
    groups = {name: service.group_id or name for name, service in platform.services.items()}

    assert groups == {
        "coordinator": "execution-coordinator",
        "k8s-worker": "k8s-worker",
        "result-processor": "result-processor",
        "saga-orchestrator": "saga-orchestrator",
    }
