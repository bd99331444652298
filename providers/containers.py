"""The container of each service, with its dispatcher: idempotent or plain, with which key, for how long.

Handlers do not depend on this choice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from dishka import Provider
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import KeyStrategy, Service
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from providers.services import (
    CoordinatorProvider,
    DatabaseProvider,
    K8sWorkerProvider,
    ResultProcessorProvider,
    SagaProvider,
    TransactionProvider,
)
from providers.settings import K8S_WORKER, PlatformSettings
from services.background import coordinator_sweep, pod_checks, saga_sweep
from services.coordinator.handlers import router as coordinator_router
from services.k8s_worker.handlers import router as k8s_worker_router
from services.result_processor.handlers import router as result_processor_router
from services.saga_orchestrator.handlers import router as saga_orchestrator_router

logger = logging.getLogger(__name__)

coordinator = Service(
    "coordinator",
    providers=[
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(
            coordinator_router, key_strategy=KeyStrategy.EVENT_BASED, ttl=timedelta(seconds=7_200)
        ),
        DatabaseProvider(),
        TransactionProvider(),
        CoordinatorProvider(),
    ],
    group_id="execution-coordinator",
    background=[coordinator_sweep],
)
"""Admits executions. Idempotent by event id."""

k8s_worker = Service(
    K8S_WORKER,
    providers=[
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(
            k8s_worker_router,
            key_strategy=KeyStrategy.CONTENT_HASH,
            fields=["execution_id", "saga_id"],
            ttl=timedelta(seconds=3_600),
        ),
        DatabaseProvider(),
        K8sWorkerProvider(),
    ],
    background=[pod_checks],
)
"""Runs scripts. Idempotent by content: the commands of a kind that one saga sends for an execution count as one,
regardless of their ids.  Without room in the cluster, a command waits in a retry topic.
"""


def _result_processor_providers(settings: PlatformSettings) -> Sequence[Provider]:
    return [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(
            result_processor_router,
            key_strategy=KeyStrategy.CONTENT_HASH,
            fields=["execution_id"],
            ttl=timedelta(seconds=7_200),
            transaction=_transaction(settings),
        ),
        DatabaseProvider(),
        TransactionProvider(),
        ResultProcessorProvider(),
    ]


def _transaction(settings: PlatformSettings) -> type[AsyncConnection] | None:
    """Return the connection type for a transactional result processor, if possible, and log the choice."""
    store, platform = settings.places
    if settings.records_are_in_the_platforms_database:
        logger.info("result-processor: results commit together with their records, in %s", store)
        return AsyncConnection
    level = logging.WARNING if settings.may_be_one_database else logging.INFO
    hint = "; if they are the same database, use one address for both" if settings.may_be_one_database else ""
    message = "result-processor: results commit before their records: [store] is %s, [platform] is %s%s"
    logger.log(level, message, store, platform, hint)
    return None


result_processor = Service("result-processor", providers=_result_processor_providers)
"""Stores results. Idempotent by content: the outcomes of a kind of one execution count as one, regardless of their ids.

Transactional if its records are in the database that holds the results.
"""

saga_orchestrator = Service(
    "saga-orchestrator",
    providers=[
        KafkaProvider(),
        DispatcherProvider(saga_orchestrator_router),
        DatabaseProvider(),
        SagaProvider(),
    ],
    background=[saga_sweep],
)
"""Runs the sagas of executions. Plain: the state of a saga shows which events are new."""
