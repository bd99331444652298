"""Background tasks of the services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from dishka import AsyncContainer
from sqlalchemy.exc import InterfaceError, OperationalError

from integr8s_idem.errors import PublishError
from integr8s_idem.worker import EventPublisher
from services.coordinator.scheduling import repair
from services.database import Database
from services.k8s_worker.worker import PodWorker
from services.saga_orchestrator.saga import Sagas
from services.settings import PlatformSection

PASSING: Final = (PublishError, OperationalError, InterfaceError, OSError)
"""Errors of unavailable brokers and databases, after which the next round retries.  Any other error is a bug."""

_log = logging.getLogger(__name__)


async def coordinator_sweep(container: AsyncContainer) -> None:
    """Schedule overdue executions again."""
    database = await container.get(Database)
    settings = await container.get(PlatformSection)
    publisher = await container.get(EventPublisher)
    await every(settings.sweep_interval_seconds, lambda: repair(database, settings, publisher))


async def saga_sweep(container: AsyncContainer) -> None:
    """Expire overdue sagas, and publish the pending commands of dead workers."""
    sagas = await container.get(Sagas)
    settings = await container.get(PlatformSection)
    await every(settings.sweep_interval_seconds, sagas.sweep)


async def pod_checks(container: AsyncContainer) -> None:
    """Report the runs of this process as alive, and end those to be deleted."""
    pods = await container.get(PodWorker)
    settings = await container.get(PlatformSection)
    await every(settings.pod_check_interval_seconds, pods.check)


async def every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Call `work` every `seconds`, forever."""
    while True:
        try:
            await work()
        except PASSING as error:
            _log.warning("%s; trying again in %g s", error, seconds)
        await asyncio.sleep(seconds)
