"""Run checks concurrently with a timeout; a failing check is a finding and does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.worker.client_options import bounded

Check: TypeAlias = Callable[[], Awaitable[list[Finding]]]
"""Returns the findings of one check."""

TIMEOUT_SECONDS: Final = 30.0
"""Timeout of a check in seconds; its calls have shorter timeouts."""


async def findings_of(checks: Mapping[str, Check], timeout: float = TIMEOUT_SECONDS) -> list[Finding]:
    """Run all checks and return their findings in order."""
    found = await asyncio.gather(*(_run(name, check, timeout) for name, check in checks.items()))
    return [finding for some in found for finding in some]


async def _run(name: str, check: Check, timeout: float) -> list[Finding]:
    async def run() -> list[Finding]:
        return await check()

    cost = "the findings of this check are unknown"
    try:
        return await bounded(run(), timeout)
    except TimeoutError as error:
        return [
            Finding(
                Code.CHECK_TIMEOUT,
                Severity.ERROR,
                name,
                f"the check timed out: {error}",
                cost,
                "find out why the server does not respond",
            )
        ]
    except Exception as error:  # noqa: BLE001  # reported as a finding, so that the other checks are reported as well
        what = f"the check failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "report this bug of integr8s-idem"
        return [Finding(Code.CHECK_FAILED, Severity.ERROR, name, what, cost, remedy)]
