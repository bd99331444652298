"""Check whether the native code is used here."""

from __future__ import annotations

from typing import Final

from integr8s_idem._util.speedups import DISTRIBUTION, Speedups
from integr8s_idem.diagnostics import Code, Finding, Severity

NATIVE_CODE: Final = "native code"
_COST: Final = "workers with this installation use Python code, which takes more CPU time"


def check_speedups(loaded: Speedups) -> Finding:
    """Return what is used in this installation; a warning if native code is neither used nor disabled."""
    if loaded.problem:
        what = f"{DISTRIBUTION} cannot be used: {loaded.problem}"
        return Finding(Code.SPEEDUPS_UNUSABLE, Severity.WARNING, NATIVE_CODE, what, _COST, loaded.remedy)
    return Finding(Code.SPEEDUPS_SEEN, Severity.INFO, NATIVE_CODE, loaded.description, "", "")
