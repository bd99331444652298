"""Record the effects of handlers independently of the library: in a journal, and in a sink that checks fences.

Both are plain files that outlive the processes that write to them:

    effects = Effects(folder)
    effects.apply("order-7", attempt)               # in a handler, in any process
    figures = effects.judge({"order-7", ...})       # in the test, after all deliveries are settled
    figures.update(effects.judge_records(records))  # if the test can read the store
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from integr8s_idem import Attempt, IdempotencyRecord, IdempotencyStatus
from tests.campaigns.figures import Figures, ViolationError

_RECEIPT = " by fence "

_SCHEMA = """
create table if not exists effects (work text, key text, fence integer, attempt integer, pid integer);
create table if not exists state (key text primary key, fence integer, refused integer default 0);
"""


@dataclass(frozen=True, slots=True)
class Effect:
    """A line of the journal."""

    what: str
    """`begin`, `effect` or `end`."""
    work: str
    attempt: int
    fence: int
    pid: int
    key: str
    """The full key of the record."""


class Effects:
    """The journal, which accepts every effect, and the sink, which accepts one per key and rejects lower fences.

    The sink rejects effects by key and fence, like a table with a conditional write: it never stores a second effect of
    a key. That alone does not prove that the library is right, so the tests check what the library contributes: each
    work has one key (otherwise the sink has its effect under both keys, see `judge`), and later runs have higher fences
    up to the run that completes (otherwise an overtaken run could complete the record, see `judge_records`).
    """

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._sink = folder / "sink.sqlite"

    def prepare(self) -> None:
        """Create the tables of the sink; call it once, before the first process writes."""
        with closing(self._connect()) as sink:
            sink.execute("pragma journal_mode=wal")
            sink.executescript(_SCHEMA)

    def note(self, what: str, work: str, attempt: Attempt) -> None:
        """Append a line with a single write, so that processes do not mix lines or leave incomplete ones."""
        line = json.dumps([what, work, attempt.number, attempt.fence, os.getpid(), attempt.key]) + "\n"
        journal = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(journal, line.encode())
        finally:
            os.close(journal)

    def apply(self, work: str, attempt: Attempt) -> bool:
        """Record the effect in the journal, and in the sink unless it has this effect or a higher fence already."""
        self.note("effect", work, attempt)
        with closing(self._connect()) as sink:
            sink.execute("begin immediate")
            row = sink.execute("select fence from state where key = ?", (attempt.key,)).fetchone()
            applied = row is None
            if row is None:
                sink.execute("insert into state (key, fence) values (?, ?)", (attempt.key, attempt.fence))
                sink.execute(
                    "insert into effects values (?, ?, ?, ?, ?)",
                    (work, attempt.key, attempt.fence, attempt.number, os.getpid()),
                )
            elif attempt.fence > row[0]:  # an earlier run had the effect; reject that run from now on
                sink.execute("update state set fence = ? where key = ?", (attempt.fence, attempt.key))
            else:
                sink.execute("update state set refused = refused + 1 where key = ?", (attempt.key,))
            sink.execute("commit")
        return applied

    @staticmethod
    def receipt(work: str, attempt: Attempt | Effect) -> str:
        """Return a result for a handler that identifies the run, so that the record shows which run completed it."""
        return f"{work}{_RECEIPT}{attempt.fence}"

    def lines(self) -> list[Effect]:
        """Return the journal so far."""
        text = self._journal.read_text() if self._journal.exists() else ""
        return [Effect(*json.loads(line)) for line in text.splitlines()]

    def done(self) -> set[str]:
        """Return the works whose effect has happened."""
        return {line.work for line in self.lines() if line.what == "effect"}

    def ended(self) -> set[str]:
        """Return the works with a finished run."""
        return {line.work for line in self.lines() if line.what == "end"}

    def keys(self) -> list[str]:
        """Return the distinct full keys of started runs."""
        return list(dict.fromkeys(line.key for line in self.lines()))

    def refused(self) -> int:
        """Return how often the sink has rejected a stale fence."""
        with closing(self._connect()) as sink:
            return int(sink.execute("select coalesce(sum(refused), 0) from state").fetchone()[0])

    def in_sink(self) -> Counter[str]:
        """Count the effects of each work in the sink."""
        with closing(self._connect()) as sink:
            return Counter(work for (work,) in sink.execute("select work from effects"))

    def judge(
        self, published: Collection[str], *, given_up: Collection[str] = (), records_lost: bool = False
    ) -> Figures:
        """Compare the effects with the published works. Call it when no run is in progress.

        Args:
            published: All published works.
            given_up: Works that ended in the dead-letter topic.
            records_lost: The store lost records and counted them, so runs may start at attempt 1 again.

        Raises:
            ViolationError: An effect was lost, is in the sink twice, or was repeated without a higher fence.
        """
        runs: defaultdict[str, list[Effect]] = defaultdict(list)
        for line in self.lines():
            if line.what == "effect":
                runs[line.work].append(line)
        sink = self.in_sink()
        lost = set(published) - set(runs) - set(given_up)
        twice = [work for work, times in sink.items() if times > 1]
        repeated = {work: effects for work, effects in runs.items() if len(effects) > 1}
        silent = (
            {} if records_lost else {work: effects for work, effects in repeated.items() if not _fences_grow(effects)}
        )
        if lost or twice or silent:
            raise ViolationError(
                f"lost {sorted(lost)}; twice in the fenced sink {twice}; repeated without a higher fence {silent}"
            )
        return Figures(
            events=len(published),
            lost=len(lost),
            repeats=sum(len(effects) - 1 for effects in repeated.values()),
            fenced_repeats=sum(sink.values()) - len(sink),
        )

    def judge_records(self, records: Iterable[IdempotencyRecord]) -> Figures:
        """Compare the records with the effects. Call it when no run is in progress.

        An overtaken run must not complete a record: the fence of a COMPLETED record is at least that of every started
        run, and if it equals that of a run, the `receipt` in the result is from the same run. The fence is higher if
        the outcome was written under a new reservation (the record was lost or had been released); such records are
        counted as `completed_anew`. Do not use this for a store that can restore an older version of a record, for
        instance by a failover.

        Args:
            records: The current records of all keys in the journal.

        Raises:
            ViolationError: An overtaken run completed a record, or a completed record has no effect.
        """
        highest: dict[str, int] = {}
        effective: set[str] = set()
        for line in self.lines():
            highest[line.key] = max(line.fence, highest.get(line.key, 0))
            if line.what == "effect":
                effective.add(line.key)
        completed = {record.key: record for record in records if record.status is IdempotencyStatus.COMPLETED}
        overtaken = [record for record in completed.values() if _overtaken(record, highest.get(record.key, 0))]
        without_effect = completed.keys() - effective
        if overtaken or without_effect:
            raise ViolationError(
                f"completed by an overtaken run: {[(record, highest[record.key]) for record in overtaken]}; "
                f"completed without an effect: {sorted(without_effect)}"
            )
        anew = sum(record.fence > highest[key] for key, record in completed.items())
        return Figures(completed=len(completed), completed_anew=anew)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._sink, timeout=30, isolation_level=None)


def _fences_grow(effects: list[Effect]) -> bool:
    """Return whether every run after the first had a higher attempt and fence."""
    attempts = [effect.attempt for effect in effects]
    return len(set(attempts)) == len(attempts) and sorted(effects, key=_attempt) == sorted(effects, key=_fence)


def _overtaken(record: IdempotencyRecord, highest: int) -> bool:
    """Return whether a run other than the one with the `highest` fence completed the record."""
    result = record.result.body.decode().strip('"') if record.result is not None else ""
    _, is_receipt, fence = result.rpartition(_RECEIPT)
    return record.fence < highest or (record.fence == highest and bool(is_receipt) and int(fence) != highest)


def _attempt(effect: Effect) -> int:
    return effect.attempt


def _fence(effect: Effect) -> int:
    return effect.fence
