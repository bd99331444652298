"""Checks of a trial: no handler may start after its lease has ended.

The lease is checked immediately before the handler is called.  A process can be stopped between the two; no check can
prevent that start, so it is counted (`stalls_between`) and not treated as a violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from integr8s_idem import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.engine import leases
from tests.campaigns.figures import Figures, ViolationError
from tests.stalled_starts.journal import Lines, Start

CHECKS: bool = hasattr(leases.HeldLease, "is_late")
"""Whether the library checks leases before starts."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A period in which a process or its event loop was stalled."""

    pid: int
    begin: float
    end: float


def late_starts(starts: Sequence[Start]) -> list[Start]:
    """Return the starts that happened after another start of the same key with a higher fence."""
    by_key: defaultdict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_key[start.key].append(start)
    return [
        start
        for of_key in by_key.values()
        for start in of_key
        if any(other.fence > start.fence and other.at < start.at for other in of_key)
    ]


def longest_pause(lines: Lines) -> float:
    """Return the longest time in seconds between two starts of one process."""
    by_process: defaultdict[int, list[float]] = defaultdict(list)
    for start in lines.starts:
        by_process[start.pid].append(start.at)
    pauses = [later - earlier for times in by_process.values() for earlier, later in pairwise(sorted(times))]
    return max(pauses, default=0.0)


def judge_starts(lines: Lines, stalls: Iterable[Stall]) -> Figures:
    """Check every start.

    Raises:
        ViolationError: A handler started although its lease had ended at its check, or without a check.
    """
    stalls = list(stalls)
    overtaken = set(late_starts(lines.starts))
    found: list[str] = []
    between = 0
    for start in lines.starts:
        excused = start.check is not None and any(
            stall.pid == start.pid and stall.begin < start.at and start.check.at < stall.end for stall in stalls
        )
        wrong = _wrong(start, is_overtaken=start in overtaken)
        if not wrong:
            continue
        if excused and start.check is not None and not _failed_check(start):
            between += 1
        else:
            found.append(f"{wrong}: {start}")
    repeated = [
        pair for pair, times in Counter((start.key, start.fence) for start in lines.starts).items() if times > 1
    ]
    if repeated:
        found.append(f"two starts of one reservation: {repeated}")
    if found:
        first = "\n".join(found[:5])
        raise ViolationError(f"{len(found)} of {len(lines.starts)} starts are wrong:\n{first}")
    return Figures(
        starts=len(lines.starts),
        stalls_between=between,
        violations=0,
        starts_prevented=lines.counts["prevented"],
    )


def _wrong(start: Start, *, is_overtaken: bool) -> str:
    """Return the violation of a start; empty if there is none."""
    if CHECKS and start.check is None:
        return "started without a check"
    if start.check is not None and _failed_check(start):
        return "started although its check failed"
    if is_overtaken:
        return "started after another attempt with a higher fence"
    if start.check is not None and start.at > start.check.lease_end:
        return "started after its lease had ended"
    return ""


def _failed_check(start: Start) -> bool:
    assert start.check is not None
    return start.check.is_late or start.check.at >= start.check.lease_end


def judge_records(lines: Lines, works: Iterable[str], records: Iterable[IdempotencyRecord]) -> Figures:
    """Check that every work was started, and its record completed once, by its last attempt.

    Raises:
        ViolationError: Work was lost, completed twice, or completed by an attempt that was overtaken.
    """
    highest: dict[str, Start] = {}
    for start in lines.starts:
        if start.key not in highest or highest[start.key].fence < start.fence:
            highest[start.key] = start
    completed = {record.key: record for record in records if record.status is IdempotencyStatus.COMPLETED}
    keys_of = {start.work: start.key for start in lines.starts}
    lost = [work for work in works if keys_of.get(work) not in completed]
    stale = [
        (record, highest[key]) for key, record in completed.items() if key in highest and _is_stale(record, highest)
    ]
    fences: defaultdict[str, set[int]] = defaultdict(set)
    for completion in lines.completions:
        fences[completion.key].add(completion.fence)
    twice = {key: found for key, found in fences.items() if len(found) > 1}
    unordered = _unordered_attempts(lines.starts)
    if lost or stale or twice or unordered:
        raise ViolationError(
            f"lost {lost}; completed by an overtaken attempt {stale}; completed twice {twice}; "
            f"attempts that do not grow with their fences {unordered}"
        )
    return Figures(events=len(keys_of), lost=0, takeovers=sum(start.attempt > 1 for start in lines.starts))


def _is_stale(record: IdempotencyRecord, highest: dict[str, Start]) -> bool:
    return record.fence < highest[record.key].fence


def _unordered_attempts(starts: Sequence[Start]) -> list[str]:
    by_key: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for start in starts:
        by_key[start.key].append((start.fence, start.attempt))
    return [
        key for key, runs in by_key.items() if any(later[1] <= earlier[1] for earlier, later in pairwise(sorted(runs)))
    ]
