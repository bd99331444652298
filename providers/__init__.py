"""The reference platform, wired: `integr8s-idem run providers:platform`."""

from __future__ import annotations

from integr8s_idem import Platform, Service
from providers.containers import (
    coordinator_container,
    k8s_worker_container,
    result_processor_container,
    saga_orchestrator_container,
)
from providers.settings import PlatformSettings
from services.background import coordinator_sweep, pod_checks, saga_sweep

platform = Platform(
    Service(
        "coordinator",
        container=coordinator_container,
        group_id="execution-coordinator",
        background=[coordinator_sweep],
    ),
    Service("k8s-worker", container=k8s_worker_container, background=[pod_checks]),
    Service("result-processor", container=result_processor_container),
    Service("saga-orchestrator", container=saga_orchestrator_container, background=[saga_sweep]),
    settings=PlatformSettings,
)
