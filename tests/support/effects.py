"""What handlers really did, counted from the outside: a journal of effects, and a sink that checks fences.

Both are plain files that outlive any process which writes to them:

    effects = Effects(folder)
    effects.apply("order-7", attempt)               # in a handler, in any process
    figures = effects.judge({"order-7", ...})       # in the test, once everything is settled
    figures.update(effects.judge_records(records))  # where the store can be read
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
    """One line of the journal."""

    what: str
    """begin, effect or end."""
    work: str
    attempt: int
    fence: int
    pid: int
    key: str
    """The full key: that of the record."""


class Effects:
    """The journal (anything goes) and the fenced sink (once per key, never by a lower fence) of one folder.

    What the sink refuses it refuses by key and by fence, as a table with a conditional write does: a second effect
    of one key cannot get in.  So "nothing twice in the sink" is half the sink's own doing.  The other half is the
    library's, and that is what is measured: one work has one key (else its effect is there under both: `judge`),
    and a later run has a higher fence, up to the one that completes (else a run that was overtaken has the last
    word: `judge_records`).
    """

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._sink = folder / "sink.sqlite"

    def prepare(self) -> None:
        """Make the sink's tables; once, before the first process writes."""
        with closing(self._connect()) as sink:
            sink.execute("pragma journal_mode=wal")
            sink.executescript(_SCHEMA)

    def note(self, what: str, work: str, attempt: Attempt) -> None:
        """One line, in one write: lines of several processes do not mix, and a killed process leaves whole ones."""
        line = json.dumps([what, work, attempt.number, attempt.fence, os.getpid(), attempt.key]) + "\n"
        journal = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(journal, line.encode())
        finally:
            os.close(journal)

    def apply(self, work: str, attempt: Attempt) -> bool:
        """The effect: always in the journal, in the sink unless it was there or a higher fence has been seen."""
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
            elif attempt.fence > row[0]:  # done by an earlier run: from now on that one is refused
                sink.execute("update state set fence = ? where key = ?", (attempt.fence, attempt.key))
            else:
                sink.execute("update state set refused = refused + 1 where key = ?", (attempt.key,))
            sink.execute("commit")
        return applied

    @staticmethod
    def receipt(work: str, attempt: Attempt | Effect) -> str:
        """A result for a handler to return: it says whose it is, so that a record tells who had the last word."""
        return f"{work}{_RECEIPT}{attempt.fence}"

    def lines(self) -> list[Effect]:
        """The journal so far."""
        text = self._journal.read_text() if self._journal.exists() else ""
        return [Effect(*json.loads(line)) for line in text.splitlines()]

    def done(self) -> set[str]:
        """The works whose effect has happened."""
        return {line.work for line in self.lines() if line.what == "effect"}

    def ended(self) -> set[str]:
        """The works of which a run has come to its end."""
        return {line.work for line in self.lines() if line.what == "end"}

    def keys(self) -> list[str]:
        """The full keys that runs have begun under, each once."""
        return list(dict.fromkeys(line.key for line in self.lines()))

    def refused(self) -> int:
        """How often the sink has turned a stale fence away."""
        with closing(self._connect()) as sink:
            return int(sink.execute("select coalesce(sum(refused), 0) from state").fetchone()[0])

    def in_sink(self) -> Counter[str]:
        """How often each work's effect is in the sink."""
        with closing(self._connect()) as sink:
            return Counter(work for (work,) in sink.execute("select work from effects"))

    def judge(
        self, published: Collection[str], *, given_up: Collection[str] = (), records_lost: bool = False
    ) -> Figures:
        """Compare what happened with what was asked for.  Call it when nothing is under way any more.

        Args:
            published: Every work that was asked for.
            given_up: Those that ended in the dead-letter topic.
            records_lost: The store lost records, and that was counted: runs may begin at attempt 1 again.

        Raises:
            ViolationError: Something was lost, done twice in the sink, or repeated in silence.
        """
        runs: defaultdict[str, list[Effect]] = defaultdict(list)
        for line in self.lines():
            if line.what == "effect":
                runs[line.work].append(line)
        sink = self.in_sink()
        lost = set(published) - set(runs) - set(given_up)
        twice = [work for work, times in sink.items() if times > 1]
        repeated = {work: effects for work, effects in runs.items() if len(effects) > 1}
        silent = {} if records_lost else {work: told for work, told in repeated.items() if not _owned_up(told)}
        if lost or twice or silent:
            raise ViolationError(f"lost {sorted(lost)}; twice in the fenced sink {twice}; repeated in silence {silent}")
        return Figures(
            events=len(published),
            lost=len(lost),
            repeats=sum(len(told) - 1 for told in repeated.values()),
            fenced_repeats=sum(sink.values()) - len(sink),
        )

    def judge_records(self, records: Iterable[IdempotencyRecord]) -> Figures:
        """Compare the records with what happened.  Call it when nothing is under way any more.

        A completion must not come from a run that was overtaken: a COMPLETED record has no lower fence than any run
        that has begun, and if its fence is that of a run, so is its result, where that is a `receipt`.  It has a
        higher one where the outcome was written under a reservation made anew (the record was lost, or had been
        given back): those are counted as `completed_anew`.  Not for a store that may bring back an older version of
        a record, as a failover does.

        Args:
            records: All there are of the keys in the journal, as the store has them now.

        Raises:
            ViolationError: A run that was overtaken has completed, or a completed one has had no effect.
        """
        highest: dict[str, int] = {}
        effective: set[str] = set()
        for line in self.lines():
            highest[line.key] = max(line.fence, highest.get(line.key, 0))
            if line.what == "effect":
                effective.add(line.key)
        completed = {record.key: record for record in records if record.status is IdempotencyStatus.COMPLETED}
        overtaken = [record for record in completed.values() if _overtaken(record, highest.get(record.key, 0))]
        hollow = completed.keys() - effective
        if overtaken or hollow:
            raise ViolationError(
                f"completed by a run that was overtaken: {[(record, highest[record.key]) for record in overtaken]}; "
                f"completed without an effect: {sorted(hollow)}"
            )
        anew = sum(record.fence > highest[key] for key, record in completed.items())
        return Figures(completed=len(completed), completed_anew=anew)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._sink, timeout=30, isolation_level=None)


def _owned_up(effects: list[Effect]) -> bool:
    """Whether every run after the first knew that it was not the first, by its attempt and by its fence."""
    attempts = [effect.attempt for effect in effects]
    return len(set(attempts)) == len(attempts) and sorted(effects, key=_attempt) == sorted(effects, key=_fence)


def _overtaken(record: IdempotencyRecord, highest: int) -> bool:
    """Whether a run other than that of the `highest` fence has completed it."""
    told = record.result.body.decode().strip('"') if record.result is not None else ""
    _, is_receipt, fence = told.rpartition(_RECEIPT)
    return record.fence < highest or (record.fence == highest and bool(is_receipt) and int(fence) != highest)


def _attempt(effect: Effect) -> int:
    return effect.attempt


def _fence(effect: Effect) -> int:
    return effect.fence
