"""What really happened in one run, seen from outside of all processes, and whether that keeps the promises."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from integr8s_idem.engine.work import Attempt
from integr8s_idem.telemetry import Signal, SilentObserver
from tests.simulation.processes import PROCESS, Process

JUST_RESUMED: Final = 1.0
"""Seconds after standing still in which a process may not know yet what it has lost."""


@dataclass(eq=False, slots=True)
class Run:
    """One run of a handler."""

    key: str
    work: str
    """What it is about, whatever key the library makes of that."""
    attempt: int
    fence: int
    process: Process
    stalls: int
    excuses: int
    effects: int = 0
    ended: bool = False


@dataclass(slots=True)
class Sink:
    """What a fenced sink holds under one key: one effect, and the highest fence that it has seen."""

    fence: int
    refused: int = 0


@dataclass(slots=True)
class Letter:
    """A dead letter: of which message, and why."""

    reason: str
    handler: str
    error: str


@dataclass(slots=True)
class Truth:
    """What is known of one run of the simulation."""

    runs: defaultdict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By full key, in the order in which they began."""
    effects: list[tuple[str, Run]] = field(default_factory=list)
    sink: dict[str, Sink] = field(default_factory=dict)
    """By full key."""
    keys: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By work: the keys under which its effect is in the sink."""
    completed: set[str] = field(default_factory=set)
    """Keys of which the store has ever accepted a completion."""
    letters: defaultdict[tuple[str, int, int], list[Letter]] = field(default_factory=lambda: defaultdict(list))
    """By topic, partition and offset."""
    losses: Counter[str] = field(default_factory=Counter)
    """Records that the store has lost, by key."""
    jumps: int = 0
    """How often the store's clock has jumped."""
    granted: dict[tuple[str, int], int] = field(default_factory=dict)
    """By key and fence: losses and jumps before the store gave that reservation."""

    def excuses(self, key: str) -> int:
        """What can end a lease of `key` without its holder's fault, so far."""
        return self.losses[key] + self.jumps


class History:
    """Takes notes; complains at once where a promise is broken."""

    def __init__(self) -> None:
        self.truth = Truth()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.trace: list[tuple[Any, ...]] = []
        self.last_resumed: dict[str, float] = {}
        self.closed = False
        """The run is over; what is told now comes from the dead."""

    def note(self, what: str, *details: object) -> None:
        if self.closed:
            return
        process = PROCESS.get()
        self.trace.append(
            (asyncio.get_running_loop().time(), process.name if process is not None else "-", what, *details)
        )

    def violate(self, rule: str, text: str) -> None:
        """A promise is broken: `rule` is a letter of the list in docs/decisions/0018."""
        if self.closed:
            return
        self.note("VIOLATION", rule, text)
        self.violations.append(f"{rule}: {text}")
        if not self.broken.done():
            self.broken.set_result(None)

    def digest(self) -> str:
        """Equal for equal runs, to the last step."""
        return blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    # Handlers.

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
                # Not even a process that has stood still: it checks its lease immediately before the call.
                self.violate("F", f"{attempt.label} starts by fence {attempt.fence} after a run by {other.fence}")
            if not (other.ended or self._excused(other, run)):
                self.violate("X", f"two runs of {attempt.label} at once, without a stall or a loss")
        truth.runs[attempt.key].append(run)
        return run

    def _excused(self, other: Run, run: Run) -> bool:
        """Whether the lease of `other` could not protect it: who runs is not to blame."""
        resumed = self.last_resumed.get(run.process.name, -JUST_RESUMED)
        return (
            other.process.dead
            or other.process.stalls > other.stalls
            or run.excuses > other.excuses
            or asyncio.get_running_loop().time() - resumed < JUST_RESUMED
        )

    def effect(self, run: Run) -> None:
        """The handler does what it is there for, once in the journal and once in a fenced sink."""
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
        run.ended = True

    # What the store accepts.

    def complete(self, key: str, fence: int) -> None:
        """The store has believed the completion of `key` by this fence."""
        self.truth.completed.add(key)
        runs = self.truth.runs[key]
        if not any(run.effects for run in runs):
            self.violate("L", f"{key} is completed without an effect")
        highest = max((run.fence for run in runs), default=0)
        if fence < highest:
            self.violate("E1", f"{key} is completed by fence {fence}, though a run by {highest} has begun")

    # What the broker sees.

    def dead_letter(self, headers: Iterable[tuple[str, bytes]]) -> None:
        told = {name.removeprefix("idempotency-dlq-"): value.decode() for name, value in headers}
        where = (told["topic"], int(told["partition"]), int(told["offset"]))
        self.note("dead letter", *where, told["reason"])
        self.counts["dead_letters"] += 1
        self.truth.letters[where].append(Letter(told["reason"], told.get("handler", ""), told.get("error-class", "")))

    # In the end.

    def judge_repeats(self) -> None:
        """E1 and E2: once in the fenced sink; no run after the first that was not told so.

        The first was judged when it happened: here it is counted.
        """
        self.counts["fenced_repeats"] += sum(len(keys) - 1 for keys in self.truth.keys.values())
        for key, runs in self.truth.runs.items():
            did = sorted((run for run in runs if run.effects), key=_fence)
            self.counts["repeats"] += max(0, len(did) - 1)
            back = sum(later.attempt <= earlier.attempt for earlier, later in pairwise(did))
            if back > self.truth.losses[key]:
                self.violate("E2", f"{key} was done again in silence: attempts {[run.attempt for run in did]}")

    def judge_order(self, lanes: Iterable[list[str]]) -> None:
        """O: within a lane, first effects in the order of the first messages."""
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
    """Counts into the history: what a killed process has counted is not forgotten here."""

    def __init__(self, history: History) -> None:
        self._history = history

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        self._history.counts[signal.name.lower()] += amount
