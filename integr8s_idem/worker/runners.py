"""Run the handlers of reserved work items in a few tasks.

A runner is a task that runs one item after another.  When a handler waits for something, another runner continues with
the next item.  So a handler that never waits needs no task of its own, and as many run concurrently as there are slots.

A runner without items stays for the next ones: starting a task for them takes longer than many handlers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, TypeAlias

from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.engine.run import Returned, Run
from integr8s_idem.engine.work import Executed
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry.log_fields import SOURCE
from integr8s_idem.worker.assignments import AbandonedError, Delivery, WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.outcome_recorder import OutcomeRecorder
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.poison_events import FirstOutcome
from integr8s_idem.worker.task_contexts import rest_in_context

TURN: Final = 50
"""Items that a runner handles before it yields to the event loop."""

MOST_IDLE: Final = 100
"""Runners that stay without items."""

_Waiting: TypeAlias = tuple[Delivery, Context, Coroutine[Any, Any, None], object]
"""A delivery whose handler waits, the context of the handler, its coroutine, and what it waits for."""


class Runners:
    """Runs the handlers of items that hold a slot, and releases the slots."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        tasks: PipelineTasks,
        conclusions: Conclusions,
        may_wait: Callable[[], bool],
        meanwhile: Callable[[Sequence[WorkItem]], None] | None,
    ) -> None:
        """`may_wait` and `meanwhile`: see `OutcomeRecorder`."""
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._circuit = processor.circuit
        self._tasks = tasks
        self._conclusions = conclusions
        self._runnable: deque[WorkItem] = deque()
        self.add: Final = self._runnable.append
        """Add an item, to run when `start` is called or a runner is free."""
        self._succeeded: list[tuple[WorkItem, int]] = []
        """Items whose handlers have succeeded since the runner waited, and the numbers of their attempts."""
        self._freed = 0
        """Slots of items that have ended since the runner waited."""
        self._recorder = OutcomeRecorder(
            processor, tasks, conclusions, lambda: bool(self._runnable), may_wait, meanwhile
        )
        self._last = 0
        """Number of the last runner."""
        self._current: int | None = None
        """The runner that takes the next item; the others wait for handlers that they have started, or are idle."""
        self._idle: dict[int, asyncio.Future[None]] = {}
        """Runners without items, and the futures that resume them."""
        self._pace = pace_of(asyncio.get_running_loop())
        self._context = copy_context()
        """Context of the runners; each handler runs in the context of its delivery."""

    def start(self) -> None:
        """Resume or start a runner if there are items to run and no runner takes them."""
        if not self._runnable or self._current is not None or self._isolation.is_closed:
            return
        while self._idle:
            number, resumed = self._idle.popitem()
            if not resumed.done():  # its task has not been cancelled
                self._current = number
                resumed.set_result(None)
                return
        self._last += 1
        self._current = number = self._last
        self._tasks.begin(self._runner(number), self._context, partial(self._ended, number))

    def release(self, *, only_closed: bool) -> None:
        """Release items that no runner has taken; with `only_closed`, only those of closed assignments."""
        runnable = list(self._runnable)
        self._runnable.clear()
        for item in runnable:
            if only_closed and not item.delivery.assignment.closed:
                self._runnable.append(item)
                continue
            self._slots.release()
            self._conclusions.abandon(item)

    def _ended(self, runner: int, task: asyncio.Task[None]) -> None:
        if self._current == runner:
            self._current = None
        self._tasks.has_succeeded(task)
        self.start()

    async def _runner(self, number: int) -> None:
        task = asyncio.current_task()
        assert task is not None, "runners are tasks"
        try:
            while await self._has_turn(number):
                self._current = number
                waiting = self._run_items(task)
                if waiting is not None:
                    delivery, context, work, waiting_for = waiting
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
                    del waiting, delivery, context, work, waiting_for  # an idle runner must not keep them in memory
                elif self._runnable and not task.cancelling() and not self._pace.is_turn_over():
                    self._end_items()
                    await asyncio.sleep(0)
                if task.cancelling():
                    break  # by the handler: the next one would be cancelled when it waits, or see that its task was
        finally:
            self._end_items()

    def _run_items(self, task: asyncio.Task[None]) -> _Waiting | None:
        """Run items until a handler waits for something, or until others have to run."""
        for _ in range(TURN):
            item = self._runnable.popleft()
            work, delivery = self._run(item), item.delivery
            context = delivery.context.copy()
            try:
                return delivery, context, work, context.run(work.send, None)
            except StopIteration:
                if task.cancelling() or not self._runnable or self._isolation.is_closed or self._pace.is_turn_over():
                    break
        return None

    async def _has_turn(self, number: int) -> bool:
        """Wait until a runner may run items; `False` if it is not needed for them."""
        self._end_items()
        while True:
            while not self._may_run(number):
                if not await self._is_resumed(number):
                    return False
            if not self._pace.is_turn_over():
                return True
            self._current = number
            # Let leases be renewed, even if no handler awaits anything.
            await self._pace.wait()
            if self._may_run(number):
                return True

    def _may_run(self, number: int) -> bool:
        return bool(self._runnable) and self._current in (None, number) and not self._isolation.is_closed

    async def _is_resumed(self, number: int) -> bool:
        """Stay without items until there are some; `False` if others stay."""
        if self._current == number:
            self._current = None
        if len(self._idle) >= MOST_IDLE:
            return False
        self._idle[number] = resumed = asyncio.get_running_loop().create_future()
        try:
            await resumed
        finally:
            self._idle.pop(number, None)
        return True

    def _end_items(self) -> None:
        """End the items that have run since the runner waited, before it waits again: nobody could see it earlier."""
        if self._succeeded:
            succeeded, self._succeeded = self._succeeded, []
            self._conclusions.succeeded(succeeded)
        if self._freed:
            freed, self._freed = self._freed, 0
            self._slots.release(freed)

    async def _run(self, item: WorkItem) -> None:
        """Run an item's handler and process what it returned, in the context of its delivery."""
        conclusions, run, execution = self._conclusions, item.run, item.execution
        SOURCE.set(item)
        try:
            if item.delivery.assignment.closed:
                raise AbandonedError
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
            elif isinstance(outcome, Run):
                conclusions.isolate(item, outcome)
            else:
                conclusions.conclude(item, outcome)
        finally:
            self._freed += 1


def _attempt_of(run: Run | None) -> int:
    """Return the number of a run's attempt; 0 if it has not started."""
    attempt = getattr(run, "attempt", None)
    return 0 if attempt is None else attempt.number
