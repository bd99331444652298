"""Format findings as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from integr8s_idem.diagnostics import Finding, Severity

STATUS: Final[Mapping[Severity, int]] = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
"""Exit statuses by severity; that of the worst finding is used."""

NO_PROBLEMS: Final = "no problems found"


def status_of(findings: Sequence[Finding]) -> int:
    """Return the exit status of the worst finding."""
    return max((STATUS[finding.severity] for finding in findings), default=0)


def as_text(findings: Sequence[Finding], *, verbose: bool = False) -> str:
    """Format one line for each finding: severity, code, place, problem, consequence, remedy."""
    shown = [finding for finding in findings if verbose or finding.severity is not Severity.INFO]
    lines = [_line(finding) for finding in shown]
    if not status_of(findings):
        lines.append(NO_PROBLEMS)
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    # Messages about settings begin with the value, as in "= 5 exceeds …".
    colon = " " if finding.what.startswith("=") else ": "
    return f"{finding.severity.value:<8} {finding.code.value}  {finding.where}{colon}{' '.join(str(finding).split())}"


def as_json(findings: Sequence[Finding]) -> str:
    """Format a list of objects: code, severity, where, what, cost, remedy."""
    return json.dumps(
        [
            {
                "code": finding.code.value,
                "severity": finding.severity.value,
                "where": finding.where,
                "what": finding.what,
                "cost": finding.cost,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
        indent=2,
    )
