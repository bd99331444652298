"""The reference platform with one more service, which observes: `run tests.support.audited_platform:platform`."""

from __future__ import annotations

from integr8s_idem import EventRouter, Platform, Service
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from providers.containers import coordinator, k8s_worker, result_processor, saga_orchestrator
from providers.settings import PlatformSettings
from services.events import PodCreated

router = EventRouter()


@router.on(PodCreated)
async def handle(event: PodCreated) -> None:
    """Do nothing."""


audit = Service("audit", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])

platform = Platform(coordinator, k8s_worker, result_processor, saga_orchestrator, audit, settings=PlatformSettings)
