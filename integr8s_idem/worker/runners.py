"""Run the handlers of reserved work items in a few tasks.

A runner is a task that runs one item after another.  When a handler waits for something, another runner continues with
the next item.  So a handler that never waits needs no task of its own, and as many run concurrently as there are slots.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.engine.run import Returned, Run
from integr8s_idem.engine.work import Executed
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry.log_fields import SOURCE
from integr8s_idem.worker.assignments import AbandonedError, WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.outcome_recorder import OutcomeRecorder
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.poison_events import FirstOutcome
from integr8s_idem.worker.task_contexts import rest_in_context

TURN: Final = 50
"""Items that a runner handles before it yields to the event loop."""


class Runners:
    """Runs the handlers of items that hold a slot, and releases the slots."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        tasks: PipelineTasks,
        conclusions: Conclusions,
        may_wait: Callable[[], bool],
        meanwhile: Callable[[Iterable[WorkItem]], None] | None,
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
        """The runner that takes the next item; the others wait for handlers that they have started."""
        self._pace = pace_of(asyncio.get_running_loop())
        self._context = copy_context()
        """Context of the runners; each handler runs in the context of its delivery."""

    def start(self) -> None:
        """Start a runner if there are items to run and no runner takes them."""
        if self._runnable and self._current is None and not self._isolation.is_closed:
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
        done, task = 0, asyncio.current_task()
        assert task is not None, "runners are tasks"
        try:
            while self._runnable and self._current in (None, number) and not self._isolation.is_closed:
                self._current = number
                if done == TURN:
                    self._end_items()
                    await asyncio.sleep(0)
                    done = 0
                    continue
                if self._pace.is_turn_over():
                    # Let leases be renewed, even if no handler awaits anything.
                    self._end_items()
                    await self._pace.wait()
                    done = 0
                    if not self._runnable or self._isolation.is_closed:
                        break
                item = self._runnable.popleft()
                work, delivery = self._run(item), item.delivery
                context = delivery.context.copy()
                try:
                    waiting_for = context.run(work.send, None)
                except StopIteration:
                    done += 1
                    if task.cancelling():
                        break  # by the handler; otherwise the next one would be cancelled when it waits
                else:
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
                    done = 0
        finally:
            self._end_items()

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
