"""Compare the figures with their targets and the last commit: `python -m benchmarks.guard`.

Fails if a figure is much worse than the committed one, which is compared only if it was measured on the same kind of
machine, or misses its target by more than a tenth without a known reason (`limits.py`). This is a part of `make bench`,
not of the tests, which must not depend on the load of the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.markdown import Results
from benchmarks.tables import LATEST, ROOT
from benchmarks.targets import TARGETS, Target

MIN_ROUNDS: Final = 5


@dataclass(frozen=True)
class Finding:
    """The result of checking one figure."""

    key: str
    target: Target
    now: float | None
    before: float | None
    wrong: str
    """The problem; empty if there is none."""

    def __str__(self) -> str:
        now, before = ("-" if value is None else f"{value:.4g}" for value in (self.now, self.before))
        return f"{self.key:30} {now:>8} {self.target!s:>12} {before:>8}  {self.wrong or self._status()}"

    def _status(self) -> str:
        """Describe a figure without a problem."""
        if self.now is None:
            return f"not measured: needs `{self.target.needs}`"
        if self.target.forbidden:
            return "has no target: a measured limit forbids it"
        if self.target.reached(self.now):
            return "ok"
        if self.target.reached(self.now, margin=self.target.margin):
            return f"within {self.target.margin:.0%} of its target"
        return "misses its target for a known reason"


def findings(now: Results, before: Results) -> list[Finding]:
    """Check each target.  Figures of another kind of machine are not compared."""
    if now.get("machine.cpu") != before.get("machine.cpu"):
        before = {}
    return [
        Finding(
            key,
            target,
            now.get(key),
            before.get(key),
            _problem(target, now.get(key), before.get(key), _sample_size(now, key)),
        )
        for key, target in TARGETS.items()
    ]


def _sample_size(results: Results, key: str) -> int:
    """Return the number of rounds, or records, that a figure is the median of."""
    number: int = results.get(f"{key}.rounds", results.get(f"{key}.records", 0))
    return number


def _problem(target: Target, now: float | None, before: float | None, rounds: int) -> str:
    if now is None:
        return "" if target.needs else "not measured"
    if rounds < MIN_ROUNDS:
        return f"has {rounds} rounds, fewer than {MIN_ROUNDS}"
    if before is not None and target.worse(now, before):
        return "is worse than the committed figure"
    if not (target.limit or target.forbidden) and not target.reached(now, margin=target.margin):
        return "misses its target"
    return ""


def committed() -> Mapping[str, Any]:
    """Return the figures of the last commit, or none if there is no such commit."""
    name = f"HEAD:{LATEST.relative_to(ROOT)}"
    shown = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, check=False)
    results: dict[str, Any] = json.loads(shown.stdout) if shown.returncode == 0 else {}
    return results


def main() -> int:
    ArgumentParser(prog="python -m benchmarks.guard", description=__doc__).parse_args()
    found = findings(json.loads(LATEST.read_text(encoding="utf-8")), committed())
    print(f"{'figure':30} {'now':>8} {'target':>12} {'before':>8}")
    print("\n".join(map(str, found)))
    problem_count = sum(bool(finding.wrong) for finding in found)
    aimed = [finding for finding in found if finding.now is not None and not finding.target.forbidden]
    reached = sum(finding.now is not None and finding.target.reached(finding.now) for finding in aimed)
    print(f"{len(found) - problem_count} of {len(found)} figures pass; {reached} of {len(aimed)} targets are reached")
    return 1 if problem_count else 0


if __name__ == "__main__":
    sys.exit(main())
