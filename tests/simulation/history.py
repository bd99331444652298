"""Record what happens in a run, independently of the processes, and check the guarantees."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import RetryAfter
from integr8s_idem.telemetry import Signal, SilentObserver
from tests.simulation.failing import DELAY, BusyError, WithdrawnError
from tests.simulation.processes import PROCESS, Process

JUST_RESUMED: Final = 1.0
"""Seconds after a stall in which a process may not know yet that it lost a lease."""

DELAYED: Final = (BusyError.__name__, RetryAfter.__name__)
"""Errors of attempts that are retried after a delay."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a handler."""

    key: str
    work: str
    """The work, independently of the key that the library derives."""
    attempt: int
    fence: int
    process: Process
    stalls: int
    excuses: int
    effects: int = 0
    ended: bool = False
    ended_with: str = ""
    """Name of its error, `returned` or `cancelled`; empty if it has not ended."""
    not_again_before: float = 0.0
    """When the next run may begin at the earliest, if a rule or the handler says so."""
    rebalances: int = 0
    """Number of rebalances that began or ended before it began."""


@dataclass(slots=True)
class Sink:
    """The effects of a key in the fenced sink, and its highest fence."""

    fence: int
    refused: int = 0


@dataclass(slots=True)
class GivenUp:
    """The reason, handler and error of a dead letter."""

    reason: str
    handler: str
    error: str


@dataclass(slots=True)
class Truth:
    """The facts about a run of the simulation."""

    runs: defaultdict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By full key, in the order of their starts."""
    effects: list[tuple[str, Run]] = field(default_factory=list)
    sink: dict[str, Sink] = field(default_factory=dict)
    """By full key."""
    keys: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Keys under which the effect of a work is in the sink."""
    completed: set[str] = field(default_factory=set)
    """Keys with a completion that the store accepted."""
    discarded: set[str] = field(default_factory=set)
    """Those that were completed without a result, because a rule discards the error."""
    released: set[tuple[str, int]] = field(default_factory=set)
    """Keys and fences of runs whose release the store accepted."""
    due: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    """By key: when it is due by the store's clock, and its excuses when it was scheduled."""
    early: list[tuple[str, float]] = field(default_factory=list)
    """Keys that were retried too early, and by how many seconds."""
    dead_letters: defaultdict[tuple[str, int, int], list[GivenUp]] = field(default_factory=lambda: defaultdict(list))
    """By topic, partition and offset."""
    losses: Counter[str] = field(default_factory=Counter)
    """Number of lost records, by key."""
    jumps: int = 0
    """Number of jumps of the store's clock."""
    asked: set[tuple[str, int]] = field(default_factory=set)
    """Reservations whose reconcile function has answered, by key and fence."""
    granted: dict[tuple[str, int], int] = field(default_factory=dict)
    """Losses and jumps before a reservation, by key and fence."""

    def excuses(self, key: str) -> int:
        """Count the events so far that can end a lease of `key` without a fault of its holder."""
        return self.losses[key] + self.jumps


class History:
    """Records events, and reports a violated guarantee immediately."""

    def __init__(self) -> None:
        self.truth = Truth()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.trace: list[tuple[Any, ...]] = []
        self.last_resumed: dict[str, float] = {}
        self.reconciles: frozenset[str] = frozenset()
        """Names of the handlers with reconcile functions."""
        self.overtaken: frozenset[str] = frozenset()
        """Names of the handlers whose delayed retries wait in retry topics."""
        self.store_time: Callable[[], datetime] = datetime.now
        """Returns the time by the store's clock."""
        self.closed = False
        """Whether the run is over; later events come from dead processes."""

    def note(self, what: str, *details: object) -> None:
        if self.closed:
            return
        process = PROCESS.get()
        self.trace.append(
            (asyncio.get_running_loop().time(), process.name if process is not None else "-", what, *details)
        )

    def violate(self, rule: str, text: str) -> None:
        """Report a violated guarantee; `rule` is its code in docs/decisions/0018."""
        if self.closed:
            return
        self.note("VIOLATION", rule, text)
        self.violations.append(f"{rule}: {text}")
        if not self.broken.done():
            self.broken.set_result(None)

    def digest(self) -> str:
        """Return a digest of all recorded events."""
        return blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    # Handlers

    def begin(self, process: Process, attempt: Attempt, work: str) -> Run:
        truth = self.truth
        excuses = truth.granted[attempt.key, attempt.fence]
        run = Run(attempt.key, work, attempt.number, attempt.fence, process, process.stalls, excuses)
        self.note("begin", attempt.label, attempt.number, attempt.fence)
        self.counts["runs"] += 1
        for other in truth.runs[attempt.key]:
            if other.fence == attempt.fence:
                self.violate("T", f"two runs of {attempt.label} with one fence")
            if other.fence > attempt.fence and truth.excuses(attempt.key) == excuses:
                # A stall is not an excuse: the lease is checked immediately before the call.
                self.violate("F", f"{attempt.label} starts by fence {attempt.fence} after a run by {other.fence}")
            if not (other.ended or self._excused(other, run)):
                self.violate("X", f"two runs of {attempt.label} at once, without a stall or a loss")
        self._note_early(run)
        self._check_reconciled(run)
        self._check_due(run)
        truth.runs[attempt.key].append(run)
        return run

    def _note_early(self, run: Run) -> None:
        """Note a retry by the process of the last run, with its assignment, before the delay has passed."""
        run.rebalances = self._rebalances()
        last = self.truth.runs[run.key][-1] if self.truth.runs[run.key] else None
        if last is None or last.process is not run.process or last.rebalances != run.rebalances:
            return
        early = last.not_again_before - asyncio.get_running_loop().time()
        # Without a release the lease was lost, so that no rule was asked.
        if early > 0.001 and (last.key, last.fence) in self.truth.released:
            self.truth.early.append((run.key, early))

    def _check_reconciled(self, run: Run) -> None:
        """Check Q: a handler with a reconcile function does not run after its effect unless that was asked before.

        A stalled process may still act after the answer.  Effects of runs that were reserved later are left to F.
        """
        key, truth = run.key, self.truth
        if run.work.partition(" ")[0] not in self.reconciles or truth.losses[key]:
            return
        had_effect = any(other.effects for other in truth.runs[key] if other.fence < run.fence)
        if had_effect and (key, run.fence) not in truth.asked:
            self.violate("Q", f"{run.work} runs after its effect, and its reconcile function was not asked")

    def _check_due(self, run: Run) -> None:
        """Check B: no attempt of a scheduled work begins before it is due.

        Unless its record was lost since it was scheduled, or since the attempt was reserved: then another one may have
        been reserved, and scheduled, in between.
        """
        due_at, excuses = self.truth.due.get(run.key, (None, 0))
        if due_at is not None and self.store_time() < due_at and self.truth.excuses(run.key) == excuses == run.excuses:
            self.violate("B", f"{run.work} begins before it is due")

    def has_effect(self, attempt: Attempt) -> bool:
        """Answer the question of a reconcile function."""
        self.counts["asked"] += 1
        self.truth.asked.add((attempt.key, attempt.fence))
        found = attempt.key in self.truth.sink
        self.counts["found"] += found
        return found

    def _excused(self, other: Run, run: Run) -> bool:
        """Return whether the lease of `other` could not prevent the second run."""
        resumed = self.last_resumed.get(run.process.name, -JUST_RESUMED)
        return (
            other.process.dead
            or other.process.stalls > other.stalls
            or run.excuses != other.excuses
            or asyncio.get_running_loop().time() - resumed < JUST_RESUMED
        )

    def effect(self, run: Run) -> None:
        """Record the effect of a handler in the journal and in the fenced sink."""
        self.note("effect", run.key, run.attempt, run.fence)
        run.effects += 1
        self.truth.effects.append((run.key, run))
        held = self.truth.sink.get(run.key)
        if held is None:
            self.truth.sink[run.key] = Sink(run.fence)
            self._insert(run)
        elif run.fence > held.fence:
            held.fence = run.fence
        else:
            held.refused += 1

    def _insert(self, run: Run) -> None:
        keys = self.truth.keys[run.work]
        keys.append(run.key)
        if len(keys) > 1:
            self.violate("E1", f"{run.work} is in the sink more than once, under {keys}")

    def end(self, run: Run, how: str) -> None:
        self.note("end", run.key, run.attempt, how)
        run.ended, run.ended_with = True, how
        if how in DELAYED and run.work.partition(" ")[0] not in self.overtaken:
            run.not_again_before = asyncio.get_running_loop().time() + DELAY

    def _rebalances(self) -> int:
        return self.counts["rebalances"] + self.counts["assignments"]

    # Store

    def schedule(self, key: str, due_at: datetime) -> None:
        """Record that nobody may run this work before `due_at`, by the store's clock."""
        self.counts["scheduled"] += 1
        self.truth.due[key] = due_at, self.truth.excuses(key)

    def complete(self, key: str, fence: int, *, discarded: bool = False) -> None:
        """Record that the store accepted the completion of `key` with this fence."""
        self.truth.completed.add(key)
        runs = self.truth.runs[key]
        if discarded:
            self.truth.discarded.add(key)
            if not any(run.ended_with == WithdrawnError.__name__ for run in runs):
                self.violate("P", f"{key} is discarded without an error for which a rule says so")
        elif any(run.ended_with == WithdrawnError.__name__ for run in runs if run.fence == fence):
            # Another attempt may complete it: after a loss of the record, or by the answer of a reconcile function.
            self.violate("P", f"{key} is completed, though a rule discards its error")
        elif not any(run.effects for run in runs):
            self.violate("L", f"{key} is completed without an effect")
        highest = max((run.fence for run in runs), default=0)
        if fence < highest:
            self.violate("E1", f"{key} is completed by fence {fence}, though a run by {highest} has begun")

    # Broker

    def dead_letter(self, headers: Iterable[tuple[str, bytes]]) -> None:
        fields = {name.removeprefix("idempotency-dlq-"): value.decode() for name, value in headers}
        where = (fields["topic"], int(fields["partition"]), int(fields["offset"]))
        self.note("dead letter", *where, fields["reason"])
        self.counts["dead_letters"] += 1
        self.truth.dead_letters[where].append(
            GivenUp(fields["reason"], fields.get("handler", ""), fields.get("error-class", ""))
        )

    # End of the run

    def judge_repeats(self) -> None:
        """Check E2 (repeats are visible by attempt and fence), and count repeats for E1, which `effect` checks."""
        self.counts["fenced_repeats"] += sum(len(keys) - 1 for keys in self.truth.keys.values())
        for key, runs in self.truth.runs.items():
            did = sorted((run for run in runs if run.effects), key=_fence)
            self.counts["repeats"] += max(0, len(did) - 1)
            back = sum(later.attempt <= self._known_attempts(earlier) for earlier, later in pairwise(did))
            if back > self.truth.losses[key]:
                self.violate("E2", f"{key} was repeated silently: attempts {[run.attempt for run in did]}")

    def _known_attempts(self, run: Run) -> int:
        """Return the number that the attempt of the next run must exceed.

        After a loss of the record, each delivery of the event, and each copy in a retry topic, knows only its own
        attempts and those of the new record.
        """
        return 1 if self.truth.losses[run.key] and run.excuses else run.attempt

    def judge_order(self, lanes: Iterable[list[str]]) -> None:
        """Check O: within a lane, first effects happen in the order of the first messages."""
        first: dict[str, int] = {}
        for place, (key, _) in enumerate(self.truth.effects):
            first.setdefault(key, place)
        for lane in lanes:
            places = [(first[key], key) for key in dict.fromkeys(lane) if key in first]
            for earlier, later in pairwise(places):
                if earlier[0] > later[0]:
                    self.violate("O", f"{later[1]} was done before {earlier[1]}")


def _fence(run: Run) -> int:
    return run.fence


class SimulatedObserver(SilentObserver):
    """Counts in the history, so that the counts of killed processes are kept."""

    def __init__(self, history: History) -> None:
        self._history = history

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        self._history.counts[signal.name.lower()] += amount
