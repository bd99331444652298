"""Decode deliveries and reserve their keys before their turn in their lane.

A lane handles one delivery at a time.  If each were reserved at its turn, every request to the store would contain one
key per lane.  Instead, a delivery is reserved in one batch with those that wait for it, which then start one after
another, each when the outcome of the previous one is recorded.

Only `Reserved` and `Completed` are kept until the turn: other answers may change by then, so the store is asked again.
A reservation is kept for a limited time, `LONGEST_HOLD`.  Otherwise two lanes, each of which waits for a key that is
reserved for the other, would wait forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, TypeAlias

from integr8s_idem.config import OnInProgress
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.engine.work import Isolation
from integr8s_idem.handlers.handler import GuardedExecution, HandlerExecution
from integr8s_idem.records import Completed, Reserved, Verdict
from integr8s_idem.worker.assignments import Delivery, WorkItem
from integr8s_idem.worker.delivery_processor import Decoded, DeliveryProcessor, UnverifiedReplay
from integr8s_idem.worker.pipeline_tasks import PipelineTasks

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_PENDING: Final = Isolation.PENDING
_SKIP: Final = OnInProgress.SKIP

LONGEST_HOLD: Final = 0.5
"""A key that waits for its turn or a slot is released after this many seconds, or up to twice as many."""

Reservable: TypeAlias = tuple[WorkItem, GuardedExecution]
"""An item to be reserved, and its execution."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A delivery that was decoded before its turn."""

    decoded: Decoded
    items: list[WorkItem]
    """One item for each handler; empty if the delivery is not to be handled as usual."""
    answered_at: float | None = None
    """When the store answered, by the event loop's clock."""
    has_turn: bool = False
    """Whether its turn came before the answer."""

    def release(self) -> None:
        """Release its keys."""
        for item in self.items:
            item.release()


class LookAhead:
    """The deliveries of one pipeline that were decoded before their turn."""

    def __init__(self, processor: DeliveryProcessor, options: RunOptions, tasks: PipelineTasks) -> None:
        self._processor = processor
        self._options = options
        self._tasks = tasks
        self._decoded: dict[Delivery, Decoded] = {}
        """Deliveries that were decoded, and whose processing has not begun."""
        self._prepared: dict[Delivery, Prepared] = {}
        self.find: Final = self._prepared.get
        """Return what was prepared for a delivery, or `None`."""
        self._timer: asyncio.TimerHandle | None = None

    def decode(self, delivery: Delivery, context: Context) -> Decoded | None:
        """Decode a delivery and begin its processing; `None` after a bug in the library, which ends its assignment."""
        try:
            decoded = self._decoded.pop(delivery, None) or self._processor.decode(delivery)
            delivery.begin(context.copy(), decoded.processing)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            self._report_bug(error, delivery)
            return None
        return decoded

    def decode_successors(self, items: Sequence[WorkItem]) -> None:
        """Decode deliveries that wait for those of `items` in their lanes."""
        for item in items:
            lane = item.delivery.lane
            delivery = None if lane is None else lane.next_to_decode()
            if delivery is None or delivery.assignment.closed:
                continue
            try:
                self._decoded[delivery] = self._processor.decode(delivery)
            except Exception as error:  # noqa: BLE001  # the service is stopped with it
                self._report_bug(error, delivery)

    def _report_bug(self, error: Exception, delivery: Delivery) -> None:
        delivery.assignment.close()
        self._tasks.report_bug(error, delivery)

    def add(self, delivery: Delivery, decoded: Decoded) -> None:
        """Add a decoded delivery, which is about to be reserved."""
        is_usual = decoded.dead_letter is None and not isinstance(decoded, UnverifiedReplay)
        items = delivery.begin_items(decoded.executions) if is_usual else []
        self._prepared[delivery] = Prepared(decoded, items)
        delivery.is_prepared = True

    def reservable(self, deliveries: Iterable[Delivery], due: Iterable[HandlerExecution]) -> list[Reservable]:
        """Return the items of `deliveries` that may be reserved before their turn, after those of `due`.

        If a key occurs again, the store is asked for the later ones at their turn: they must not get it first.
        """
        found: list[Reservable] = []
        # Without their names: those of equal keys may differ.
        keys = {
            (execution.work.key.text, execution.work.key.generation)
            for execution in due
            if isinstance(execution, GuardedExecution)
        }
        for delivery in deliveries:
            prepared = self._prepared.get(delivery)
            for item in prepared.items if prepared is not None else ():
                execution = item.execution
                if not isinstance(execution, GuardedExecution):
                    continue
                key = execution.work.key.text, execution.work.key.generation
                if key not in keys:
                    keys.add(key)
                    if _may_be_early(execution):
                        found.append((item, execution))
        return found

    def keep(self, item: WorkItem, verdict: Verdict, asked_at: float, executor: Executor) -> None:
        """Keep the answer of the store until the turn of the item's delivery."""
        execution = item.execution
        assert isinstance(execution, GuardedExecution)
        if isinstance(verdict, Reserved):
            item.run = executor.reserved(execution.work, verdict, asked_at, self._options)
            if item.delivery.assignment.closed:
                item.release()
        elif isinstance(verdict, Completed):
            item.answer = verdict

    def note_answers(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Note that the store has answered, or will not; return those deliveries whose turn has come."""
        loop = asyncio.get_running_loop()
        now, due = loop.time(), []
        for delivery in deliveries:
            prepared = self._prepared.get(delivery)
            if prepared is not None:
                prepared.answered_at = now
                if prepared.has_turn:
                    due.append(delivery)
        if self._prepared and self._timer is None:
            self._timer = loop.call_later(LONGEST_HOLD, self._release_old)
        return due

    def take(self, delivery: Delivery) -> Prepared:
        """Begin the turn of `delivery`."""
        delivery.is_prepared = False
        return self._prepared.pop(delivery)

    def drop(self, delivery: Delivery) -> None:
        """Release `delivery`, which is not handled here."""
        decoded = self._decoded.pop(delivery, None)
        if decoded is not None:
            # Observers have started when it was decoded.
            delivery.begin(copy_context(), decoded.processing)
        prepared = self._prepared.pop(delivery, None)
        if prepared is not None:
            prepared.release()
        delivery.is_abandoned = True
        delivery.end()

    def release_closed(self) -> None:
        """Release the keys of closed assignments."""
        for delivery, prepared in self._prepared.items():
            if delivery.assignment.closed:
                prepared.release()

    def _release_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LONGEST_HOLD, self._release_old) if self._prepared else None
        latest = loop.time() - LONGEST_HOLD
        for prepared in self._prepared.values():
            if prepared.answered_at is not None and prepared.answered_at <= latest:
                prepared.release()


def _may_be_early(execution: GuardedExecution) -> bool:
    """Whether work may be reserved before its turn.

    If its handler is limited by a field, it may have to wait at its turn, and must not hold a lease meanwhile.
    If it cannot be isolated, each lapsed attempt counts against it, even if its handler never started.  If others skip
    work that is in progress, they would skip it although nothing runs.
    """
    return (
        execution.handler.outbox is None
        and execution.handler.limit is None
        and execution.work.isolation is _PENDING
        and execution.on_in_progress is not _SKIP
    )
