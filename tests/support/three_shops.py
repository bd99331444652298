"""Three services with the same event: guarded by event id, guarded by content, and unguarded."""

from __future__ import annotations

from integr8s_idem import EventRouter, KeyStrategy, Platform, Service
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from tests.support.shop import OrderPlaced

router = EventRouter()


@router.on(OrderPlaced)
async def charge(event: OrderPlaced) -> None:
    raise AssertionError("explain must not run the handler")


platform = Platform(
    Service(
        "billing",
        providers=[
            IdempotencyProvider(),
            KafkaProvider(),
            IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.EVENT_BASED),
        ],
    ),
    Service(
        "fraud",
        providers=[
            IdempotencyProvider(),
            KafkaProvider(),
            IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.CONTENT_HASH),
        ],
    ),
    Service("audit", providers=[KafkaProvider(), DispatcherProvider(router)]),
)
