"""Checks of a job with five steps, based on the journal, the record and the dead letters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from pydantic import TypeAdapter

from integr8s_idem import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.engine.step_slots import Once
from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.stepping import ASK, CONCURRENT_STEPS, STEPS, UNIT, Line, Moment, Receipt

Boundary = tuple[str, Moment]

UNCERTAIN: Final = frozenset({Moment.IN_RESERVE, Moment.IN_COMPLETE})
"""The call was sent, but may not have been executed by the store."""
INTERRUPTS: Final = frozenset({Moment.AFTER_RESERVE, Moment.BEFORE_EFFECT, Moment.AFTER_EFFECT, Moment.BEFORE_COMPLETE})
"""The step was started, and its outcome is unknown."""
AFTER_THE_EFFECT: Final = frozenset({Moment.AFTER_EFFECT, Moment.BEFORE_COMPLETE})

_receipts: Final = TypeAdapter(list[Receipt])


class JobStory:
    """The history of a job from its first run to its end."""

    def __init__(self, lines: Sequence[Line], record: IdempotencyRecord, crashes: Collection[Boundary]) -> None:
        """Create the history.

        Args:
            lines: The journal.
            record: The record of the job.
            crashes: Boundaries at which processes died while running the job.
        """
        self._lines = lines
        self._record = record
        self._crashes = crashes
        self._effects: defaultdict[str, list[str]] = defaultdict(list)
        self._returned: defaultdict[str, set[str]] = defaultdict(set)
        for line in lines:
            if line.what == "effect":
                self._effects[line.step].append(line.id)
            if line.what == "got":
                self._returned[line.step].add(line.id)
        self._interrupted = {line.step for line in lines if line.what == "interrupted"}
        self._runs = sum(line.what == "begin" for line in lines)

    @property
    def given_up(self) -> bool:
        return self._record.status is IdempotencyStatus.FAILED

    @property
    def cut_short(self) -> int:
        """Number of runs that ended early without a crash: their lease was lost because the machine was too slow."""
        completed = {(UNIT, Moment.IN_COMPLETE), (UNIT, Moment.AFTER_COMPLETE)}
        return max(0, self._runs - 1 - sum(crash not in completed for crash in self._crashes))

    def judge(self, *, asks: bool) -> Figures:
        """Check the job.

        Args:
            asks: Whether the handler resolves an interrupted step and continues.

        Raises:
            ViolationError: A step was skipped or repeated too often, or its result has changed.
        """
        for step, once in STEPS.items():
            if once is Once.AT_MOST_ONCE:
                self._judge_at_most_once(step)
            else:
                self._judge_at_least_once(step)
        self._judge_results()
        if self.given_up:
            self._judge_given_up(asks=asks)
        else:
            self._judge_done()
        self._judge_order()
        repeats = sum(max(0, len(self._effects[step]) - 1) for step in STEPS)
        figures = Figures(jobs=1, lost=0, repeats=repeats, fenced_repeats=0, given_up=int(self.given_up))
        figures.update(interrupted=len(self._interrupted), runs=self._runs, cut_short=self.cut_short)
        for step, once in STEPS.items():
            figures[f"effects:{once.value}"] += len(self._effects[step])
        return figures

    def _judge_at_most_once(self, step: str) -> None:
        effects, interrupted = len(self._effects[step]), step in self._interrupted
        if effects > 1:
            self._fail(f"{step} is at_most_once, but was done {effects} times")
        if self._concurrent_crashes(step) or self.cut_short:
            return  # it may have been at any moment when the process died in the concurrent step, or lost its lease
        moments = self._moments(step)
        if not moments & (INTERRUPTS | UNCERTAIN) and (interrupted or (effects != 1 and self._has_returned(step))):
            self._fail(f"{step} was not interrupted; done {effects} times, reported as interrupted: {interrupted}")
        if moments & INTERRUPTS and not interrupted:
            self._fail(f"{step} was interrupted at {moments}, but not reported as interrupted")
        if moments & AFTER_THE_EFFECT and effects != 1:
            self._fail(f"{step} was interrupted after its effect, but was done {effects} times")

    def _judge_at_least_once(self, step: str) -> None:
        effects, crashes = len(self._effects[step]), [at for name, at in self._crashes if name == step]
        if step in self._interrupted:
            self._fail(f"{step} is at_least_once, but was reported as interrupted")
        certain = sum(at in AFTER_THE_EFFECT for at in crashes)
        at_most = 1 + certain + crashes.count(Moment.IN_COMPLETE) + len(self._concurrent_crashes(step)) + self.cut_short
        if effects > at_most:
            self._fail(f"{step} was done {effects} times, although at most {at_most - 1} crashes can repeat it")
        if self._has_returned(step) and effects < 1 + certain:
            self._fail(f"{step} was done {effects} times, although {certain} crashes must have repeated it")

    def _judge_results(self) -> None:
        for step, ids in self._returned.items():
            if len(ids) > 1:
                self._fail(f"{step} returned several results: {ids}")
            if not ids <= set(self._effects[step]):
                self._fail(f"{step} returned results without an effect: {ids}")

    def _judge_given_up(self, *, asks: bool) -> None:
        if asks or not self._interrupted or "StepInterruptedError" not in (self._record.error or ""):
            self._fail(f"given up because of {self._record.error}")

    def _judge_done(self) -> None:
        if self._record.status is not IdempotencyStatus.COMPLETED or self._record.result is None:
            self._fail(f"neither completed nor given up: {self._record}")
        assert self._record.result is not None
        returned = _receipts.validate_json(self._record.result.body)
        wanted = [ASK + step if step in self._interrupted else step for step in STEPS]
        if [receipt.step for receipt in returned] != wanted:
            self._fail(f"completed with the results of {returned}, expected those of {wanted}")
        if skipped := [receipt for receipt in returned if {receipt.id} != self._returned[receipt.step]]:
            self._fail(f"completed with results that no step returned: {skipped}")

    def _judge_order(self) -> None:
        """Check that each step started after the previous ones had returned."""
        ready: set[str] = set()
        names = list(STEPS)
        for line in self._lines:
            if line.what == "begin":
                ready.clear()
            elif line.what == "got":
                ready.add(line.step.removeprefix(ASK))
            elif line.what == "effect":
                before = set(names[: names.index(line.step.removeprefix(ASK))])
                if (
                    missing := before
                    - ready
                    - set(CONCURRENT_STEPS if line.step.removeprefix(ASK) in CONCURRENT_STEPS else ())
                ):
                    self._fail(f"{line.step} was done before {missing}")

    def _moments(self, step: str) -> set[Moment]:
        return {at for name, at in self._crashes if name == step}

    def _concurrent_crashes(self, step: str) -> list[Moment]:
        """Return the moments at which processes died in the concurrent step."""
        others = set(CONCURRENT_STEPS) - {step} if step in CONCURRENT_STEPS else set()
        return [at for name, at in self._crashes if name in others]

    def _has_returned(self, step: str) -> bool:
        """Return whether the handler eventually got the result of the step."""
        return not self.given_up or bool(self._returned[step])

    def _fail(self, problem: str) -> None:
        journal = "\n".join(f"  {line}" for line in self._lines)
        raise ViolationError(f"{problem}; crashes: {[f'{step}:{at.value}' for step, at in self._crashes]}\n{journal}")
