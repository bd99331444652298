"""What doctor finds, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from integr8s_idem.config import Settings, StoreSettings
from integr8s_idem.doctor import Asked, examined
from integr8s_idem.doctor.store import look_at_store
from integr8s_idem.findings import Finding, Severity
from integr8s_idem.worker import Platform

KEPT_FOR_EIGHT_DAYS = "[idempotency]\ndefault_ttl_seconds = 691_200\n"
"""Longer than topics keep events by default."""


def codes(findings: Iterable[Finding]) -> list[str]:
    """Those of what is to be mended."""
    return [finding.code.value for finding in findings if finding.severity is not Severity.INFO]


async def found_in(text: str, folder: Path, platform: Platform | None = None) -> list[Finding]:
    """All that a whole examination finds with such a settings.toml."""
    file = folder / "settings.toml"
    file.write_text(text)
    return await examined(Asked(file, platform))


async def found_in_store(store: StoreSettings, now: Callable[[], float] = time.time) -> list[Finding]:
    """What is found about a store alone."""
    return await look_at_store(Settings(store=store), now)
