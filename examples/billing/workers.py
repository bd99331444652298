"""The services that run: `integr8s-idem run examples.billing.workers:platform`."""

from __future__ import annotations

from integr8s_idem import Platform

from .containers import audit, billing

platform = Platform(billing, audit)
