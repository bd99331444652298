"""The path of every delivery: decode, reserve, run the handlers, record the outcomes.

    put ─► ready ─► batch: decode, reserve in one round trip ─► runners ─► record, in another ─► done
             ▲                      │                              │           │
             │                      └───────────── outcome ◄───────┴───────────┘
             │                                        │
             └── waiting for a retry, another run, ◄──┼────► dead-lettered ─► done
                 or the store                         └────► isolated: runs alone

A batch consists of the deliveries that are ready when slots are free; while one batch waits for the store, the next is
decoded.  A work item is one handler's work on a delivery.  A delivery is done when all its items are done.

`runners` runs the handlers, `outcome_recorder` records what they return, and `conclusions` processes the outcomes.
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
"""Maximum concurrent batches: one waits for the store while the next is decoded."""

Reservable: TypeAlias = tuple[WorkItem, GuardedExecution]
"""An item to be reserved, and its execution."""


class Pipeline:
    """Handles deliveries, and reports when each has ended."""

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
            left: Called with each delivery that has left the pipeline, including those that will be redelivered.
            fail: Called with a bug in the library, to stop the service rather than lose an event.
        """
        self._processor = processor
        self._circuit = processor.circuit
        self._options = RunOptions(processor.circuit.wait_out)
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._isolation.when_opened.append(self._resume)
        self._slots.on_free(self._schedule)
        self._lanes = Lanes(ordering)
        self._finish = finish
        self._left = left
        self._tasks = PipelineTasks(processor.service, fail)
        self._conclusions = Conclusions(processor, self._tasks, reschedule=self._make_ready, ended=self._ended)
        self._runners = Runners(processor, self._tasks, self._conclusions)
        self._ready: deque[Delivery | WorkItem] = deque()
        self._batches = 0
        self._is_scheduled = False
        self._context = copy_context()
        """Context that handlers inherit from the service, without changes by earlier handlers."""

    def put(self, delivery: Delivery) -> None:
        """Handle `delivery` when its lane is free."""
        self._context = copy_context()
        if self._lanes.enter(delivery):
            self._ready.append(delivery)
            self._schedule()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Tasks that are running."""
        return self._tasks.running

    def abandon_all(self) -> None:
        """Abandon all deliveries that are ready or waiting, after all assignments were closed."""
        self._conclusions.abandon_waiting()
        self._runners.release(only_closed=False)
        while self._ready:
            self._drop(self._ready.popleft())

    def release_closed(self) -> None:
        """Release deliveries of closed assignments that have not started."""
        self._runners.release(only_closed=True)
        ready, self._ready = self._ready, deque()
        for each in ready:
            if isinstance(each, WorkItem) and each.delivery.assignment.closed:
                self._conclusions.abandon(each)
            else:
                self._ready.append(each)

    # Batches.

    def _schedule(self) -> None:
        """Start a batch in the next iteration of the event loop, so that it includes all deliveries of this one."""
        if self._ready and not self._is_scheduled and self._batches < MOST_BATCHES:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_batch, context=self._context)

    def _resume(self) -> None:
        """Continue after the isolation gate has opened."""
        self._runners.start()
        self._schedule()

    def _make_ready(self, item: WorkItem) -> None:
        self._ready.append(item)
        self._schedule()

    def _begin_batch(self) -> None:
        self._is_scheduled = False
        if self._isolation.is_closed:
            return  # leases of a batch reserved now would lapse if the suspect crashes the process
        taken: deque[Delivery | WorkItem] = deque()
        while self._ready and len(taken) < MOST_TOGETHER:
            first = self._ready[0]
            if _assignment_of(first).closed:
                self._drop(self._ready.popleft())
            elif self._slots.try_acquire():
                if isinstance(first, Delivery):
                    first.assignment.add_running(first)
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
        while taken:  # the task was cancelled before it reached them
            self._slots.release()
            each = taken.popleft()
            if isinstance(each, WorkItem):
                self._conclusions.abandon(each)
            else:
                self._ended(each, may_commit=False)
        self._schedule()

    async def _batch(self, taken: deque[Delivery | WorkItem]) -> None:
        to_reserve: list[Reservable] = []
        while taken:
            each = taken.popleft()
            if isinstance(each, WorkItem):
                self._prepare(each, to_reserve)
            else:
                self._decode(each, to_reserve)
        self._runners.start()
        if to_reserve:
            await self._reserve(to_reserve)

    def _decode(self, delivery: Delivery, to_reserve: list[Reservable]) -> None:
        """Create the work items of a delivery that holds one slot."""
        try:
            decoded = self._processor.decode(delivery)
            delivery.begin(self._context.copy(), decoded.processing)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            self._slots.release()
            self._conclusions.broken_delivery(delivery, error)
            return
        if decoded.dead_letter is not None:
            self._slots.release()
            self._conclusions.dead_letter(delivery, decoded.dead_letter)
        elif isinstance(decoded, UnverifiedReplay):
            self._slots.release()
            self._conclusions.verify(delivery, decoded)
        else:
            items = delivery.begin_items(decoded.executions)
            if not items:
                self._slots.release()
                self._ended(delivery, may_commit=True)
                return
            # The first item uses the slot of the delivery; the others acquire their own.
            if len(items) > 1:
                self._ready.extendleft(reversed(items[1:]))
            self._prepare(items[0], to_reserve)

    def _prepare(self, item: WorkItem, to_reserve: list[Reservable]) -> None:
        """Reserve an item that holds a slot, run it, or let it wait."""
        execution = item.execution
        if not self._circuit.is_available:
            self._slots.release()
            self._conclusions.wait_for_store(item)
        elif not isinstance(execution, GuardedExecution) or not execution.together or item.delivery.is_recorded:
            self._runners.add(item)  # reserves its key itself, as a batch of one
        elif execution.is_known_here():
            self._slots.release()
            self._conclusions.duplicate(item)
        else:
            to_reserve.append((item, execution))

    async def _reserve(self, to_reserve: Sequence[Reservable]) -> None:
        executor = self._processor.executor
        works = [execution.work for _, execution in to_reserve]
        asked_at = executor.now()
        try:
            verdicts = await executor.reserve_together(works)
        except StoreError as error:
            for item, execution in to_reserve:
                self._unreserved(item, execution.work, error)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            for item, _ in to_reserve:
                self._slots.release()
                self._conclusions.broken(item, error)
        except BaseException:
            for item, _ in to_reserve:
                self._slots.release()
                self._conclusions.abandon(item)
            raise
        else:
            for (item, execution), verdict in zip(to_reserve, verdicts, strict=True):
                if isinstance(verdict, Reserved):
                    self._reserved(item, executor.reserved(execution.work, verdict, asked_at, self._options))
                else:
                    self._declined(item, execution, verdict)
        self._runners.start()

    def _unreserved(self, item: WorkItem, work: Work, error: StoreError) -> None:
        """Run an item without the store if a policy allows it; otherwise wait for the store."""
        if isinstance(error, StoreUnavailableError):
            item.run = self._processor.executor.unreserved(work, self._options)
        if item.run is not None:
            self._runners.add(item)
        else:
            self._slots.release()
            self._conclusions.raised(item, error)

    def _reserved(self, item: WorkItem, run: Run) -> None:
        if run.is_after_crash and self._is_held_back(item, run):
            self._slots.release()
        else:
            item.run = run
            self._runners.add(item)

    def _is_held_back(self, item: WorkItem, run: Run) -> bool:
        """Whether the item may not run with others, since too many earlier attempts have lapsed."""
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
            self._slots.release()
            self._conclusions.conclude(item, opened)

    # Ends.

    def _drop(self, each: Delivery | WorkItem) -> None:
        """Abandon a delivery or item that is ready."""
        if isinstance(each, WorkItem):
            self._conclusions.abandon(each)
        else:
            self._leave(each)

    def _ended(self, delivery: Delivery, may_commit: bool) -> None:
        if may_commit:
            self._finish(delivery)
        delivery.end()
        delivery.assignment.remove_running(delivery)
        self._leave(delivery)

    def _leave(self, delivery: Delivery) -> None:
        """Report that a delivery has left the pipeline, and start the next one of its lane."""
        self._left(delivery)
        if (successor := self._lanes.leave(delivery)) is not None:
            self._ready.append(successor)
            self._schedule()


def _assignment_of(each: Delivery | WorkItem) -> Assignment:
    return each.delivery.assignment if isinstance(each, WorkItem) else each.assignment
