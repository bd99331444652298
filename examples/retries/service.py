"""The payment service."""

from __future__ import annotations

from examples.retries.payments import ChargeRequested, Gateway, GatewayDownError, Retries
from integr8s_idem import EventRouter, Platform, Service
from integr8s_idem.failures import retry_later
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider

DELAY_SECONDS = 2


def platform_with(gateway: Gateway, delayed_retries: Retries) -> Platform:
    """Return a platform whose service charges orders, and retries those that the gateway declines after a delay."""
    router = EventRouter()

    @router.on(
        ChargeRequested,
        failures=[retry_later(GatewayDownError, delay=DELAY_SECONDS)],
        delayed_retries=delayed_retries,
    )
    async def charge(event: ChargeRequested) -> None:
        await gateway.charge(event.number)

    return Platform(
        Service(
            delayed_retries, providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)]
        )
    )
