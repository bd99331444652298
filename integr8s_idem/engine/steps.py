"""Steps: named parts of a unit of work, each with its own record.

    async def fulfil(event: OrderPlaced, steps: FromDishka[Steps]) -> None:
        reservation = await steps.run("reserve", inventory.reserve, event.order_id)
        await steps.run("ship", shipping.ship, reservation, once="at_most_once")

A run after a crash gets the results of completed steps and continues where the previous run stopped.  This needs no
workflow engine: a step is a record next to that of its unit, in any store, reserved and completed like other records.

A unit has numbered slots for its steps, `…;s0`, `…;s1`, and a step takes the next free one.  A later run thus finds all
of them without a search, including steps that were removed from the code.  The step in a slot is identified by the
fingerprint, a hash of its name; the media type of the result contains the name in readable form.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar, cast

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import OnFailure, OnInProgress, OnKeyReused, chosen
from integr8s_idem.engine.active_runs import ActiveRun, check_start, run_of
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.results import (
    check_function,
    decode_result,
    return_type_of,
)
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.engine.step_slots import (
    LONGEST_NAME,
    Once,
    StepSlot,
    StepSlots,
    mark_of,
    pause_briefly,
    without_step_name,
)
from integr8s_idem.engine.work import Attempt, Executed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    LeaseLostError,
    ResultDroppedError,
    StepInterruptedError,
    StoreUnavailableError,
)
from integr8s_idem.keys import KeySpace
from integr8s_idem.records import (
    Completed,
    Failed,
    IdempotencyRecord,
    KeyReused,
    Pending,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Signal

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Steps:
    """The steps of one run.  `IdempotencyManager.steps()` returns those of the current run."""

    def __init__(self, space: KeySpace, executor: Executor, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._executor = executor
        self._repository = repository
        self._run = run
        self._slots = StepSlots(space, repository, run)
        self._asked: set[str] = set()

    async def run(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        once: Once | Literal["at_least_once", "at_most_once"] = Once.AT_LEAST_ONCE,
        **kwargs: Any,
    ) -> T:
        """Run a step, or return its stored result if an earlier run completed it.

        Args:
            name: Name of the step within its unit, the same in every run.  At most 100 characters.
            function: Async function of the step, called with the remaining arguments.  A restored result has the type
                of its return annotation.
            once: Whether to run a step again if an earlier run started it and its outcome is unknown.

        Raises:
            StepInterruptedError: The step is `at_most_once`, and an earlier run has started it.
            PreviouslyFailedError: An earlier run has given the step up.
            LeaseLostError: The unit has another owner; the step was not started.
            ResultDroppedError: The step is done, but its result was too large to store.
            ApplicationError: The name was used before in this run; the outcome of the unit commits with its own
                transaction, which does not include steps; the run is over; or `function` is not an async function.
            Exception: Any error of `function`, unchanged.
        """
        once = chosen(Once, once, "once")
        self._check(name)
        check_function(function, f"steps.run({name!r}, reserve, order_id)")
        await self._slots.look()
        mark = mark_of(name)
        if (before := self._slots.done_before(mark)) is not None:
            return cast("T", self._remembered(name, before, function))
        step = StepSlot(name, function, args, kwargs, once)
        while True:
            slot = await self._slots.take(mark)
            try:
                work = Work(
                    self._space.step(self._run.attempt.key, f"{self._run.attempt.label} step {name}", slot),
                    mark,
                    self._run.work.ttl,
                    on_failure=OnFailure.BLOCK if once is Once.AT_MOST_ONCE else None,
                    on_key_reused=OnKeyReused.RAISE,
                    handler=self._run.work.handler,
                )
                outcome = await self._settled(work, mark, step)
            finally:
                self._slots.release(mark)
            if not isinstance(outcome, KeyReused):
                return cast("T", self._value(step, work, outcome))
            # An earlier run has taken the slot in the meantime; its step must be found in another one.
            await self._slots.look_again(mark)

    def _check(self, name: str) -> None:
        if self._run.commits_itself:
            raise ApplicationError(
                f"step {name}: the handler's outcome commits with its own transaction, and steps commit one by one. "
                "Write in the transaction, or move the steps to another handler"
            )
        if not name or len(name) > LONGEST_NAME:
            raise ApplicationError(f"the name of a step must have 1 to {LONGEST_NAME} characters, not {name[:200]!r}")
        if name in self._asked:
            raise ApplicationError(
                f"two steps of {self._run.attempt.label} are named {name}, so a later run could not distinguish them: "
                'number them, as in f"ship-{number}"'
            )
        self._asked.add(name)

    async def _settled(self, work: Work, mark: bytes, step: StepSlot) -> Outcome[Any]:
        """Run the step until it has an outcome.  It waits for an unavailable store until the lease of the unit ends."""

        # A later run must find a trace of an `at_most_once` step.
        options = RunOptions(pause_briefly, needs_reservation=step.once is Once.AT_MOST_ONCE)

        async def do(attempt: Attempt) -> object:
            if work.known:
                self._slots.note_recorded(mark)
            else:  # a policy runs the step without a record
                self._slots.release(mark)
            return await self._do(step, attempt)

        async def one_pass() -> Outcome[Any]:
            while True:
                self._refuse_if_over(step)
                await self._refuse_if_lost()
                try:
                    outcome = await self._executor.execute(work, do, options)
                except StoreUnavailableError as error:
                    await pause_briefly(error)
                else:
                    if work.known:
                        self._slots.note_recorded(mark)
                    return outcome

        try:
            outcome = await one_pass()
            if isinstance(outcome, Pending):
                # An earlier run may still be running the step; it ends soon, or its lease does.
                outcome = await self._executor.settled(work, outcome, one_pass, on_in_progress=OnInProgress.WAIT)
            return outcome
        finally:
            self._executor.release_unstarted(work)

    async def _do(self, step: StepSlot, attempt: Attempt) -> object:
        if step.once is Once.AT_MOST_ONCE and attempt.number > 1:
            raise StepInterruptedError(step.name, self._run.attempt.label, "that run did not finish")
        # Check again now that the slot is taken: a worker that takes the unit over later finds the step there.
        await self._refuse_if_lost()
        await turn_of_the_loop()
        await self._refuse_late_unit()
        check_start(run_of(attempt))
        return await step.call()

    def _refuse_if_over(self, step: StepSlot) -> None:
        """Reject a step that starts after its run has ended: the unit has failed, or a later run is in progress."""
        if self._run.is_over:
            raise ApplicationError(
                f"step {step.name} of {self._run.attempt.label} had not started when its run ended: wait for all "
                "steps, for example with asyncio.gather(…, return_exceptions=True)"
            )

    async def _refuse_if_lost(self) -> None:
        """Reject a step of a run that was stalled and taken over by another worker."""
        lease, attempt = self._run.lease, self._run.attempt
        if lease is None:
            return  # the run is unguarded
        while True:
            try:
                [unit] = await self._repository.get([attempt.key])
                break
            except StoreUnavailableError as error:
                await pause_briefly(error)
        # A missing record was lost by the store; the completion of the unit handles that.
        if unit is not None and unit.fence != lease.reservation.fence:
            raise LeaseLostError(attempt.label, attempt.number, lease.reservation.lease, self._space.scope, unit.owner)

    async def _refuse_late_unit(self) -> None:
        """Renew a late lease of the unit before the step starts, or reject the step if the lease is lost."""
        lease, attempt = self._run.lease, self._run.attempt
        while lease is not None and lease.is_late():
            try:
                is_held = await self._executor.renew_late(lease)
            except StoreUnavailableError as error:
                await pause_briefly(error)  # an outage is not a failure of the step
                continue
            if not is_held:
                raise LeaseLostError(attempt.label, attempt.number, lease.reservation.lease, self._space.scope)

    def _value(self, step: StepSlot, work: Work, outcome: Outcome[Any]) -> Any:
        match outcome:
            case Executed():
                return step.value
            case Completed():
                return self._remembered(step.name, outcome, step.function)
            case Failed() if step.once is Once.AT_MOST_ONCE:
                raise StepInterruptedError(step.name, self._run.attempt.label, outcome.error)
        error = error_of(work.key.label, outcome)
        assert error is not None, "the step is not done"
        raise error

    def _remembered(self, name: str, done: Completed | IdempotencyRecord, function: Callable[..., object]) -> Any:
        label = f"{self._run.attempt.label} step {name}"
        if done.result is None:
            raise ResultDroppedError(label)
        return decode_result(label, without_step_name(done.result), return_type_of(function))

    def report_orphans(self) -> None:
        """Report steps that an earlier attempt completed and this one, which has returned, did not request."""
        attempt = self._run.attempt
        if attempt.number == 1 and not attempt.generation:
            return  # there was no earlier attempt
        orphans = self._slots.not_among({mark_of(name) for name in self._asked})
        if not orphans:
            return
        self._executor.observer.count(Signal.STEP_ORPHANED, self._run.work.event_type, len(orphans))
        logger.warning(
            "%s: attempt %d ended without requesting step %s, which an earlier run completed.  If the step was "
            "renamed, it ran twice",
            attempt.label,
            attempt.number,
            ", ".join(orphans),
        )


class UnrecordedSteps(Steps):
    """The steps of an unguarded handler: each of them runs in every attempt, as without the library."""

    def __init__(self) -> None:
        """Create the steps, which need no run and no store."""

    async def run(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        once: Once | Literal["at_least_once", "at_most_once"] = Once.AT_LEAST_ONCE,
        **kwargs: Any,
    ) -> T:
        """Run `function`.  Raises any error of it, unchanged."""
        check_function(function, f"steps.run({name!r}, reserve, order_id)")
        return await function(*args, **kwargs)
