"""Three services that read one event: guarded by its id, guarded by its content, and not guarded."""

from __future__ import annotations

from integr8s_idem import EventRouter, KeyStrategy, Platform, Service, Settings
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
from tests.support.shop import OrderPlaced

router = EventRouter()


@router.on(OrderPlaced)
async def charge(event: OrderPlaced) -> None:
    raise AssertionError("to explain is not to handle")


def _guarded(name: str, strategy: KeyStrategy, settings: Settings) -> AsyncContainer:
    return make_async_container(
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router, key_strategy=strategy),
        context={Settings: settings, ServiceName: ServiceName(name)},
        validation_settings=STRICT_VALIDATION,
    )


def billing(settings: Settings) -> AsyncContainer:
    return _guarded("billing", KeyStrategy.EVENT_BASED, settings)


def fraud(settings: Settings) -> AsyncContainer:
    return _guarded("fraud", KeyStrategy.CONTENT_HASH, settings)


def audit(settings: Settings) -> AsyncContainer:
    return make_async_container(
        KafkaProvider(),
        DispatcherProvider(router),
        context={Settings: settings, ServiceName: ServiceName("audit")},
        validation_settings=STRICT_VALIDATION,
    )


platform = Platform(
    Service("billing", container=billing), Service("fraud", container=fraud), Service("audit", container=audit)
)
