"""Findings for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from integr8s_idem.diagnostics import Finding, Severity

STATUS: Final[Mapping[Severity, int]] = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
"""Exit statuses; that of the worst finding counts."""

NOTHING: Final = "nothing to mend"


def status_of(findings: Sequence[Finding]) -> int:
    """The exit status: that of the worst."""
    return max((STATUS[finding.severity] for finding in findings), default=0)


def as_text(findings: Sequence[Finding], *, verbose: bool = False) -> str:
    """One line a finding: severity, code, where, what it is, what it can cost, what to set."""
    shown = [finding for finding in findings if verbose or finding.severity is not Severity.INFO]
    lines = [_line(finding) for finding in shown]
    if not status_of(findings):
        lines.append(NOTHING)
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    # A setting's own words begin with its value, as in "= 5 exceeds …".
    colon = " " if finding.what.startswith("=") else ": "
    return f"{finding.severity.value:<8} {finding.code.value}  {finding.where}{colon}{' '.join(str(finding).split())}"


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects: code, severity, where, what, cost, mend."""
    return json.dumps(
        [
            {
                "code": finding.code.value,
                "severity": finding.severity.value,
                "where": finding.where,
                "what": finding.what,
                "cost": finding.cost,
                "mend": finding.mend,
            }
            for finding in findings
        ],
        indent=2,
    )
