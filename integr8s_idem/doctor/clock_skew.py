"""This machine's clock and the store's.  Pure."""

from __future__ import annotations

from typing import Final

from integr8s_idem.diagnostics import Code, Finding, Severity

ALLOWED_SECONDS: Final = 2.0
"""A difference that nobody needs to look at."""


def skew_findings(store_seconds: float, before: float, after: float) -> list[Finding]:
    """Compare what the store's clock said with ours, just before and after: all in seconds since 1970."""
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
            "no decision compares them, but times of records, logs and messages do not fit together, and a store's "
            "clock that is set right later lengthens or ends leases at that moment",
            "let both machines follow one time server",
        )
    ]
