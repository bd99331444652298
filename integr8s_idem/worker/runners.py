"""Runs the handlers of reserved work items in a few tasks.

One runner goes on from item to item; another joins only where a handler waits for something.  So a handler that never
waits costs no task, and as many run side by side as there are slots.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.engine.run import Returned, Run
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.worker.assignments import AbandonedError, WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.outcome_recorder import OutcomeRecorder
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.poison_events import FirstOutcome
from integr8s_idem.worker.task_contexts import in_context

TURN: Final = 50
"""Items that one runner does before it lets the event loop look at everything else."""


class Runners:
    """Takes items that hold a slot, runs their handlers, and gives the slots back."""

    def __init__(self, processor: DeliveryProcessor, tasks: PipelineTasks, conclusions: Conclusions) -> None:
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._circuit = processor.circuit
        self._tasks = tasks
        self._conclusions = conclusions
        self._recorder = OutcomeRecorder(processor, tasks, conclusions)
        self._runnable: deque[WorkItem] = deque()
        self._spare: Coroutine[Any, Any, None] | None = None
        """A runner that has not taken anything yet."""
        self._pace = pace_of(asyncio.get_running_loop())
        self._context = copy_context()
        """Of the runners themselves: each handler has that of its delivery."""

    def add(self, item: WorkItem) -> None:
        """Run it when `start` is called, or a runner is free."""
        self._runnable.append(item)

    def start(self) -> None:
        """Let a runner begin, if there is something to run."""
        if self._runnable and self._spare is None and not self._isolation.is_closed:
            self._spare = runner = self._runner()
            self._tasks.begin(runner, self._context, partial(self._ended, runner))

    def release(self, *, only_closed: bool) -> None:
        """Release what no runner has taken; or only what belongs to assignments that are closed."""
        runnable, self._runnable = self._runnable, deque()
        for item in runnable:
            if only_closed and not item.delivery.assignment.closed:
                self._runnable.append(item)
                continue
            if item.run is not None:
                item.run.release()
            self._slots.give()
            self._conclusions.abandon(item)

    def _ended(self, runner: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        if self._spare is runner:
            self._spare = None
        self._tasks.has_succeeded(task)
        self.start()

    async def _runner(self) -> None:
        done, is_spare = 0, True
        while self._runnable and not self._isolation.is_closed:
            if done == TURN:
                await asyncio.sleep(0)
                done = 0
                continue
            if self._pace.is_turn_over():
                # Leases are renewed meanwhile, also where no handler awaits anything.
                await self._pace.wait()
                done = 0
                if not self._runnable or self._isolation.is_closed:
                    break
            if is_spare:
                self._spare, is_spare = None, False
            item = self._runnable.popleft()
            self.start()
            await self._run(item)
            done += 1

    async def _run(self, item: WorkItem) -> None:
        conclusions = self._conclusions
        self._isolation.enter()
        try:
            outcome = await in_context(item.delivery.context.copy(), self._call(item))
        except AbandonedError:
            conclusions.abandon(item)
        except Exception as error:  # noqa: BLE001  # looked at where all errors of an item are
            conclusions.raised(item, error)
        except BaseException:
            conclusions.abandon(item)
            raise
        else:
            if isinstance(outcome, Returned):
                self._recorder.record(item, outcome)
            elif isinstance(outcome, Run):
                conclusions.isolate(item, outcome)
            else:
                conclusions.conclude(item, outcome)
        finally:
            self._isolation.leave()
            self._slots.give()

    async def _call(self, item: WorkItem) -> FirstOutcome | Returned[Any]:
        """Run the handler of an item, in this task."""
        delivery, execution, run = item.delivery, item.execution, item.run
        item.run = None
        if delivery.assignment.closed:
            if run is not None:
                run.release()
            raise AbandonedError
        task = asyncio.current_task()
        assert task is not None, "runners are tasks"
        delivery.tasks.add(task)
        try:
            if run is None:
                return await execution.attempt_or_suspect(wait_for_store=self._circuit.wait_out)
            assert isinstance(execution, GuardedExecution)
            return await run.call(execution.call_patiently)
        finally:
            delivery.tasks.discard(task)
