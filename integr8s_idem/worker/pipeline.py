"""The path of every delivery: decode, reserve, run the handlers, record the outcomes.

    put ─► ready ─► batch: decode, reserve in one round trip ─► runners ─► record, in another ─► done
             ▲                      │                              │           │
             │                      └───────────── outcome ◄───────┴───────────┘
             │                                        │
             └── waiting for a retry, another run, ◄──┼────► dead-lettered ─► done
                 or the store                         └────► isolated: runs alone

A batch consists of deliveries that are ready, and of those that wait for them in their lanes (`look_ahead`).  It is
reserved when slots are free, and for fast handlers before that (`slot_horizon`).  While one batch waits for the store,
the next is decoded.  A work item is one handler's work on a delivery.  A delivery is done when all its items are done.

`reserver` reserves the items of a batch, `runners` runs the handlers, `outcome_recorder` records what they return, and
`conclusions` processes the outcomes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Final

from integr8s_idem.engine.observed_work import Place
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.handlers.handler import GuardedExecution, HandlerExecution
from integr8s_idem.handlers.observing_dispatcher import ObservedExecution
from integr8s_idem.worker.assignments import Delivery, WorkItem
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import Decoded, DeliveryProcessor, UnverifiedReplay
from integr8s_idem.worker.lanes import Lanes, Ordering
from integr8s_idem.worker.look_ahead import LookAhead, Reservable
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.reserver import Reserver
from integr8s_idem.worker.runners import Runners
from integr8s_idem.worker.slot_horizon import has_waited, horizon_for
from integr8s_idem.worker.value_limits import ValueLimits

MOST_BATCHES: Final = 2
"""Maximum concurrent batches: one waits for the store while the next is decoded."""

SEVERAL: Final = 4
"""From this many waiting handlers on, one is expected to end every moment."""


class Pipeline:
    """Handles deliveries, and reports when each has ended."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        ordering: Ordering,
        *,
        finish: Callable[[Sequence[Delivery]], None],
        left: Callable[[Sequence[Delivery]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            finish: Called with deliveries whose offsets may be committed.
            left: Called with deliveries that have left the pipeline, including those that will be redelivered.
            fail: Called with a bug in the library, or an error that stops the service, rather than lose an event.
        """
        self._processor = processor
        self._circuit = processor.circuit
        self._options = RunOptions(processor.circuit.wait_out)
        self._slots = processor.slots
        self._isolation = processor.isolation
        self._isolation.when_opened.append(self._resume)
        self._slots.on_free(self._resume)
        self._lanes = Lanes(ordering)
        self._finish = finish
        self._left = left
        self._tasks = PipelineTasks(processor.service, fail)
        self._ahead = LookAhead(processor, self._options, self._tasks)
        self._conclusions = Conclusions(processor, self._tasks, reschedule=self._make_ready, ended=self._ended)
        handlers = processor.dispatcher.router.handlers
        self._limits = ValueLimits() if any(each.limit is not None for each in handlers) else None
        self._conclusions.limits = self._limits
        meanwhile = self._meanwhile if self._lanes.are_ordered else None
        self._horizon = horizon_for(processor)
        self._runners = Runners(
            processor,
            self._tasks,
            self._conclusions,
            self._may_outcomes_wait,
            meanwhile,
            horizon=self._horizon,
            taken=self._schedule,
        )
        self._reserver = Reserver(
            processor, self._options, self._ahead, self._runners, self._conclusions, self._horizon
        )
        self._ready: deque[Delivery | WorkItem] = deque()
        self._turns: deque[Delivery] = deque()
        """Deliveries whose turn has come, while an earlier one is being started."""
        self._is_starting = False
        self._batches = 0
        self._in_batches = 0
        """Deliveries and items that these batches have taken, including those that runners have already."""
        self._is_scheduled = False
        self._context = copy_context()
        """Context that handlers inherit from the service, without changes by earlier handlers."""

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Handle each delivery when its lane is free."""
        self._context = copy_context()
        self._ready.extend(self._lanes.enter(deliveries))
        self._schedule()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Tasks that are running."""
        return self._tasks.running

    @property
    def waiting_for_limits(self) -> int:
        """Number of items that wait because their handler is limited by a field."""
        return 0 if self._limits is None else self._limits.waiting

    def abandon_all(self) -> None:
        """Abandon all deliveries that are ready or waiting, after all assignments were closed."""
        self._conclusions.abandon_waiting()
        self._runners.release(only_closed=False)
        self.release_closed()

    def release_closed(self) -> None:
        """Release deliveries of closed assignments that have not started."""
        self._runners.release(only_closed=True)
        # Their predecessors may never end.
        for delivery in self._lanes.withdraw_closed():
            self._ahead.drop(delivery)
            self._left((delivery,))
        ready, self._ready = self._ready, deque()
        for each in ready:
            self._make_ready(each)
        self._ahead.release_closed()

    # Batches.

    def _schedule(self) -> None:
        """Start a batch in the next iteration of the event loop, so that it includes all deliveries of this one."""
        if not self._ready or self._is_scheduled or self._batches >= MOST_BATCHES or not self._room():
            return
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._begin_batch, context=self._context)

    def _room(self) -> int:
        """Return how many deliveries the next batch may take; 0 while many of those before it have not started."""
        most = self._slots.free + (0 if self._ready and has_waited(self._ready[0]) else self._horizon.size)
        waiting = self._in_batches + len(self._runners.runnable)
        return most - waiting if waiting <= most // 2 else 0

    def _may_outcomes_wait(self) -> bool:
        """Whether outcomes may wait for others: several handlers are running, and more work is ready to follow."""
        is_busy = (self._ready or self._runners.runnable) and self._slots.number - self._slots.free >= SEVERAL
        return bool(is_busy) and not (self._isolation.is_closed or self.waiting_for_limits)

    def _resume(self) -> None:
        """Continue when a slot is free, or when the isolation gate has opened."""
        self._runners.start()
        self._schedule()

    def _make_ready(self, each: Delivery | WorkItem) -> None:
        delivery = each if isinstance(each, Delivery) else each.delivery
        if delivery.assignment.closed:
            self._drop(each)  # it would wait for a slot, which may not become free while others hang
            return
        self._ready.append(each)
        self._schedule()

    def _begin_batch(self) -> None:
        self._is_scheduled = False
        if self._isolation.is_closed:
            return  # leases of a batch reserved now would lapse if the suspect crashes the process
        taken: deque[Delivery | WorkItem] = deque()
        ahead: list[Delivery] = []
        now = asyncio.get_running_loop().time()
        self._horizon.note(0, now)  # the known rate may be that of long ago
        ready, room = self._ready, min(self._room(), MOST_TOGETHER)
        with_slots = self._slots.free - self._in_batches - len(self._runners.runnable)
        while ready and len(taken) < room and len(taken) + len(ahead) < MOST_TOGETHER:
            first = ready[0]
            delivery = first if isinstance(first, Delivery) else first.delivery
            if delivery.assignment.closed:
                self._drop(ready.popleft())
            elif len(taken) >= with_slots and has_waited(first):
                break
            else:
                taken.append(ready.popleft())
                if delivery is first:
                    delivery.assignment.running.add(delivery)
                    lane = delivery.lane
                    if lane is not None and lane.waiting:
                        ahead += lane.take_ahead(now)
        if taken:
            self._batches += 1
            size = len(taken)
            self._in_batches += size
            self._horizon.note(size, now)
            self._tasks.begin(self._batch(taken, ahead), self._context, partial(self._batch_ended, taken, ahead, size))
            self._schedule()

    def _batch_ended(
        self, taken: deque[Delivery | WorkItem], ahead: Sequence[Delivery], size: int, task: asyncio.Task[None]
    ) -> None:
        self._batches -= 1
        self._in_batches -= size
        self._tasks.has_succeeded(task)
        while taken:  # the task was cancelled before it reached them
            each = taken.popleft()
            if isinstance(each, WorkItem):
                self._conclusions.abandon(each)
            else:
                self._ahead.drop(each)
                self._ended((each,), may_commit=False)
        if ahead:
            self._take_turns(self._ahead.note_answers(ahead))
        self._schedule()

    async def _batch(self, taken: deque[Delivery | WorkItem], ahead: Sequence[Delivery]) -> None:
        to_reserve: list[Reservable] = []
        due: list[HandlerExecution] = []
        for delivery in ahead:
            # Abandoned: its partition was revoked meanwhile.
            if not delivery.is_abandoned and (decoded := self._ahead.decode(delivery, self._context)) is not None:
                self._ahead.add(delivery, decoded)
        while taken:
            each = taken.popleft()
            if type(each) is WorkItem:
                due.append(each.execution)
                self._prepare(each, to_reserve)
            elif (decoded := self._ahead.decode(each, self._context)) is not None:
                due += decoded.executions
                self._begin(each, decoded, (), to_reserve)
            else:
                self._ended((each,), may_commit=False)
        self._runners.start()
        early = self._ahead.reservable(ahead, due)[: MOST_TOGETHER - len(to_reserve)] if ahead else []
        if to_reserve or early:
            await self._reserver.reserve(to_reserve, early)

    def _meanwhile(self, items: Sequence[WorkItem]) -> None:
        """Decode deliveries that wait for those of `items`, as soon as the event loop waits for the store."""
        # In a copy: code of the application, such as validators, may set context variables.
        asyncio.get_running_loop().call_soon(self._ahead.decode_successors, items, context=self._context.copy())

    def _begin(
        self, delivery: Delivery, decoded: Decoded, items: Sequence[WorkItem], to_reserve: list[Reservable]
    ) -> None:
        """Begin the turn of a delivery.  `items`: those that were created before its turn."""
        if decoded.dead_letter is not None:
            self._conclusions.dead_letter(delivery, decoded.dead_letter)
        elif type(decoded) is UnverifiedReplay:
            self._conclusions.verify(delivery, decoded)
        else:
            items = items or delivery.begin_items(decoded.executions)
            if not items:
                self._ended((delivery,), may_commit=True)
                return
            # The batch has room for one; the others are part of the next.
            self._ready.extendleft(reversed(items[1:]))
            self._prepare(items[0], to_reserve)

    def _prepare(self, item: WorkItem, to_reserve: list[Reservable]) -> None:
        """Reserve an item, run it, or let it wait."""
        execution = item.execution
        if not self._circuit.is_available:
            self._conclusions.wait_for_store(item)
        elif self._limits is not None and (turn := self._limits.take(item)) is not None:
            self._conclusions.wait_for_limit(item, turn)
        elif item.run is not None:
            self._reserver.start(item, item.run)
        elif item.answer is not None and isinstance(execution, GuardedExecution):
            self._reserver.decline(item, execution, item.answer)
        elif not isinstance(execution, GuardedExecution) or execution.handler.outbox is not None:
            if isinstance(execution, ObservedExecution):
                record = item.delivery.record
                execution.place = Place(record.topic, record.partition, record.offset)
            self._runners.add(item)  # reserves its key itself, as a batch of one
        elif execution.executor.cache is not None and (known := execution.known_here()) is not None:
            self._conclusions.known_duplicate(item, known)
        else:
            to_reserve.append((item, execution))

    # Ends.

    def _drop(self, each: Delivery | WorkItem) -> None:
        """Abandon a delivery or item that is ready."""
        if isinstance(each, WorkItem):
            self._conclusions.abandon(each)
        else:
            self._ahead.drop(each)
            self._leave((each,))

    def _ended(self, deliveries: Sequence[Delivery], may_commit: bool) -> None:
        if may_commit:
            self._finish(deliveries)
        else:
            for delivery in deliveries:
                delivery.is_abandoned = True
        Delivery.end_all(deliveries)
        for delivery in deliveries:
            delivery.assignment.remove_running(delivery)
        self._leave(deliveries)

    def _leave(self, deliveries: Sequence[Delivery]) -> None:
        """Report that deliveries have left the pipeline, and begin the turn of the next one of each lane."""
        self._left(deliveries)
        if self._lanes.are_ordered:
            self._take_turns(self._lanes.leave(deliveries))

    def _take_turns(self, deliveries: Sequence[Delivery]) -> None:
        """Start deliveries whose turn has come.  In a loop, since one may end at once, and then the next one starts."""
        self._turns.extend(deliveries)
        if self._is_starting or not self._turns:
            return
        self._is_starting = True
        to_reserve: list[Reservable] = []
        try:
            while self._turns:
                self._start(self._turns.popleft(), to_reserve)
        finally:
            self._is_starting = False
            for item, _ in to_reserve:
                self._make_ready(item)
        self._runners.start()
        self._schedule()

    def _start(self, delivery: Delivery, to_reserve: list[Reservable]) -> None:
        """Start a delivery whose turn has come; one that was not reserved ahead waits for a batch."""
        prepared = self._ahead.find(delivery) if delivery.is_prepared else None
        if delivery.assignment.closed:
            self._drop(delivery)
        elif prepared is not None and prepared.answered_at is None:
            prepared.has_turn = True  # it starts when its batch has ended
        elif prepared is not None:
            delivery.assignment.running.add(delivery)
            self._ahead.take(delivery)
            self._begin(delivery, prepared.decoded, prepared.items, to_reserve)
        else:
            self._ready.append(delivery)
