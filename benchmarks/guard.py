"""Hold the figures against their targets and the last commit: `python -m benchmarks.guard`.

Fails if one misses its target, or has fallen far behind what was committed.  A part of `make bench`, not of the tests:
a test must not depend on how busy a machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.markdown import Told
from benchmarks.tables import LATEST, ROOT
from benchmarks.targets import TARGETS, Target

MARGIN: Final = 0.1
"""Part of a target by which a figure may miss it: two runs on one machine differ by as much."""


@dataclass(frozen=True)
class Finding:
    """About one figure."""

    key: str
    target: Target
    now: float | None
    before: float | None
    wrong: str
    """What is wrong with it; empty if nothing is."""

    def __str__(self) -> str:
        now, before = ("-" if value is None else f"{value:.4g}" for value in (self.now, self.before))
        return f"{self.key:30} {now:>8} {self.target!s:>12} {before:>8}  {self.wrong or 'ok'}"


def findings(now: Told, before: Told) -> list[Finding]:
    """One for each target."""
    return [
        Finding(key, target, now.get(key), before.get(key), _wrong(target, now.get(key), before.get(key)))
        for key, target in TARGETS.items()
    ]


def _wrong(target: Target, now: float | None, before: float | None) -> str:
    if now is None:
        return "not measured"
    if before is not None and target.worse(now, before):
        return "fell behind what is committed"
    if not target.limit and not target.reached(now, margin=min(MARGIN, target.noise)):
        return "misses its target"
    return ""


def committed() -> Mapping[str, Any]:
    """The figures of the last commit; none outside a repository, or before the first."""
    name = f"HEAD:{LATEST.relative_to(ROOT)}"
    said = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, check=False)
    told: dict[str, Any] = json.loads(said.stdout) if said.returncode == 0 else {}
    return told


def main() -> int:
    found = findings(json.loads(LATEST.read_text(encoding="utf-8")), committed())
    print(f"{'figure':30} {'now':>8} {'target':>12} {'before':>8}")
    print("\n".join(map(str, found)))
    wrong = sum(bool(finding.wrong) for finding in found)
    print(f"{len(found) - wrong} of {len(found)} figures hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
