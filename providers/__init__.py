"""The reference platform: `integr8s-idem run providers:platform`."""

from __future__ import annotations

from integr8s_idem import Platform
from providers.containers import coordinator, k8s_worker, result_processor, saga_orchestrator
from providers.settings import PlatformSettings

platform = Platform(coordinator, k8s_worker, result_processor, saga_orchestrator, settings=PlatformSettings)
