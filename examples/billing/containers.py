"""Providers decide who gets what: billing is guarded, audit is not."""

from __future__ import annotations

from datetime import timedelta

from dishka import Provider, Scope, provide

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

from .handlers import audit_router, router
from .payments import Audit, Payments


class PaymentsProvider(Provider):
    """The user's own."""

    payments = provide(Payments, scope=Scope.APP)


class AuditProvider(Provider):
    """The user's own."""

    audit = provide(Audit, scope=Scope.APP)


def billing_container(settings: Settings) -> AsyncContainer:
    """Each order is charged once."""
    return make_async_container(
        IdempotencyProvider(),  # settings, store by settings, manager, telemetry
        KafkaProvider(),  # publisher
        IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.EVENT_BASED, ttl=timedelta(days=8)),
        PaymentsProvider(),
        context={Settings: settings, ServiceName: ServiceName("billing")},
        validation_settings=STRICT_VALIDATION,
    )


def audit_container(settings: Settings) -> AsyncContainer:
    """Plain: its handlers are repeatable by nature."""
    return make_async_container(
        KafkaProvider(),
        DispatcherProvider(audit_router),
        AuditProvider(),
        context={Settings: settings, ServiceName: ServiceName("audit")},
        validation_settings=STRICT_VALIDATION,
    )
