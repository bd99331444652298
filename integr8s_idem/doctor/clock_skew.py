"""Compare the clocks of this machine and the store.  Pure."""

from __future__ import annotations

from typing import Final

from integr8s_idem.diagnostics import Code, Finding, Severity

ALLOWED_SECONDS: Final = 2.0
"""Differences up to this are not reported."""


def skew_findings(store_seconds: float, before: float, after: float) -> list[Finding]:
    """Compare the store's clock with this machine's just before and after, all in seconds since 1970."""
    if before - ALLOWED_SECONDS <= store_seconds <= after + ALLOWED_SECONDS:
        return []
    skew = store_seconds - (before + after) / 2
    way = "ahead of" if skew > 0 else "behind"
    return [
        Finding(
            Code.CLOCK_SKEW,
            Severity.WARNING,
            "clocks",
            f"the store's clock is {abs(skew):.1f} s {way} this machine's",
            "no decision compares the clocks, but the times of records, logs and messages do not match, and correcting "
            "the store's clock extends or ends leases at that moment",
            "synchronize both machines with the same time server",
        )
    ]
