"""Hold the figures against their targets and the last commit: `python -m benchmarks.guard`.

Fails if one has fallen far behind what was committed, or misses its target by more than a tenth for no reason that is
known (`limits.py`).  A part of `make bench`, not of the tests: a test must not depend on how busy a machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.markdown import Told
from benchmarks.tables import LATEST, ROOT
from benchmarks.targets import TARGETS, Target

MARGIN: Final = 0.1
"""Part of a target by which a figure may miss it: two runs on one machine differ by as much."""

LEAST_ROUNDS: Final = 5


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
        return f"{self.key:30} {now:>8} {self.target!s:>12} {before:>8}  {self.wrong or self._held()}"

    def _held(self) -> str:
        """What is to be said of a figure with which nothing is wrong."""
        assert self.now is not None
        if self.target.reached(self.now):
            return "ok"
        if self.target.reached(self.now, margin=_margin(self.target)):
            return f"within {_margin(self.target):.0%} of its target"
        return "misses its target, with a known limit"


def findings(now: Told, before: Told) -> list[Finding]:
    """One for each target."""
    return [
        Finding(
            key, target, now.get(key), before.get(key), _wrong(target, now.get(key), before.get(key), _of(now, key))
        )
        for key, target in TARGETS.items()
    ]


def _of(told: Told, key: str) -> int:
    """How many rounds a figure is the median of, or how many records."""
    number: int = told.get(f"{key}.rounds", told.get(f"{key}.records", 0))
    return number


def _margin(target: Target) -> float:
    return min(MARGIN, target.noise)


def _wrong(target: Target, now: float | None, before: float | None, rounds: int) -> str:
    if now is None:
        return "not measured"
    if rounds < LEAST_ROUNDS:
        return f"of {rounds} rounds, not of {LEAST_ROUNDS} or more"
    if before is not None and target.worse(now, before):
        return "fell behind what is committed"
    if not target.limit and not target.reached(now, margin=_margin(target)):
        return "misses its target"
    return ""


def committed() -> Mapping[str, Any]:
    """The figures of the last commit; none outside a repository, or before the first."""
    name = f"HEAD:{LATEST.relative_to(ROOT)}"
    said = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, check=False)
    told: dict[str, Any] = json.loads(said.stdout) if said.returncode == 0 else {}
    return told


def main() -> int:
    ArgumentParser(prog="python -m benchmarks.guard", description=__doc__).parse_args()
    found = findings(json.loads(LATEST.read_text(encoding="utf-8")), committed())
    print(f"{'figure':30} {'now':>8} {'target':>12} {'before':>8}")
    print("\n".join(map(str, found)))
    wrong = sum(bool(finding.wrong) for finding in found)
    reached = sum(finding.now is not None and finding.target.reached(finding.now) for finding in found)
    print(f"{len(found) - wrong} of {len(found)} figures hold; {reached} of them reach their target")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
