"""Run the handlers of reserved work items in a few tasks.

A runner is a task that runs one item after another.  When a handler waits for something, another runner continues with
the next item.  So a handler that never waits needs no task of its own, and as many run concurrently as there are slots.

A runner without items stays a moment for the next ones: starting a task for them takes longer than many handlers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from functools import partial
from itertools import compress
from typing import Any, Final, TypeAlias

from integr8s_idem._util.first_step import rest_in_context
from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.engine.run import Returned, Run
from integr8s_idem.engine.work import Executed, NotStarted
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry.log_fields import SOURCE
from integr8s_idem.worker.assignments import AbandonedError, Delivery, WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.look_ahead import LONGEST_HOLD
from integr8s_idem.worker.outcome_recorder import OutcomeRecorder
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.poison_events import FirstOutcome
from integr8s_idem.worker.slot_horizon import SlotHorizon

TURN: Final = 50
"""Items that a runner handles before it yields to the event loop."""

MOST_IDLE: Final = 100
"""Runners that stay without items."""

_Waiting: TypeAlias = tuple[Delivery, Context, Coroutine[Any, Any, None], object]
"""A delivery whose handler waits, the context of the handler, its coroutine, and what it waits for."""


class Runners:
    """Runs the handlers of items, each in a slot while it waits for something."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        tasks: PipelineTasks,
        conclusions: Conclusions,
        may_wait: Callable[[], bool],
        meanwhile: Callable[[Sequence[WorkItem]], None] | None,
        horizon: SlotHorizon,
        taken: Callable[[], None],
    ) -> None:
        """
        Args:
            may_wait, meanwhile: See `OutcomeRecorder`.
            horizon: Limits how many items with reserved keys are added while no slot is free.
            taken: Called when items have been taken, so that others can be added.
        """
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._circuit = processor.circuit
        self._tasks = tasks
        self._conclusions = conclusions
        self.runnable: deque[WorkItem] = deque()
        """Items that no runner has taken."""
        self._old = 0
        """How many of the first runnable items were there at the last call of `_release_old`."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls `_release_old`, while items or runners wait."""
        self._horizon = horizon
        self._taken = taken
        self._succeeded: list[tuple[WorkItem, int]] = []
        """Items whose handlers have succeeded since the runner waited, and the numbers of their attempts."""
        self._recorder = OutcomeRecorder(processor, tasks, conclusions, self._are_more_to_come, may_wait, meanwhile)
        self._last = 0
        """Number of the last runner."""
        self._current: int | None = None
        """The runner that takes the next item; the others wait for handlers that they have started, or are idle."""
        self._oldest = 1
        """Number of the first runner that still stays when it has no items."""
        self._idle: dict[int, asyncio.Future[bool]] = {}
        """Runners without items, and the futures that resume them: whether there are items, or they end."""
        self._pace = pace_of(asyncio.get_running_loop())
        self._context = copy_context()
        """Context of the runners; each handler runs in the context of its delivery."""

    def add(self, item: WorkItem) -> None:
        """Add an item, to run when `start` is called or a runner is free, and when a slot is."""
        if item.delivery.assignment.closed:
            self._conclusions.abandon(item)  # it might wait for a slot as long as others hang
            return
        self.runnable.append(item)

    def _are_more_to_come(self) -> bool:
        return bool(self.runnable) and self._slots.free > 0

    def start(self) -> None:
        """Resume or start a runner if there are items to run and no runner takes them."""
        if not self.runnable:
            return
        if self._timer is None:
            self._set_timer()
        if self._current is not None or not self._slots.free or self._isolation.is_closed:
            return
        while self._idle:
            number, resumed = self._idle.popitem()
            if not resumed.done():  # its task has not been cancelled
                self._current = number
                resumed.set_result(True)
                return
        self._last += 1
        self._current = number = self._last
        self._tasks.begin(self._runner(number), self._context, partial(self._ended, number))

    def release(self, *, only_closed: bool) -> None:
        """Release items that no runner has taken; with `only_closed`, only those of closed assignments."""
        runnable, old = list(self.runnable), self._old
        kept = [only_closed and not item.delivery.assignment.closed for item in runnable]
        self.runnable.clear()
        self.runnable.extend(compress(runnable, kept))
        self._old = sum(kept[:old])
        for item, is_kept in zip(runnable, kept, strict=True):
            if not is_kept:
                self._conclusions.abandon(item)  # the turn of the next one in its lane may begin

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LONGEST_HOLD, self._release_old)

    def _release_old(self) -> None:
        """End idle runners, and release the keys of items that have waited for long if all slots are in use.

        A runner that stayed would keep what handlers have attached to its task, such as callbacks and timers.
        """
        self._timer = None
        self._oldest = self._last + 1
        for resumed in self._idle.values():
            if not resumed.done():
                resumed.set_result(False)
        if not self._slots.free:  # otherwise, their turn comes soon, even if handlers block the event loop
            self._release_keys()
        self._old = len(self.runnable)
        if self.runnable and self._timer is None:
            self._set_timer()

    def _release_keys(self) -> None:
        """Release the keys of items that have waited since the last call of `_release_old`."""
        waited = [self.runnable.popleft() for _ in range(self._old)]
        kept = []
        for item in waited:
            if item.run is None:
                kept.append(item)
            else:
                self._horizon.slow_down()
                item.release()
                self._conclusions.conclude(item, NotStarted())
        self.runnable.extendleft(reversed(kept))

    def _ended(self, runner: int, task: asyncio.Task[None]) -> None:
        if self._current == runner:
            self._current = None
        self._tasks.has_succeeded(task)
        self.start()

    async def _runner(self, number: int) -> None:
        task = asyncio.current_task()
        assert task is not None, "runners are tasks"
        try:
            while await self._wait_for_turn(number):
                self._current = number
                waiting = self._run_items(task)
                if waiting is not None:
                    delivery, context, work, waiting_for = waiting
                    self._slots.take()  # only now: nobody can see a handler that does not wait
                    self._taken()
                    self._current = None
                    self._end_items()
                    self.start()
                    self._isolation.enter()  # only now: no suspect can look before a handler waits
                    delivery.add_task(task)
                    try:
                        await rest_in_context(context, work, waiting_for)
                    finally:
                        delivery.remove_task(task)
                        self._isolation.leave()
                        if self._current is None:
                            self._current = number  # rather than another one, which would have to be resumed
                        self._slots.release()
                    is_closed = delivery.assignment.closed
                    del waiting, delivery, context, work, waiting_for  # an idle runner must not keep them in memory
                    if is_closed:
                        break  # the worker waits for this task, even if the handler has withdrawn its cancellation
                elif not task.cancelling():
                    self._taken()
                    self._end_items()  # in a lane, the next ones are added
                    if self.runnable and not self._pace.is_turn_over():
                        await asyncio.sleep(0)
                if task.cancelling():
                    break  # by the handler: the next one would be cancelled when it waits, or see that its task was
        finally:
            self._end_items()

    def _run_items(self, task: asyncio.Task[None]) -> _Waiting | None:
        """Run items until a handler waits for something, none are left, or others have to run."""
        for _ in range(TURN):
            item = self.runnable.popleft()
            if self._old:
                self._old -= 1
            work, delivery = self._run(item), item.delivery
            context = delivery.context.copy()
            try:
                return delivery, context, work, context.run(work.send, None)
            except StopIteration:
                if task.cancelling() or not self.runnable or self._isolation.is_closed or self._pace.is_turn_over():
                    break
        return None

    async def _wait_for_turn(self, number: int) -> bool:
        """Wait until a runner may run items; `False` if it is not needed for them."""
        self._end_items()
        while True:
            while not self._may_run(number):
                if not await self._stay(number):
                    return False
            if not self._pace.is_turn_over():
                return True
            self._current = number
            # Let leases be renewed, even if no handler awaits anything.
            await self._pace.wait()
            if self._may_run(number):
                return True

    def _may_run(self, number: int) -> bool:
        return (
            bool(self.runnable)
            and self._current in (None, number)
            and self._slots.free > 0
            and not self._isolation.is_closed
        )

    async def _stay(self, number: int) -> bool:
        """Stay without items until there are some; `False` if the runner is not needed any more."""
        if self._current == number:
            self._current = None
        if number < self._oldest or len(self._idle) >= MOST_IDLE:
            return False
        if self._timer is None:
            self._set_timer()
        self._idle[number] = resumed = asyncio.get_running_loop().create_future()
        try:
            await resumed
        finally:
            self._idle.pop(number, None)
        is_needed: bool = resumed.result()
        return is_needed

    def _end_items(self) -> None:
        """End the items that have run since the runner waited, before it waits again: nobody could see it earlier."""
        if self._succeeded:
            succeeded, self._succeeded = self._succeeded, []
            self._conclusions.succeeded(succeeded)

    async def _run(self, item: WorkItem) -> None:
        """Run an item's handler and process what it returned, in the context of its delivery."""
        conclusions, run, execution = self._conclusions, item.run, item.execution
        SOURCE.set(item)
        try:
            if item.delivery.assignment.closed:
                raise AbandonedError
            if not self._circuit.is_available:
                self._wait_for_store(item)
                return
            outcome: FirstOutcome | Returned[Any]
            if run is None:
                outcome = await execution.attempt_or_suspect(wait_for_store=self._circuit.wait_out)
            else:
                assert isinstance(execution, GuardedExecution)
                item.run = None
                outcome = await run.call(execution.call_patiently)
        except Exception as error:  # noqa: BLE001  # `raised` handles all errors of an item
            conclusions.raised(item, error)
        except asyncio.CancelledError:
            conclusions.cancelled(item, _attempt_of(run))
            raise
        except BaseException as error:
            item.delivery.note_failure(error, _attempt_of(run))
            conclusions.broken(item, error)
            raise
        else:
            if isinstance(outcome, Returned):
                self._recorder.record(item, outcome)
            elif isinstance(outcome, Executed):
                self._succeeded.append((item, outcome.attempt))
            else:
                conclusions.conclude(item, outcome)

    def _wait_for_store(self, item: WorkItem) -> None:
        if item.run is not None and item.run.lease is None:
            item.run = None  # a policy allowed it while the store did not respond: ask again when it does
        self._conclusions.wait_for_store(item)


def _attempt_of(run: Run | None) -> int:
    """Return the number of a run's attempt; 0 if it has not started."""
    return run.attempt.number if run is not None and run.has_started else 0
