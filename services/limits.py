"""Limits of requests.  The coordinator rejects requests beyond them, and the k8s worker does not run them."""

from __future__ import annotations

from services.events import ScriptRequest
from services.settings import PlatformSection


def exceeded_limit(request: ScriptRequest, settings: PlatformSection) -> str | None:
    """Return the limit that `request` exceeds, or `None`."""
    memory = request.memory_limit_mb or settings.default_memory_mb
    if request.timeout_seconds > settings.max_timeout_seconds:
        return f"timeout_seconds is {request.timeout_seconds:g}; the maximum is {settings.max_timeout_seconds:g}"
    if memory > settings.max_memory_mb:
        return f"memory_limit_mb is {memory}; the maximum is {settings.max_memory_mb}"
    if request.cpu_limit > settings.max_cpu:
        return f"cpu_limit is {request.cpu_limit:g}; the maximum is {settings.max_cpu:g}"
    return None
