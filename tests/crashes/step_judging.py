"""What must hold of a job in five steps, whoever died on the way; read from the journal, the record and the letters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from pydantic import TypeAdapter

from integr8s_idem import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.engine.steps import Once
from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.stepping import ASK, SIDE_BY_SIDE, STEPS, UNIT, Line, Moment, Receipt

Boundary = tuple[str, Moment]

UNCERTAIN: Final = frozenset({Moment.IN_RESERVE, Moment.IN_COMPLETE})
"""The call was sent; whether the store has executed it nobody knows."""
INTERRUPTS: Final = frozenset({Moment.AFTER_RESERVE, Moment.BEFORE_EFFECT, Moment.AFTER_EFFECT, Moment.BEFORE_COMPLETE})
"""The step was begun, and its end is not known."""
BEHIND_THE_EFFECT: Final = frozenset({Moment.AFTER_EFFECT, Moment.BEFORE_COMPLETE})

_receipts: Final = TypeAdapter(list[Receipt])


class JobStory:
    """One job from its first run to its end."""

    def __init__(self, lines: Sequence[Line], record: IdempotencyRecord, deaths: Collection[Boundary]) -> None:
        """`record`: of the job; `deaths`: where processes have died over it."""
        self._lines = lines
        self._record = record
        self._deaths = deaths
        self._effects: defaultdict[str, list[str]] = defaultdict(list)
        self._got: defaultdict[str, set[str]] = defaultdict(set)
        for line in lines:
            if line.what == "effect":
                self._effects[line.step].append(line.id)
            if line.what == "got":
                self._got[line.step].add(line.id)
        self._interrupted = {line.step for line in lines if line.what == "interrupted"}
        self._runs = sum(line.what == "begin" for line in lines)

    @property
    def given_up(self) -> bool:
        return self._record.status is IdempotencyStatus.FAILED

    @property
    def cut_short(self) -> int:
        """Runs that ended in their midst though nobody died: their lease was lost, for the machine was too slow."""
        over = {(UNIT, Moment.IN_COMPLETE), (UNIT, Moment.AFTER_COMPLETE)}
        return max(0, self._runs - 1 - sum(death not in over for death in self._deaths))

    def judge(self, *, asks: bool) -> Figures:
        """`asks`: the handler finds out about an interrupted step, and goes on.

        Raises:
            ViolationError: A step was skipped, or done too often, or what it returned has changed.
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
        again = sum(max(0, len(self._effects[step]) - 1) for step in STEPS)
        told = Figures(jobs=1, lost=0, repeats=again, fenced_repeats=0, given_up=int(self.given_up))
        told.update(interrupted=len(self._interrupted), runs=self._runs, cut_short=self.cut_short)
        for step, once in STEPS.items():
            told[f"effects:{once.value}"] += len(self._effects[step])
        return told

    def _judge_at_most_once(self, step: str) -> None:
        effects, interrupted = len(self._effects[step]), step in self._interrupted
        if effects > 1:
            self._broken(f"{step} is at_most_once, and was done {effects} times")
        if self._beside(step) or self.cut_short:
            return  # it may have been anywhere when the process died over the other one, or the lease was lost
        moments = self._moments(step)
        if not moments & (INTERRUPTS | UNCERTAIN) and (interrupted or (effects != 1 and self._came_to(step))):
            self._broken(f"{step} was not interrupted, and was done {effects} times, told of as {interrupted}")
        if moments & INTERRUPTS and not interrupted:
            self._broken(f"{step} was interrupted at {moments}, and nobody was told")
        if moments & BEHIND_THE_EFFECT and effects != 1:
            self._broken(f"{step} died behind its effect, and was done {effects} times")

    def _judge_at_least_once(self, step: str) -> None:
        effects, deaths = len(self._effects[step]), [at for name, at in self._deaths if name == step]
        if step in self._interrupted:
            self._broken(f"{step} is at_least_once, and was told of as interrupted")
        surely = sum(at in BEHIND_THE_EFFECT for at in deaths)
        at_most = 1 + surely + deaths.count(Moment.IN_COMPLETE) + len(self._beside(step)) + self.cut_short
        if effects > at_most:
            self._broken(f"{step} was done {effects} times, and only {at_most - 1} died over it")
        if self._came_to(step) and effects < 1 + surely:
            self._broken(f"{step} was done {effects} times, and {surely} died over it")

    def _judge_results(self) -> None:
        for step, ids in self._got.items():
            if len(ids) > 1:
                self._broken(f"{step} has returned {ids}")
            if not ids <= set(self._effects[step]):
                self._broken(f"{step} has returned what it never did: {ids}")

    def _judge_given_up(self, *, asks: bool) -> None:
        if asks or not self._interrupted or "StepInterruptedError" not in (self._record.error or ""):
            self._broken(f"given up for {self._record.error}")

    def _judge_done(self) -> None:
        if self._record.status is not IdempotencyStatus.COMPLETED or self._record.result is None:
            self._broken(f"not done, and not given up: {self._record}")
        assert self._record.result is not None
        returned = _receipts.validate_json(self._record.result.body)
        wanted = [ASK + step if step in self._interrupted else step for step in STEPS]
        if [receipt.step for receipt in returned] != wanted:
            self._broken(f"completed with the results of {returned}, and not of {wanted}")
        if skipped := [receipt for receipt in returned if {receipt.id} != self._got[receipt.step]]:
            self._broken(f"completed with results that no step has returned: {skipped}")

    def _judge_order(self) -> None:
        """A step begins when the ones before it have returned."""
        ready: set[str] = set()
        names = list(STEPS)
        for line in self._lines:
            if line.what == "begin":
                ready.clear()
            elif line.what == "got":
                ready.add(line.step.removeprefix(ASK))
            elif line.what == "effect":
                before = set(names[: names.index(line.step.removeprefix(ASK))])
                if missing := before - ready - set(SIDE_BY_SIDE if line.step.removeprefix(ASK) in SIDE_BY_SIDE else ()):
                    self._broken(f"{line.step} was done before {missing}")

    def _moments(self, step: str) -> set[Moment]:
        return {at for name, at in self._deaths if name == step}

    def _beside(self, step: str) -> list[Moment]:
        """Where processes have died over the step beside it."""
        others = set(SIDE_BY_SIDE) - {step} if step in SIDE_BY_SIDE else set()
        return [at for name, at in self._deaths if name in others]

    def _came_to(self, step: str) -> bool:
        """Whether the handler has what a step returned, in the end."""
        return not self.given_up or bool(self._got[step])

    def _broken(self, what: str) -> None:
        told = "\n".join(f"  {line}" for line in self._lines)
        raise ViolationError(f"{what}; deaths: {[f'{step}:{at.value}' for step, at in self._deaths]}\n{told}")
