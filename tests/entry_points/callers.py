"""Entry points that callers call directly: the decorator, `run`, batches, dispatchers, steps."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, Literal

from integr8s_idem import BaseEvent, EventRouter
from integr8s_idem.engine.step_slots import Once
from integr8s_idem.engine.work import Executed, HandlerFailed, Outcome
from integr8s_idem.errors import ApplicationError, StoreUnavailableError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler
from integr8s_idem.keys.fingerprints import fingerprint
from integr8s_idem.records import Completed, Failed, InProgress, KeyReused, Reserved
from tests.entry_points.entry import Answer, Case, Entry, Process, Sees, answer_of, replayed
from tests.support.gated import Run


class Caller(Entry):
    """An entry point that returns the value or raises."""

    async def send(self, key: str, payload: str = "p") -> Answer:
        try:
            return Answer(Sees.VALUE, await self.call(key, payload))
        except Exception as error:  # noqa: BLE001   # `answer_of` re-raises unexpected ones
            return answer_of(error)

    @abstractmethod
    async def call(self, key: str, payload: str) -> Any: ...


class ManagerRun(Caller):
    name = "run"
    label = "`manager.run`"

    async def call(self, key: str, payload: str) -> Any:
        async def work() -> Any:
            return await self.work(self.run_here(payload))

        return await self.manager.run(key, work, fingerprint=fingerprint(payload.encode()))


class Decorated(Caller):
    name = "decorator"
    label = "`@idempotent`, `async def`"

    def __init__(self, process: Process) -> None:
        super().__init__(process)

        @idempotent(key="{key}", fingerprint=["payload"], manager=self.manager)
        async def function(key: str, payload: str) -> Any:
            return await self.work(self.run_here(payload))

        self.call = function  # type: ignore[method-assign]

    async def call(self, key: str, payload: str) -> Any: ...


class DecoratedPlain(Entry):
    name = "decorator-plain"
    label = "`@idempotent`, `def`"
    in_threads = True
    words: ClassVar = {Sees.CANCELLED: "`KeyboardInterrupt`"}

    def __init__(self, process: Process) -> None:
        super().__init__(process)

        @idempotent(key="{key}", fingerprint=["payload"], manager=self.manager)
        def function(key: str, payload: str) -> Any:
            return self.work.here(self.run_here(payload))

        self._function = function

    async def send(self, key: str, payload: str = "p") -> Answer:
        return await asyncio.to_thread(self._call, key, payload)

    def _call(self, key: str, payload: str) -> Answer:
        try:
            return Answer(Sees.VALUE, self._function(key, payload))
        except KeyboardInterrupt:
            self.work.interrupted.clear()
            return Answer(Sees.CANCELLED)
        except Exception as error:  # noqa: BLE001   # `answer_of` re-raises unexpected ones
            return answer_of(error)

    async def cancel(self, sending: asyncio.Task[Answer]) -> None:
        # A thread cannot be cancelled; only Ctrl-C interrupts its work.
        self.work.interrupted.set()


class BatchVerbs(Entry):
    """A custom loop over `acquire_batch`, `confirm_batch` and `release_batch`, as in the documentation."""

    name = "batch-verbs"
    label = "`acquire_batch` …"
    sees: ClassVar = {
        Case.TWO_AT_ONCE: (Sees.CONFLICT, Sees.VALUE),
        Case.CRASH: (Sees.CONFLICT, Sees.VALUE),
        # Attempts are counted, but the caller decides when to give up, with `fail`.
        Case.FAILURES: (Sees.ERROR,),
        # One call fails; the caller must write the outcome again.
        Case.DOWN_AFTER: (Sees.DOWN, Sees.VALUE),
        # A later write succeeds unless another worker has taken over the key.
        Case.DOWN_FOR_LONG: (Sees.DOWN, Sees.VALUE),
        # The caller still has the iterator and can confirm again with a list.
        Case.ITERATOR: (Sees.NOT_STORED,),
        # Reservations are not released automatically.
        Case.CANCELLED: (Sees.CANCELLED, Sees.CONFLICT, Sees.VALUE),
    }
    words: ClassVar = {
        Sees.CONFLICT: "`InProgress`",
        Sees.REUSED: "`KeyReused`",
        Sees.LOST: "`False`",
        Sees.DROPPED: "`Completed` without result",
        Sees.NOT_STORED: "`ApplicationError`, nothing stored",
    }
    cancel_lease = 1.0

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._unconfirmed: dict[str, tuple[Reserved, Any]] = {}

    async def send(self, key: str, payload: str = "p") -> Answer:
        if key in self._unconfirmed:
            return await self._try_to_confirm(key)
        try:
            [verdict] = (await self.manager.acquire_batch([key], fingerprint=lambda _: _fingerprint(payload))).values()
        except StoreUnavailableError:
            return Answer(Sees.DOWN)
        match verdict:
            case Reserved():
                return await self._run(key, payload, verdict)
            case Completed():
                return replayed(verdict)
            case InProgress():
                return Answer(Sees.CONFLICT)
            case KeyReused():
                return Answer(Sees.REUSED)
            case _:
                raise AssertionError(verdict)

    async def _run(self, key: str, payload: str, reservation: Reserved) -> Answer:
        try:
            value = await self.work(Run(payload, reservation.attempt, reservation.fence))
        except OSError as error:
            await self.manager.release_batch([reservation])
            return answer_of(error)
        self._unconfirmed[key] = reservation, value
        return await self._try_to_confirm(key)

    async def _try_to_confirm(self, key: str) -> Answer:
        try:
            return await self._confirm(key)
        except StoreUnavailableError:
            return Answer(Sees.DOWN)
        except ApplicationError:
            return Answer(Sees.NOT_STORED)

    async def _confirm(self, key: str) -> Answer:
        reservation, value = self._unconfirmed[key]
        [still_owned] = await self.manager.confirm_batch({reservation: value})
        del self._unconfirmed[key]
        return Answer(Sees.VALUE, value) if still_owned else Answer(Sees.LOST)


def _fingerprint(payload: str) -> bytes:
    return fingerprint(payload.encode())


class Sent(BaseEvent):
    event_type: Literal["sent"] = "sent"
    payload: str


class Dispatcher(Entry):
    """`dispatch` makes one attempt and returns its outcome; workers are built on it."""

    name = "dispatcher"
    label = "`dispatcher.dispatch`"
    sees: ClassVar = {
        # `dispatch` does not wait; its caller waits or pauses a partition.
        Case.TWO_AT_ONCE: (Sees.CONFLICT, Sees.VALUE),
        Case.CRASH: (Sees.CONFLICT, Sees.VALUE),
        Case.DOWN_FOR_LONG: (Sees.UNSTORED, Sees.CONFLICT, Sees.VALUE),
    }
    words: ClassVar = {
        Sees.CONFLICT: "`InProgress`",
        Sees.ERROR: "`HandlerFailed`",
        Sees.GIVEN_UP: "`HandlerFailed`, given up",
        Sees.REUSED: "`KeyReused`",
        Sees.DROPPED: "`Completed` without result",
    }

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        router = EventRouter()
        self.declare(router)
        self._dispatcher = IdempotentEventDispatcher(router, self.manager, invoke=self.invoke)

    def declare(self, router: EventRouter) -> None:
        async def handle(event: Sent) -> Any:
            raise AssertionError("replaced by `invoke`")

        router.on(Sent)(handle)

    async def invoke(self, registered: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, HandlerCall)
        assert isinstance(call.event, Sent)
        return await self.work(Run(call.event.payload, call.attempt.number, call.attempt.fence))

    async def send(self, key: str, payload: str = "p") -> Answer:
        try:
            [outcome] = await self._dispatcher.dispatch(Sent(event_id=key, payload=payload))
        except Exception as error:  # noqa: BLE001   # `answer_of` re-raises unexpected ones
            return answer_of(error)
        return _answer_to(outcome)


def _answer_to(outcome: Outcome[Any]) -> Answer:
    match outcome:
        case Executed():
            return Answer(Sees.VALUE, outcome.value)
        case Completed():
            return replayed(outcome)
        case HandlerFailed():
            return Answer(Sees.GIVEN_UP) if outcome.given_up else answer_of(outcome.error)
        case Failed():
            return Answer(Sees.GIVEN_UP)
        case InProgress():
            return Answer(Sees.CONFLICT)
        case KeyReused():
            return Answer(Sees.REUSED)
        case _:
            raise AssertionError(outcome)


class BatchHandler(Dispatcher):
    """A handler that receives several events at once, each with its own key."""

    name = "batch-handler"
    label = "`@router.on_batch`"

    def declare(self, router: EventRouter) -> None:
        async def handle(events: list[Sent]) -> Any:
            raise AssertionError("replaced by `invoke`")

        router.on_batch(Sent, max_wait=timedelta(milliseconds=5))(handle)

    async def invoke(self, registered: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, BatchCall)
        results = []
        for event, attempt in zip(call.events, call.batch.attempts, strict=True):
            assert isinstance(event, Sent)
            results.append(await self.work(Run(event.payload, attempt.number, attempt.fence)))
        return results


class Step(Caller):
    """A step within a run; the work of the case is the step."""

    name = "step-at-least-once"
    label = "a step `at_least_once`"
    once: ClassVar = Once.AT_LEAST_ONCE
    sees: ClassVar = {
        # The lease of the run ends no later than the lease of the step.
        Case.DOWN_FOR_LONG: (Sees.LOST, Sees.VALUE),
    }

    async def call(self, key: str, payload: str) -> Any:
        async def step() -> Any:
            return await self.work(self.run_here(payload))

        async def unit() -> Any:
            return await self.manager.steps().run("effect", step, once=self.once)

        return await self.manager.run(key, unit, fingerprint=fingerprint(payload.encode()))


class StepAtMostOnce(Step):
    """A step that is not repeated after an unknown outcome: the run is given up."""

    name = "step-at-most-once"
    label = "a step `at_most_once`"
    once = Once.AT_MOST_ONCE
    repeats = False
    sees: ClassVar = {
        Case.CRASH: (Sees.GIVEN_UP,),
        Case.FAILURE: (Sees.ERROR, Sees.GIVEN_UP),
        Case.ZOMBIE: (Sees.LOST, Sees.GIVEN_UP),
        Case.DOWN_FOR_LONG: (Sees.LOST, Sees.GIVEN_UP),
        Case.CANCELLED: (Sees.CANCELLED, Sees.GIVEN_UP),
    }
    words: ClassVar = {Sees.GIVEN_UP: "`StepInterruptedError`"}
