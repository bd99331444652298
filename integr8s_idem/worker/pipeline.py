"""The path of every delivery: decoded, reserved, run, recorded.

    put ─► ready ─► a batch: decoded, reserved in one round trip ─► runners ─► recorded, in another ─► done
             ▲                        │                                │              │
             │                        └────────────── outcome ◄────────┴──────────────┘
             │                                           │
             └── waiting: for a retry, another run, or ◄─┼────► dead-lettered ─► done
                 the store                               └────► isolated: runs alone

A batch is what is ready when there are free slots; while one waits for the store, the next is decoded.  A work item is
one handler's work on a delivery; it is what moves.  A delivery is done when all its items are.

`runners` runs the handlers, `outcome_recorder` records what they return, and `conclusions` does what follows from an
outcome.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Final, TypeAlias

from integr8s_idem.engine.executor import Declined
from integr8s_idem.engine.run import Run, RunOptions
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import StoreError, StoreUnavailableError
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.records import Reserved
from integr8s_idem.worker.assignments import Assignment, Delivery, WorkItem
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor, UnverifiedReplay
from integr8s_idem.worker.lanes import Lanes, Ordering
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.runners import Runners

MOST_BATCHES: Final = 2
"""Batches under way: while the store answers one, the next is decoded."""

Asked: TypeAlias = tuple[WorkItem, GuardedExecution]
"""An item to be reserved, and its execution."""


class Pipeline:
    """Takes deliveries to their end, and reports when each has come there."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        ordering: Ordering,
        *,
        finish: Callable[[Delivery], None],
        left: Callable[[Delivery], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            finish: Called with a delivery whose offset may be committed.
            left: Called with each delivery that has left the pipeline, also with those that will be redelivered.
            fail: Called with a bug of the library: better a stopped service than a lost event.
        """
        self._processor = processor
        self._circuit = processor.circuit
        self._options = RunOptions(processor.circuit.wait_out)
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._isolation.when_opened.append(self._resume)
        self._slots.when_free = self._schedule
        self._lanes = Lanes(ordering)
        self._finish = finish
        self._left = left
        self._tasks = PipelineTasks(processor.service, fail)
        self._conclusions = Conclusions(processor, self._tasks, again=self._make_ready, ended=self._ended)
        self._runners = Runners(processor, self._tasks, self._conclusions)
        self._ready: deque[Delivery | WorkItem] = deque()
        self._batches = 0
        self._is_scheduled = False
        self._context = copy_context()
        """What handlers inherit: that of the service, and not what the one before has put into its own."""

    def put(self, delivery: Delivery) -> None:
        """Handle `delivery` when it is its turn."""
        self._context = copy_context()
        if self._lanes.enter(delivery):
            self._ready.append(delivery)
            self._schedule()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The tasks that are under way."""
        return self._tasks.running

    def forget(self) -> None:
        """All partitions are gone: nothing that waits is begun, and what has run out of time moves no offset."""
        self._conclusions.abandon_waiting()
        self._runners.release(only_closed=False)
        while self._ready:
            self._drop(self._ready.popleft())

    def release_closed(self) -> None:
        """Release what has not started of assignments that are closed."""
        self._runners.release(only_closed=True)
        ready, self._ready = self._ready, deque()
        for each in ready:
            if isinstance(each, WorkItem) and each.delivery.assignment.closed:
                self._conclusions.abandon(each)
            else:
                self._ready.append(each)

    # Batches.

    def _schedule(self) -> None:
        """Begin a batch once all that comes in this turn of the event loop is here."""
        if self._ready and not self._is_scheduled and self._batches < MOST_BATCHES:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_batch, context=self._context)

    def _resume(self) -> None:
        """No event runs alone any longer."""
        self._runners.start()
        self._schedule()

    def _make_ready(self, item: WorkItem) -> None:
        self._ready.append(item)
        self._schedule()

    def _begin_batch(self) -> None:
        self._is_scheduled = False
        if self._isolation.is_closed:
            return  # what is reserved meanwhile would lapse with the process
        taken: deque[Delivery | WorkItem] = deque()
        while self._ready and len(taken) < MOST_TOGETHER:
            first = self._ready[0]
            if _assignment_of(first).closed:
                self._drop(self._ready.popleft())
            elif self._slots.take():
                if isinstance(first, Delivery):
                    first.assignment.began(first)
                taken.append(self._ready.popleft())
            else:
                break
        if taken:
            self._batches += 1
            self._tasks.begin(self._batch(taken), self._context, partial(self._batch_ended, taken))
            self._schedule()

    def _batch_ended(self, taken: deque[Delivery | WorkItem], task: asyncio.Task[None]) -> None:
        self._batches -= 1
        self._tasks.has_succeeded(task)
        while taken:  # it was cancelled before it came to them
            self._slots.give()
            each = taken.popleft()
            if isinstance(each, WorkItem):
                self._conclusions.abandon(each)
            else:
                self._ended(each, may_commit=False)
        self._schedule()

    async def _batch(self, taken: deque[Delivery | WorkItem]) -> None:
        asked: list[Asked] = []
        while taken:
            each = taken.popleft()
            if isinstance(each, WorkItem):
                self._prepare(each, asked)
            else:
                self._decode(each, asked)
        self._runners.start()
        if asked:
            await self._reserve(asked)

    def _decode(self, delivery: Delivery, asked: list[Asked]) -> None:
        """Make the work items of a delivery, which has taken one slot."""
        try:
            decoded = self._processor.decode(delivery)
            delivery.begin(self._context.copy(), decoded.processing)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            self._slots.give()
            self._conclusions.broken_delivery(delivery, error)
            return
        if decoded.letter is not None:
            self._slots.give()
            self._conclusions.dead_letter(delivery, decoded.letter)
        elif isinstance(decoded, UnverifiedReplay):
            self._slots.give()
            self._conclusions.verify(delivery, decoded)
        else:
            items = delivery.begin_items(decoded.executions)
            if not items:
                self._slots.give()
                self._ended(delivery, may_commit=True)
                return
            # The first has the slot of the delivery; the others take their own.
            if len(items) > 1:
                self._ready.extendleft(reversed(items[1:]))
            self._prepare(items[0], asked)

    def _prepare(self, item: WorkItem, asked: list[Asked]) -> None:
        """Find out what an item that has a slot needs before it can run."""
        execution = item.execution
        if not self._circuit.is_available:
            self._slots.give()
            self._conclusions.wait_for_store(item)
        elif not isinstance(execution, GuardedExecution) or not execution.together or item.delivery.is_recorded:
            self._runners.add(item)  # it reserves by itself, in a batch of one
        elif execution.is_known_here():
            self._slots.give()
            self._conclusions.duplicate(item)
        else:
            asked.append((item, execution))

    async def _reserve(self, asked: Sequence[Asked]) -> None:
        executor = self._processor.executor
        works = [execution.work for _, execution in asked]
        asked_at = executor.now()
        try:
            verdicts = await executor.reserve_together(works)
        except StoreError as error:
            for item, execution in asked:
                self._unreserved(item, execution.work, error)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            for item, _ in asked:
                self._slots.give()
                self._conclusions.broken(item, error)
        except BaseException:
            for item, _ in asked:
                self._slots.give()
                self._conclusions.abandon(item)
            raise
        else:
            for (item, execution), verdict in zip(asked, verdicts, strict=True):
                if isinstance(verdict, Reserved):
                    self._reserved(item, executor.reserved(execution.work, verdict, asked_at, self._options))
                else:
                    self._declined(item, execution, verdict)
        self._runners.start()

    def _unreserved(self, item: WorkItem, work: Work, error: StoreError) -> None:
        """The store gave no answer: run without one if a policy says so, and wait for it otherwise."""
        if isinstance(error, StoreUnavailableError):
            item.run = self._processor.executor.unreserved(work, self._options)
        if item.run is not None:
            self._runners.add(item)
        else:
            self._slots.give()
            self._conclusions.raised(item, error)

    def _reserved(self, item: WorkItem, run: Run) -> None:
        if run.is_after_crash and self._is_held_back(item, run):
            self._slots.give()
        else:
            item.run = run
            self._runners.add(item)

    def _is_held_back(self, item: WorkItem, run: Run) -> bool:
        """Whether earlier attempts lapsed too often for this one to run beside others."""
        if run.is_suspect:
            self._conclusions.isolate(item, run)
        elif run.has_crashed_too_often:
            self._conclusions.attempt(item, run.give_up, run)
        else:
            return False
        return True

    def _declined(self, item: WorkItem, execution: GuardedExecution, verdict: Declined) -> None:
        executor = self._processor.executor
        opened = item.delivery.context.run(executor.declined, execution.work, verdict, self._options)
        if isinstance(opened, Run):
            self._reserved(item, opened)
        else:
            self._slots.give()
            self._conclusions.conclude(item, opened)

    # Ends.

    def _drop(self, each: Delivery | WorkItem) -> None:
        """What is ready is not begun: it will be redelivered."""
        if isinstance(each, WorkItem):
            self._conclusions.abandon(each)
        else:
            self._leave(each)

    def _ended(self, delivery: Delivery, may_commit: bool) -> None:  # called back
        if may_commit:
            self._finish(delivery)
        delivery.end()
        delivery.assignment.ended_one(delivery)
        self._leave(delivery)

    def _leave(self, delivery: Delivery) -> None:
        """It has left the pipeline: the next of its lane may begin."""
        self._left(delivery)
        if (following := self._lanes.leave(delivery)) is not None:
            self._ready.append(following)
            self._schedule()


def _assignment_of(each: Delivery | WorkItem) -> Assignment:
    return each.delivery.assignment if isinstance(each, WorkItem) else each.assignment
