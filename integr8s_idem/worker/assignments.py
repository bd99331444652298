"""One stretch of time in which a partition is ours.

A partition that is taken away and comes back is another assignment: what was begun under the earlier one
can no longer move offsets, so a late completion never rewinds or overtakes the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.engine.run import Run
from integr8s_idem.handlers.handler import HandlerExecution
from integr8s_idem.telemetry import Span, is_recorded
from integr8s_idem.telemetry.detached_phase import DetachedPhase
from integr8s_idem.worker.kafka_protocols import Partition, Record
from integr8s_idem.worker.offset_progress import Progress


@dataclass(eq=False, slots=True)
class Assignment:
    """One partition for as long as it stays ours."""

    partition: Partition
    progress: Progress = field(default_factory=Progress)
    start: int | None = None
    """Where fetching began."""
    damaged: bool = False
    """It holds a batch that cannot be read: it rests until somebody skips that on purpose and restarts."""
    ended: bool = False
    """The partition is no longer ours: nothing of this assignment is committed any more."""
    running: set[Delivery] = field(default_factory=set)
    """Deliveries that were begun and have not come to an end."""
    _idle: asyncio.Future[None] | None = None
    closing: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once no delivery of it may be begun or tried again."""

    @property
    def next_offset(self) -> int | None:
        """Where fetching goes on; `None` if nothing was delivered and its beginning is not known yet."""
        delivered = self.progress.next_offset
        return self.start if delivered is None else delivered

    def close(self) -> None:
        """Begin nothing more, and let waiting deliveries go."""
        if not self.closing.done():
            self.closing.set_result(None)

    @property
    def closed(self) -> bool:
        return self.closing.done()

    def began(self, delivery: Delivery) -> None:
        """`delivery` is on its way."""
        self.running.add(delivery)

    def ended_one(self, delivery: Delivery) -> None:
        """`delivery` has come to its end, settled or let go."""
        self.running.discard(delivery)
        if self._idle is not None and not self._idle.done() and not self.running:
            self._idle.set_result(None)

    def idle(self) -> asyncio.Future[None]:
        """Done once nothing of it is on its way."""
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
            if not self.running:
                self._idle.set_result(None)
        return self._idle

    def handlers(self) -> set[asyncio.Task[Any]]:
        """The tasks that have its deliveries in hand."""
        return {task for delivery in self.running for task in delivery.tasks}


class Delivery:
    """One arrival of a message."""

    __slots__ = (
        "_pending",
        "_processing",
        "assignment",
        "context",
        "is_abandoned",
        "is_recorded",
        "record",
        "size",
        "tasks",
    )
    context: Context
    """Its handlers run in copies of it.  Set by `begin`."""

    def __init__(self, record: Record, assignment: Assignment) -> None:
        self.record = record
        self.assignment = assignment
        self.tasks: set[asyncio.Task[Any]] = set()
        """The tasks that handle it now."""
        self.size = len(record.value or b"") + len(record.key or b"")
        """Bytes it keeps in memory, roughly."""
        self.is_abandoned = False
        """It is not done, and will be redelivered."""
        self.is_recorded = False
        """Its phases are recorded in a span of its own."""
        self._pending = 0
        self._processing: DetachedPhase | None = None

    def begin(self, context: Context, processing: AbstractContextManager[Span]) -> None:
        """Begin to process it, in `context`; until `end`."""
        self.context = context
        if not isinstance(processing, nullcontext):
            self.is_recorded = is_recorded(processing)
            self._processing = DetachedPhase(processing, context)

    def begin_items(self, executions: Sequence[HandlerExecution]) -> list[WorkItem]:
        """One item for each handler."""
        self._pending = len(executions)
        if self._pending == 1:
            return [WorkItem(self, executions[0])]
        return [WorkItem(self, execution) for execution in executions]

    def end_item(self) -> bool:
        """One of its items has ended.  Whether it was the last."""
        self._pending -= 1
        return self._pending == 0

    def end(self) -> None:
        """It has left the pipeline."""
        processing, self._processing = self._processing, None
        if processing is not None:
            processing.end()


@dataclass(slots=True, eq=False)
class WorkItem:
    """One handler's work on a delivery, on its way through the pipeline."""

    delivery: Delivery
    execution: HandlerExecution
    run: Run | None = None
    """Its reservation, between the store's answer and the start of the handler."""
    looks: int = 0
    """How often it was found in progress elsewhere."""
    wait: DetachedPhase | None = None
    """While it waits for another run."""

    def end_wait(self) -> None:
        """It no longer waits for another run."""
        if self.wait is not None:
            self.wait.end()
            self.wait = None


class AbandonedError(Exception):
    """A delivery is let go because its assignment is closing: it will come again, here or elsewhere."""
