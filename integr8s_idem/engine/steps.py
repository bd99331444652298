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

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import quote, unquote

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import OnFailure, OnInProgress, OnKeyReused, chosen
from integr8s_idem.engine.active_runs import ActiveRun, check_start, run_of
from integr8s_idem.engine.executor import FIRST_LOOK, Executor
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.results import (
    decode_result,
    encode_result,
    refuse_call,
    refuse_generator,
    repeatable,
    return_type_of,
)
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.engine.work import Attempt, Executed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    LeaseLostError,
    ResultDroppedError,
    StepInterruptedError,
    StoreUnavailableError,
)
from integr8s_idem.keys import FINGERPRINT_BYTES, KeySpace, first_generation_key, generation_key
from integr8s_idem.records import (
    Completed,
    Failed,
    IdempotencyRecord,
    IdempotencyStatus,
    KeyReused,
    StoredResult,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Signal

T = TypeVar("T")

logger = logging.getLogger(__name__)

SLOTS_PER_READ: Final = 16
"""Number of slots read in one round trip."""

_NAME: Final = "; step="


class Once(str, Enum):
    """Whether an interrupted step runs again."""

    AT_LEAST_ONCE = "at_least_once"
    """The step runs again: use it if repetition is harmless."""
    AT_MOST_ONCE = "at_most_once"
    """The step does not run again, and the unit is given up: use it for side effects that must never happen twice."""


LONGEST_NAME: Final = 100
"""Maximum number of characters of a step's name."""


class Steps:
    """The steps of one run.  `IdempotencyManager.steps()` returns those of the current run."""

    def __init__(self, space: KeySpace, executor: Executor, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._executor = executor
        self._repository = repository
        self._run = run
        self._slots = _Slots(space, repository, run)
        self._asked: set[str] = set()
        if run.attempt.number > 1 or run.attempt.generation:
            run.at_end = (*run.at_end, self._report_orphans)

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
        refuse_call(function, f"steps.run({name!r}, reserve, order_id)")
        refuse_generator(function)
        await self._slots.look()
        mark = mark_of(name)
        if (before := self._slots.done_before(mark)) is not None:
            return cast("T", self._remembered(name, before, function))
        step = _Step(name, function, args, kwargs, once)
        while True:
            work = Work(
                self._space.step(self._run.attempt.key, f"{self._run.attempt.label} step {name}", self._slots.of(mark)),
                mark,
                self._run.work.ttl,
                on_failure=OnFailure.BLOCK if once is Once.AT_MOST_ONCE else None,
                on_key_reused=OnKeyReused.RAISE,
            )
            outcome = await self._settled(work, step)
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

    async def _settled(self, work: Work, step: _Step) -> Outcome[Any]:
        """Run the step until it has an outcome.  It waits for an unavailable store until the lease of the unit ends."""

        async def one_pass() -> Outcome[Any]:
            while True:
                self._refuse_if_over(step)
                await self._refuse_if_lost()
                try:
                    return await self._executor.execute(work, lambda attempt: self._do(step, attempt), _RETRY_FOREVER)
                except StoreUnavailableError as error:
                    await _pause(error)

        # An earlier run may still be running the step; it ends soon, or its lease does.
        return await self._executor.await_outcome(work, one_pass, on_in_progress=OnInProgress.WAIT)

    async def _do(self, step: _Step, attempt: Attempt) -> object:
        if step.once is Once.AT_MOST_ONCE and attempt.number > 1:
            raise StepInterruptedError(step.name, self._run.attempt.label, "that run did not finish")
        # Check again now that the slot is taken: a worker that takes the unit over later finds the step there.
        await self._refuse_if_lost()
        await turn_of_the_loop()
        await self._refuse_late_unit()
        check_start(run_of(attempt))
        return await step.call()

    def _refuse_if_over(self, step: _Step) -> None:
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
                await _pause(error)
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
                await _pause(error)  # an outage is not a failure of the step
                continue
            if not is_held:
                raise LeaseLostError(attempt.label, attempt.number, lease.reservation.lease, self._space.scope)

    def _value(self, step: _Step, work: Work, outcome: Outcome[Any]) -> Any:
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
        return decode_result(label, _without_name(done.result), return_type_of(function))

    def _report_orphans(self) -> None:
        orphans = self._slots.not_among({mark_of(name) for name in self._asked})
        if not orphans:
            return
        self._executor.observer.count(Signal.STEP_ORPHANED, self._run.work.event_type, len(orphans))
        logger.warning(
            "%s: attempt %d ended without requesting step %s, which an earlier run completed.  If the step was "
            "renamed, it ran twice",
            self._run.attempt.label,
            self._run.attempt.number,
            ", ".join(orphans),
        )


class _Step:
    """A step and its result."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        once: Once,
    ) -> None:
        self.name = name
        self.function = function
        self.once = once
        self._args, self._kwargs = args, kwargs
        self.value: Any = None

    async def call(self) -> object:
        running = self.function(*self._args, **self._kwargs)
        if not inspect.isawaitable(running):
            raise ApplicationError(f"step {self.name} is not an async function; its side effects have already happened")
        self.value = repeatable(await running, f"step {self.name}", self.function)
        return _with_name(self.value, self.name)


class _Slots:
    """Assigns the steps of a unit to slots."""

    def __init__(self, space: KeySpace, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._repository = repository
        self._run = run
        self._looking = asyncio.Lock()
        self._looked = run.attempt.number == 1 and not run.attempt.generation
        """The first run has no earlier steps."""
        self._taken: dict[bytes, int] = {}
        self._free = 0
        self._found: dict[bytes, IdempotencyRecord] = {}
        """Steps of earlier runs in this generation."""
        self._before: dict[bytes, IdempotencyRecord] = {}
        """Steps completed in an earlier generation; a replay does not repeat them."""

    def of(self, mark: bytes) -> int:
        """Return the slot of a step: where it was found, or the next free one."""
        if mark not in self._taken:
            self._taken[mark] = self._free
            self._free += 1
        return self._taken[mark]

    def done_before(self, mark: bytes) -> IdempotencyRecord | None:
        return self._before.get(mark)

    def not_among(self, marks: set[bytes]) -> list[str]:
        """Return the names of steps of earlier runs that are not in `marks`."""
        found = {**self._before, **self._found}
        return [_name_in(record) for mark, record in found.items() if mark not in marks]

    async def look(self) -> None:
        """Read the steps of earlier runs, once."""
        async with self._looking:
            if not self._looked:
                await self._look()
                self._looked = True

    async def look_again(self, mark: bytes) -> None:
        """Read the steps again after the slot of `mark` turned out to be taken by another step."""
        async with self._looking:
            del self._taken[mark]
            await self._look()

    async def _look(self) -> None:
        attempt = self._run.attempt
        first = first_generation_key(attempt.key, attempt.generation)
        for generation in range(attempt.generation):
            for _, record in await self._records(generation_key(first, generation)):
                if record.status is IdempotencyStatus.COMPLETED and record.fingerprint is not None:
                    self._before[record.fingerprint] = record
        for slot, record in await self._records(attempt.key):
            self._free = max(self._free, slot + 1)
            if record.fingerprint is not None:
                self._taken[record.fingerprint] = slot
                self._found[record.fingerprint] = record

    async def _records(self, unit: str) -> list[tuple[int, IdempotencyRecord]]:
        found: list[tuple[int, IdempotencyRecord]] = []
        for begin in range(0, 10_000, SLOTS_PER_READ):
            keys = [self._space.full(self._space.step(unit, "", begin + offset)) for offset in range(SLOTS_PER_READ)]
            page = enumerate(await self._get(keys), begin)
            records = [(slot, record) for slot, record in page if record is not None]
            found += records
            if not records:
                break
        return found

    async def _get(self, keys: list[str]) -> list[IdempotencyRecord | None]:
        while True:
            try:
                return await self._repository.get(keys)
            except StoreUnavailableError as error:
                await _pause(error)


def mark_of(name: str) -> bytes:
    """Return the fingerprint of a step's name, which identifies the step in its slot."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:FINGERPRINT_BYTES]


async def _pause(_: object) -> None:
    await asyncio.sleep(FIRST_LOOK * 4)


_RETRY_FOREVER: Final = RunOptions(_pause)


def _with_name(value: object, name: str) -> object:
    try:
        stored = encode_result(value)
    except Exception:  # noqa: BLE001  # user-defined serializers may raise; the step is done, so drop the result
        return value
    return StoredResult(stored.body, f"{stored.content_type}{_NAME}{quote(name, safe='')}")


def _without_name(stored: StoredResult) -> StoredResult:
    return StoredResult(stored.body, stored.content_type.partition(_NAME)[0])


def step_name(stored: StoredResult) -> str:
    """Return the name of the step with this result; empty if it is not the result of a step."""
    return unquote(stored.content_type.partition(_NAME)[2])


def _name_in(record: IdempotencyRecord) -> str:
    name = step_name(record.result) if record.result is not None else ""
    return name or "(unfinished)"
