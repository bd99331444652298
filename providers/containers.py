"""What each service's container gets; read from top to bottom, it is the table of who gets what.

Idempotent or plain, by which key, for how long: one line of each function.  Handlers do not know.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from dishka import Provider
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import KeyStrategy, Settings
from integr8s_idem.integrations.dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    make_async_container,
)
from providers.services import (
    CoordinatorProvider,
    DatabaseProvider,
    K8sWorkerProvider,
    ResultProcessorProvider,
    SagaProvider,
    TransactionProvider,
)
from providers.settings import PlatformSettings
from services.coordinator.handlers import router as coordinator_router
from services.k8s_worker.handlers import router as k8s_worker_router
from services.result_processor.handlers import router as result_processor_router
from services.saga_orchestrator.handlers import router as saga_orchestrator_router
from services.settings import PlatformSection

logger = logging.getLogger(__name__)


def coordinator_container(settings: PlatformSettings) -> AsyncContainer:
    """Admits executions.  Each event counts once, by its id."""
    return _container(
        "coordinator",
        settings,
        IdempotencyProvider(),
        IdempotentDispatcherProvider(
            coordinator_router, key_strategy=KeyStrategy.EVENT_BASED, ttl=timedelta(seconds=7_200)
        ),
        TransactionProvider(),
        CoordinatorProvider(),
    )


def k8s_worker_container(settings: PlatformSettings) -> AsyncContainer:
    """Runs scripts.  Equal commands are one command, whatever their ids."""
    return _container(
        "k8s-worker",
        settings,
        IdempotencyProvider(),
        IdempotentDispatcherProvider(
            k8s_worker_router, key_strategy=KeyStrategy.CONTENT_HASH, ttl=timedelta(seconds=3_600)
        ),
        K8sWorkerProvider(),
    )


def result_processor_container(settings: PlatformSettings) -> AsyncContainer:
    """Keeps results.  Equal outcomes are one outcome, whatever their ids.

    Transactional where its records are in the database that it writes results into.
    """
    return _container(
        "result-processor",
        settings,
        IdempotencyProvider(),
        IdempotentDispatcherProvider(
            result_processor_router,
            key_strategy=KeyStrategy.CONTENT_HASH,
            ttl=timedelta(seconds=7_200),
            transaction=_transaction(settings),
        ),
        TransactionProvider(),
        ResultProcessorProvider(),
    )


def _transaction(settings: PlatformSettings) -> type[AsyncConnection] | None:
    """What makes the result processor transactional, if it can be; says in the log which it is."""
    store, platform = settings.places
    if settings.records_are_in_the_platforms_database:
        logger.info("result-processor: results commit together with their records, in %s", store)
        return AsyncConnection
    level = logging.WARNING if settings.may_be_one_database else logging.INFO
    hint = "; if these are one database, write the same address in both" if settings.may_be_one_database else ""
    told = "result-processor: results commit before their records: [store] is %s, [platform] is %s%s"
    logger.log(level, told, store, platform, hint)
    return None


def saga_orchestrator_container(settings: PlatformSettings) -> AsyncContainer:
    """Leads executions.  Plain: a saga's own state tells what is new."""
    return _container(
        "saga-orchestrator",
        settings,
        DispatcherProvider(saga_orchestrator_router),
        SagaProvider(),
    )


def _container(name: str, settings: PlatformSettings, *providers: Provider) -> AsyncContainer:
    """What all services have, and `providers`."""
    return make_async_container(
        KafkaProvider(),
        DatabaseProvider(),
        *providers,
        context={Settings: settings, ServiceName: ServiceName(name), PlatformSection: settings.platform},
        validation_settings=STRICT_VALIDATION,
    )
