"""Assignments of partitions to this worker, and the deliveries that arrive under them.

A partition that is revoked and assigned again is a new assignment.  Work that was started under the earlier one can no
longer move offsets, so a late completion never rewinds or overtakes the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, final

from msgspec import Struct

from integr8s_idem.codecs import header
from integr8s_idem.engine.run import Run
from integr8s_idem.handlers.handler import HandlerExecution
from integr8s_idem.records import Completed
from integr8s_idem.telemetry import SILENT_PHASE, Span, is_recorded
from integr8s_idem.telemetry.detached_phase import DetachedPhase
from integr8s_idem.telemetry.log_fields import key_text
from integr8s_idem.worker.kafka_protocols import Partition, Record
from integr8s_idem.worker.lane import Lane
from integr8s_idem.worker.offset_progress import Progress
from integr8s_idem.worker.recorded_delivery import RecordedDelivery
from integr8s_idem.worker.retry_copies import Origin
from integr8s_idem.worker.retry_topics import RetryPartition


@dataclass(eq=False, slots=True)
class Assignment:
    """A partition, from its assignment to this worker until it is revoked."""

    partition: Partition
    service: str = ""
    """Name of the service, for log records."""
    progress: Progress = field(default_factory=Progress)
    start: int | None = None
    """First offset that was fetched."""
    damaged: bool = False
    """Whether it has a batch that cannot be read.  It stays paused until an operator skips the batch and restarts."""
    ended: bool = False
    """Whether the partition was revoked: offsets of this assignment are no longer committed."""
    running: set[Delivery] = field(default_factory=set)
    """Deliveries that were started and have not ended."""
    _idle: asyncio.Future[None] | None = None
    retry: RetryPartition | None = None
    """Set if it is a partition of a retry topic."""
    closed: bool = False
    """Whether its deliveries may no longer be started or retried."""
    closing: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when it is closed."""

    @property
    def next_offset(self) -> int | None:
        """Next offset to fetch; `None` if nothing was delivered and `start` is not known yet."""
        delivered = self.progress.next_offset
        return self.start if delivered is None else delivered

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of log records about it."""
        return {"service": self.service, "topic": self.partition.topic, "partition": self.partition.partition}

    def close(self) -> None:
        """Start no more deliveries, and release those that wait."""
        self.closed = True
        if not self.closing.done():
            self.closing.set_result(None)

    def remove_running(self, delivery: Delivery) -> None:
        """Note that a delivery was settled or released."""
        self.running.discard(delivery)
        if self._idle is not None and not self._idle.done() and not self.running:
            self._idle.set_result(None)

    def idle(self) -> asyncio.Future[None]:
        """Return a future that is done when no delivery is running."""
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
            if not self.running:
                self._idle.set_result(None)
        return self._idle

    def handlers(self) -> set[asyncio.Task[Any]]:
        """Return the tasks that handle its deliveries."""
        return {task for delivery in self.running for task in delivery.tasks}


class Delivery:
    """One arrival of a message."""

    __slots__ = (
        "_processing",
        "assignment",
        "context",
        "copied_from",
        "event_id",
        "event_type",
        "is_abandoned",
        "is_prepared",
        "lane",
        "pending",
        "record",
        "recorded",
        "size",
        "tasks",
    )
    context: Context
    """Its handlers run in copies of this context.  Set by `begin`."""

    def __init__(self, record: Record, assignment: Assignment) -> None:
        self.record = record
        self.assignment = assignment
        self.tasks: tuple[asyncio.Task[Any], ...] = ()
        """Tasks that are handling it, without those that have not waited for anything."""
        self.size = len(record.value or b"") + len(record.key or b"")
        """Approximate size in memory, in bytes."""
        self.event_type = ""
        """Empty until it is decoded, and if it cannot be decoded."""
        self.event_id = ""
        """As it was decoded, since handlers may change their event; empty like `event_type`."""
        self.is_abandoned = False
        """Whether it was released unsettled, to be redelivered."""
        self.recorded: RecordedDelivery | None = None
        """Set if it is recorded in a span."""
        self.is_prepared = False
        """Whether it was decoded before its turn, and its turn has not begun."""
        self.pending = 0
        """Its items that have not ended."""
        self.lane: Lane[Delivery] | None = None
        """The lane that it has entered; none without an order."""
        self._processing: DetachedPhase | None = None
        self.copied_from: Origin | None = None
        """The original message, if it is a copy in a retry topic."""

    @property
    def source(self) -> Record:
        """The message as it is in the topic of its event."""
        return self.copied_from or self.record

    @property
    def source_topic(self) -> str:
        """The topic of its event, to which its dead-letter topic belongs."""
        retry = self.assignment.retry
        return self.record.topic if retry is None else retry.topic.source

    def begin(self, context: Context, processing: AbstractContextManager[Span]) -> None:
        """Start processing in `context`; `end` ends it."""
        self.context = context
        if processing is not SILENT_PHASE:
            self._processing = DetachedPhase(processing, context)
            if is_recorded(processing):
                # A copy, in which the span is also current after its end: the store may answer later.
                self.recorded = RecordedDelivery(self._processing.span, context.copy())

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of log records about it."""
        record = self.record
        known: dict[str, object] = {
            **self.assignment.log_fields(),
            "offset": record.offset,
            "message_key": key_text(record.key),
        }
        if not self.event_type:
            # It is not decoded; its headers may state what it is.
            known |= {name: header(record.headers, name) for name in ("event_id", "event_type")}
        return known

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Note a task that handles it."""
        self.tasks += (task,)

    def remove_task(self, task: asyncio.Task[Any]) -> None:
        """Note that a task no longer handles it."""
        self.tasks = tuple(each for each in self.tasks if each is not task)

    def begin_items(self, executions: Sequence[HandlerExecution]) -> list[WorkItem]:
        """Return one work item for each handler."""
        self.pending = len(executions)
        if self.recorded is not None:
            self.recorded.observe(executions)
        if self.pending == 1:
            return [WorkItem(self, executions[0])]
        return [WorkItem(self, execution) for execution in executions]

    @staticmethod
    def end_all(deliveries: Iterable[Delivery]) -> None:
        """End the spans of their processing."""
        for delivery in deliveries:
            if delivery._processing is not None:  # noqa: SLF001  # of the same class
                delivery.end()

    def note_failure(self, error: BaseException, attempt: int = 0) -> None:
        """Note that an attempt has failed, or has lost its lease."""
        if self.recorded is not None:
            self.recorded.failed(error, attempt)
        elif self._processing is not None:
            self._processing.span.fail(error)

    def note_attempt(self, attempt: int) -> None:
        """Note that an attempt with this number was made."""
        if self.recorded is not None:
            self.recorded.attempted(attempt)

    def note_dead_letter(self, reason: str, error: BaseException | str, attempts: int) -> None:
        """Note that it was dead-lettered, for a reason from a closed set."""
        if self.recorded is not None:
            # Its event type is known if it was decoded.
            self.recorded.dead_lettered(reason, error, attempts, is_decoded=bool(self.event_type))
        elif self._processing is not None:
            self._processing.span.fail(error if isinstance(error, BaseException) else reason)

    def end(self) -> None:
        """End the span of its processing."""
        processing, self._processing = self._processing, None
        if processing is not None:
            if self.recorded is not None:
                if self.is_abandoned:
                    self.recorded.released()
                self.recorded.end()
            processing.end()


@final
class WorkItem(Struct, eq=False):
    """One handler's work on a delivery."""

    delivery: Delivery
    execution: HandlerExecution
    run: Run | None = None
    """Its reservation, from the store's response until the handler starts."""
    answer: Completed | None = None
    """The store's answer, if it was asked before the turn of the delivery."""

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of log records about it."""
        # The worker's name of the service, which a scope of an unguarded handler need not have.
        return {**self.execution.log_fields(), **self.delivery.log_fields()}

    def release(self) -> None:
        """Release its reservation, if there is one."""
        run, self.run = self.run, None
        if run is not None:
            run.release()
        self.execution.release_unstarted()


class AbandonedError(Exception):
    """A delivery is released because its assignment is closing; it will be redelivered to this or another worker."""
