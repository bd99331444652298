"""Checks of events with delayed retries, after everything is settled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.retry_copies import Copy
from tests.crashes.retry_jobs import most_runs
from tests.support.effects import Effect


def judge_runs(lines: Sequence[Effect], expired: Mapping[str, int], kills: int) -> Figures:
    """Check the runs of all events.

    Args:
        lines: The journal.
        expired: How often the record of an event has expired while its copies waited.
        kills: How many processes have died.

    Raises:
        ViolationError: A run could not tell that it was a repeat, or an event was retried too often.
    """
    runs = defaultdict[str, list[Effect]](list)
    for line in lines:
        if line.what == "begin":
            runs[line.work].append(line)
    silent = {work: found for work, found in runs.items() if not _is_visible(found, has_expired=work in expired)}
    if silent:
        raise ViolationError(f"runs that could not tell that they were repeats: {silent}")
    # Each kill adds at most one run of an event: the one that was running, or that had failed without being recorded.
    most = {work: most_runs(work) + kills + expired.get(work, 0) for work in runs}
    often = {work: (len(found), most[work]) for work, found in runs.items() if len(found) > most[work]}
    if often:
        raise ViolationError(f"retried too often (runs, at most): {often}")
    return Figures(runs=sum(map(len, runs.values())), expired=sum(expired.values()))


def _is_visible(runs: Sequence[Effect], *, has_expired: bool) -> bool:
    """Whether every run after the first has a higher fence and another attempt number.

    If its record has expired, an event may have the same number after a crash: a copy states the attempt that has
    failed, and no record counts the one that died.  The number still says that there were earlier attempts.
    """
    fences = [run.fence for run in runs]
    numbers = [run.attempt for run in runs]
    if sorted(set(fences)) != fences:
        return False
    if has_expired:
        return all(number > 1 for number in numbers[1:])
    return sorted(set(numbers)) == numbers


def judge_copies(copies: Sequence[Copy], lines: Sequence[Effect], *, signed: bool) -> Figures:
    """Check all copies that were published.

    Raises:
        ViolationError: A copy states an attempt that never started, or is not signed as configured.
    """
    started = Counter[str]()
    for line in lines:
        started[line.work] = max(started[line.work], line.attempt)
    ahead = [copy for copy in copies if not 1 <= copy.attempt <= started[copy.work]]
    if ahead:
        raise ViolationError(f"copies of attempts that never started: {ahead}")
    wrong = [copy for copy in copies if copy.is_signed != signed]
    if wrong:
        raise ViolationError(f"copies that are {'not ' * signed}signed: {wrong}")
    distinct = {(copy.work, copy.attempt) for copy in copies}
    return Figures(copies=len(copies), onward_copies=len(copies) - len(distinct))


def attempts_of(lines: Sequence[Effect], works: Collection[str]) -> dict[str, int]:
    """Return the number of the last attempt of each of `works` that has started."""
    return {line.work: line.attempt for line in lines if line.what == "begin" and line.work in works}
