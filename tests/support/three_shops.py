"""Three services that read one event: guarded by its id, guarded by its content, and not guarded."""

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
    raise AssertionError("to explain is not to handle")


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
