"""What runs: `integr8s-idem run examples.billing.workers:platform`."""

from __future__ import annotations

from integr8s_idem import Platform, Service

from .containers import audit_container, billing_container

platform = Platform(
    Service("billing", container=billing_container),  # topics follow from the router's events; topics=[...] overrides
    Service("audit", container=audit_container),
)
