"""Checks side by side, each bounded in time; one that breaks says so and hides no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.worker.client_options import bounded

Check: TypeAlias = Callable[[], Awaitable[list[Finding]]]
"""Looks at one thing."""

PATIENCE: Final = 30.0
"""Seconds that a check may take; each of its calls has a shorter time of its own."""


async def findings_of(checks: Mapping[str, Check], patience: float = PATIENCE) -> list[Finding]:
    """What all of them find, in their order."""
    found = await asyncio.gather(*(_checked(name, check, patience) for name, check in checks.items()))
    return [finding for some in found for finding in some]


async def _checked(name: str, check: Check, patience: float) -> list[Finding]:
    async def look() -> list[Finding]:
        return await check()

    cost = "what it would have found stays unseen"
    try:
        return await bounded(look(), patience)
    except TimeoutError as error:
        return [
            Finding(
                Code.CHECK_TIMEOUT,
                Severity.ERROR,
                name,
                f"the check did not end: {error}",
                cost,
                "see whether it hangs",
            )
        ]
    except Exception as error:  # noqa: BLE001  # told as a finding, so that the others are told, too
        told = f"the check itself failed by {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        mend = "this is a bug of integr8s-idem: report it"
        return [Finding(Code.CHECK_FAILED, Severity.ERROR, name, told, cost, mend)]
