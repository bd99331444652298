"""Containers of the services. Their providers make billing idempotent, and leave audit plain."""

from __future__ import annotations

from datetime import timedelta

from dishka import Provider, Scope, provide

from integr8s_idem import KeyStrategy, Service
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)

from .handlers import audit_router, router
from .payments import Audit, Payments


class PaymentsProvider(Provider):
    """The application's own dependencies."""

    payments = provide(Payments, scope=Scope.APP)


class AuditProvider(Provider):
    """The application's own dependencies."""

    audit = provide(Audit, scope=Scope.APP)


billing = Service(
    "billing",
    providers=[
        IdempotencyProvider(),  # the store that the settings name, and the guard
        KafkaProvider(),  # the publisher
        IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.EVENT_BASED, ttl=timedelta(days=8)),
        PaymentsProvider(),
    ],
)
"""Charges each order once."""

audit = Service(
    "audit",
    providers=[
        KafkaProvider(),
        DispatcherProvider(audit_router),  # plain: its handlers are repeatable by nature
        AuditProvider(),
    ],
)
"""Records payments."""
