"""Check whether the observations are consistent.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The observations, by execution where applicable."""

    requested: Collection[str]
    runs: Mapping[str, int]
    """Lines in the journal."""
    results: Mapping[str, Sequence[str]]
    """The status of every result in the database."""
    in_flight: Collection[str] = ()
    """Executions that were running in the k8s worker when it was killed."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """The last attempt of each execution, as reported by the k8s worker."""
    over: bool = True
    """Whether all services could finish their work."""
    killed: bool = True
    """Whether a worker was killed while a script ran."""
    events: int = 0
    """Number of distinct events on the topics."""
    copies: int = 0
    """Number of events that the demo delivered again."""
    deliveries: int = 0
    duplicates_blocked: int = 0
    takeovers: int = 0
    dead_letters: int = 0
    troubles: Sequence[str] = ()
    """Problems of the demo itself."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the observations."""

    seen: Seen

    @property
    def good(self) -> bool:
        return not self.faults

    @cached_property
    def without_result(self) -> list[str]:
        """Requests without a result."""
        return sorted(execution for execution in self.seen.requested if not self.seen.results.get(execution))

    @property
    def lost(self) -> list[str]:
        """Requests without a result although all work is done."""
        return self.without_result if self.seen.over else []

    @property
    def unfinished(self) -> list[str]:
        """Requests that may still get a result: the time limit was reached first."""
        return [] if self.seen.over else self.without_result

    @cached_property
    def executed_once(self) -> list[str]:
        return sorted(execution for execution, runs in self.seen.runs.items() if runs == 1)

    @cached_property
    def rerun(self) -> list[str]:
        """Scripts that began more than once."""
        return sorted(execution for execution, runs in self.seen.runs.items() if runs > 1)

    @cached_property
    def reruns_after_kill(self) -> list[str]:
        """Scripts that began more than once because they were in flight at the kill."""
        return [execution for execution in self.rerun if execution in self.seen.in_flight]

    @cached_property
    def statuses(self) -> Counter[str]:
        return Counter(status for statuses in self.seen.results.values() for status in statuses)

    @cached_property
    def faults(self) -> list[str]:
        """Faults of the platform, or of the demo as evidence. Empty if there are none."""
        return [*self._wrong_results(), *self._wrong_runs(), *self._no_proof()]

    def _wrong_results(self) -> list[str]:
        seen = self.seen
        requested = set(seen.requested)
        return [
            *_fault("without a stored result", self.lost),
            *_fault("not finished at the deadline", self.unfinished),
            *_fault("with more than one stored result", (e for e, found in seen.results.items() if len(found) > 1)),
            *_fault("with a result, but not requested", seen.results.keys() - requested),
            *_fault("run, but not requested", seen.runs.keys() - requested),
            *_fault("completed without a run", (e for e, found in seen.results.items() if self._is_unrequested(e))),
        ]

    def _wrong_runs(self) -> list[str]:
        seen = self.seen
        unreported = (e for e in self.reruns_after_kill if seen.attempts.get(e) != seen.runs[e])
        return [
            *_fault("run again, but not in flight at the kill", set(self.rerun) - set(seen.in_flight)),
            *_fault("run more than twice", (e for e in self.rerun if seen.runs[e] > 2)),
            *_fault("run twice, but not reported as attempt 2", unreported),
        ]

    def _no_proof(self) -> list[str]:
        seen = self.seen
        found = list(seen.troubles)
        if not seen.killed:
            found.append("no worker was killed while a script ran")
        if seen.copies < seen.events // 3:
            found.append(f"only {seen.copies} of {seen.events} events were delivered twice, not a third")
        return found

    def _is_unrequested(self, execution: str) -> bool:
        return "completed" in self.seen.results[execution] and not self.seen.runs.get(execution)

    def numbers(self) -> dict[str, Any]:
        """Return the verdict as numbers."""
        seen = self.seen
        return {
            "good": self.good,
            "requested": len(seen.requested),
            "events": seen.events,
            "delivered_twice": seen.copies,
            "deliveries": seen.deliveries,
            "duplicates_blocked": seen.duplicates_blocked,
            "takeovers": seen.takeovers,
            "dead_letters": seen.dead_letters,
            "executed_once": len(self.executed_once),
            "in_flight_at_kill": len(seen.in_flight),
            "reruns_after_kill": len(self.reruns_after_kill),
            "results_stored": sum(map(len, seen.results.values())),
            "results_by_status": dict(sorted(self.statuses.items())),
            "lost": len(self.lost),
            "unfinished": len(self.unfinished),
            "faults": self.faults,
        }

    def lines(self) -> list[str]:
        """Return the verdict as text lines."""
        seen = self.seen
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        unrun = len(set(seen.requested) - seen.runs.keys())
        return [
            f"requested   {len(seen.requested)} scripts",
            f"delivered   {seen.events} events, {seen.copies} of them twice; the services took {seen.deliveries} "
            f"deliveries and blocked {seen.duplicates_blocked} duplicates",
            f"killed      a k8s worker with {len(seen.in_flight)} executions in flight; "
            f"{seen.takeovers} leases were taken over",
            f"run         {len(self.executed_once)} scripts once, {len(self.rerun)} twice "
            f"({len(self.reruns_after_kill)} of them in flight at the kill), {unrun} never",
            f"stored      {sum(map(len, seen.results.values()))} results: {statuses or 'none'}",
            f"lost        {len(self.lost)}"
            + (f"; {len(self.unfinished)} were not finished at the deadline" if self.unfinished else ""),
            *(f"fault       {fault}" for fault in self.faults),
        ]


def _fault(what: str, executions: Collection[str] | Any) -> list[str]:
    """Return one line, or none if there are no executions."""
    found = sorted(executions)
    if not found:
        return []
    shown = ", ".join(found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
    return [f"{len(found)} {what}: {shown}"]
