"""Providers decide who gets what: billing is guarded, audit is not."""

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
    """The user's own."""

    payments = provide(Payments, scope=Scope.APP)


class AuditProvider(Provider):
    """The user's own."""

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
"""Each order is charged once."""

audit = Service(
    "audit",
    providers=[
        KafkaProvider(),
        DispatcherProvider(audit_router),  # plain: its handlers are repeatable by nature
        AuditProvider(),
    ],
)
"""Keeps the books."""
