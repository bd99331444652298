"""Steps: named parts of one unit of work, each remembered by itself.

    async def fulfil(event: OrderPlaced, steps: FromDishka[Steps]) -> None:
        reservation = await steps.run("reserve", inventory.reserve, event.order_id)
        await steps.run("ship", shipping.ship, reservation, once="at_most_once")

A run after a crash gets the results of the steps that were done, and goes on where the first one stopped.  No
engine: a step is a record beside that of its unit, in any store, reserved and completed as every record is.

A unit has numbered places for its steps, `…;s0`, `…;s1`, and a step takes the next free one.  So a later run finds
all of them without a search, the ones included that its code knows no more.  What is in a place is told by the
fingerprint, a hash of the step's name, and by the media type of the result, which names it for people.
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

PLACES_AT_ONCE: Final = 16
"""Places that are looked at in one round trip."""

_NAME: Final = "; step="


class Once(str, Enum):
    """What becomes of a step whose run ended in its midst."""

    AT_LEAST_ONCE = "at_least_once"
    """It is done again: for what is harmless to repeat."""
    AT_MOST_ONCE = "at_most_once"
    """It is not done again, and the unit is given up with `StepInterruptedError`: for what must never happen twice."""


LONGEST_NAME: Final = 100
"""Characters of a step's name."""


class Steps:
    """The steps of one run.  `IdempotencyManager.steps()` gives those of the run that is under way."""

    def __init__(self, space: KeySpace, executor: Executor, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._executor = executor
        self._repository = repository
        self._run = run
        self._places = _Places(space, repository, run)
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
        """Do a step, unless an earlier run has done it; then give what it returned.

        Args:
            name: Names the step within its unit, at every run the same.  At most 100 characters.
            function: Does it, with the arguments behind.  Its return annotation gives a remembered result its type.
            once: Whether a step that was begun, and whose end is not known, is done again.

        Raises:
            StepInterruptedError: It is `at_most_once`, and an earlier run has begun it.
            PreviouslyFailedError: An earlier run has given it up.
            LeaseLostError: The unit is no longer ours; the step was not begun.
            ResultDroppedError: It is done, and what it returned was too large to keep.
            ApplicationError: The name was used before in this run; the unit's outcome commits with a transaction of
                its own, which steps do not; the run is over; or `function` is no async function.
            Exception: Whatever `function` raises, unchanged.
        """
        once = chosen(Once, once, "once")
        self._check(name)
        refuse_call(function, f"steps.run({name!r}, reserve, order_id)")
        refuse_generator(function)
        await self._places.look()
        mark = mark_of(name)
        if (before := self._places.done_before(mark)) is not None:
            return cast("T", self._remembered(name, before, function))
        step = _Step(name, function, args, kwargs, once)
        while True:
            work = Work(
                self._space.step(
                    self._run.attempt.key, f"{self._run.attempt.label} step {name}", self._places.of(mark)
                ),
                mark,
                self._run.work.ttl,
                on_failure=OnFailure.BLOCK if once is Once.AT_MOST_ONCE else None,
                on_key_reused=OnKeyReused.RAISE,
            )
            outcome = await self._settled(work, step)
            if not isinstance(outcome, KeyReused):
                return cast("T", self._value(step, work, outcome))
            # A run before this one has taken the place meanwhile: it is somewhere behind.
            await self._places.look_again(mark)

    def _check(self, name: str) -> None:
        if self._run.commits_itself:
            raise ApplicationError(
                f"step {name}: the handler's outcome commits with its own transaction, and steps commit one by one. "
                "Write in the transaction, and have the steps in a handler of their own"
            )
        if not name or len(name) > LONGEST_NAME:
            raise ApplicationError(f"a step's name has 1 to {LONGEST_NAME} characters, and this is {name[:200]!r}")
        if name in self._asked:
            raise ApplicationError(
                f"two steps of {self._run.attempt.label} are named {name}, and a later run could not tell them apart: "
                'number them, as in f"ship-{number}"'
            )
        self._asked.add(name)

    async def _settled(self, work: Work, step: _Step) -> Outcome[Any]:
        """One end of the step.  Patience, with a store that is down, too, lasts as long as the unit's lease does."""

        async def one_pass() -> Outcome[Any]:
            while True:
                self._refuse_if_over(step)
                await self._refuse_if_lost()
                try:
                    return await self._executor.execute(work, lambda attempt: self._do(step, attempt), _PATIENT)
                except StoreUnavailableError as error:
                    await _pause(error)

        # A run before this one may be at it still; its lease ends soon, or it does.
        return await self._executor.await_outcome(work, one_pass, on_in_progress=OnInProgress.WAIT)

    async def _do(self, step: _Step, attempt: Attempt) -> object:
        if step.once is Once.AT_MOST_ONCE and attempt.number > 1:
            raise StepInterruptedError(step.name, self._run.attempt.label, "that run did not come to its end")
        # Once more, with the place taken: whoever takes the unit over from here on finds the step in it.
        await self._refuse_if_lost()
        await turn_of_the_loop()
        await self._refuse_late_unit()
        check_start(run_of(attempt))
        return await step.call()

    def _refuse_if_over(self, step: _Step) -> None:
        """A step that was left behind must not begin when its unit has failed, or a later run is at it."""
        if self._run.is_over:
            raise ApplicationError(
                f"step {step.name} of {self._run.attempt.label} had not begun when its run ended: wait for all steps, "
                "as asyncio.gather(…, return_exceptions=True) does"
            )

    async def _refuse_if_lost(self) -> None:
        """A run that was stalled, and taken over meanwhile, begins nothing more."""
        lease, attempt = self._run.lease, self._run.attempt
        if lease is None:
            return  # it runs unguarded
        while True:
            try:
                [unit] = await self._repository.get([attempt.key])
                break
            except StoreUnavailableError as error:
                await _pause(error)
        # A record that is gone was lost by the store: the unit's completion finds out and reserves it anew.
        if unit is not None and unit.fence != lease.reservation.fence:
            raise LeaseLostError(attempt.label, attempt.number, lease.reservation.lease, self._space.scope, unit.owner)

    async def _refuse_late_unit(self) -> None:
        """A step does not start on a lease of its unit that is late: it is renewed first, if it is still ours."""
        lease, attempt = self._run.lease, self._run.attempt
        while lease is not None and lease.is_late():
            try:
                is_ours = await self._executor.renew_late(lease)
            except StoreUnavailableError as error:
                await _pause(error)  # an outage is no failure of the step
                continue
            if not is_ours:
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
        orphans = self._places.not_among({mark_of(name) for name in self._asked})
        if not orphans:
            return
        self._executor.observer.count(Signal.STEP_ORPHANED, self._run.work.event_type, len(orphans))
        logger.warning(
            "%s: attempt %d has ended without asking for what an earlier run has done as step %s.  If the step has "
            "another name now, it was done twice",
            self._run.attempt.label,
            self._run.attempt.number,
            ", ".join(orphans),
        )


class _Step:
    """What is to be done, and what it returned."""

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
            raise ApplicationError(f"step {self.name} is no async function; what it did has been done")
        self.value = repeatable(await running, f"step {self.name}", self.function)
        return _with_name(self.value, self.name)


class _Places:
    """Where the steps of one unit lie."""

    def __init__(self, space: KeySpace, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._repository = repository
        self._run = run
        self._looking = asyncio.Lock()
        self._looked = run.attempt.number == 1 and not run.attempt.generation
        """Of a first run there is nothing to be found."""
        self._taken: dict[bytes, int] = {}
        self._free = 0
        self._found: dict[bytes, IdempotencyRecord] = {}
        """Steps of earlier runs in this generation."""
        self._before: dict[bytes, IdempotencyRecord] = {}
        """Steps that an earlier generation has completed: a replay goes on behind them."""

    def of(self, mark: bytes) -> int:
        """The place of a step: where it was found, or the next that is free."""
        if mark not in self._taken:
            self._taken[mark] = self._free
            self._free += 1
        return self._taken[mark]

    def done_before(self, mark: bytes) -> IdempotencyRecord | None:
        return self._before.get(mark)

    def not_among(self, marks: set[bytes]) -> list[str]:
        """Names of steps that were found, and are none of these."""
        found = {**self._before, **self._found}
        return [_name_in(record) for mark, record in found.items() if mark not in marks]

    async def look(self) -> None:
        """Find what earlier runs have begun, once."""
        async with self._looking:
            if not self._looked:
                await self._look()
                self._looked = True

    async def look_again(self, mark: bytes) -> None:
        """The place that seemed free for a step is another's."""
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
        for place, record in await self._records(attempt.key):
            self._free = max(self._free, place + 1)
            if record.fingerprint is not None:
                self._taken[record.fingerprint] = place
                self._found[record.fingerprint] = record

    async def _records(self, unit: str) -> list[tuple[int, IdempotencyRecord]]:
        found: list[tuple[int, IdempotencyRecord]] = []
        for begin in range(0, 10_000, PLACES_AT_ONCE):
            keys = [self._space.full(self._space.step(unit, "", begin + place)) for place in range(PLACES_AT_ONCE)]
            page = enumerate(await self._asked(keys), begin)
            here = [(place, record) for place, record in page if record is not None]
            found += here
            if not here:
                break
        return found

    async def _asked(self, keys: list[str]) -> list[IdempotencyRecord | None]:
        while True:
            try:
                return await self._repository.get(keys)
            except StoreUnavailableError as error:
                await _pause(error)


def mark_of(name: str) -> bytes:
    """What tells a step from others in the record of its place."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:FINGERPRINT_BYTES]


async def _pause(_: object) -> None:
    await asyncio.sleep(FIRST_LOOK * 4)


_PATIENT: Final = RunOptions(_pause)


def _with_name(value: object, name: str) -> object:
    try:
        stored = encode_result(value)
    except Exception:  # noqa: BLE001  # a serializer is the user's code; the step is done, and its result is dropped
        return value
    return StoredResult(stored.body, f"{stored.content_type}{_NAME}{quote(name, safe='')}")


def _without_name(stored: StoredResult) -> StoredResult:
    return StoredResult(stored.body, stored.content_type.partition(_NAME)[0])


def step_name(stored: StoredResult) -> str:
    """The name of the step that has this result; empty for a result of something else."""
    return unquote(stored.content_type.partition(_NAME)[2])


def _name_in(record: IdempotencyRecord) -> str:
    name = step_name(record.result) if record.result is not None else ""
    return name or "(one that did not end)"
