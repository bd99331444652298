"""Process the outcome of a work item: it is done, waits, is dead-lettered or runs alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from integr8s_idem.config import OnInProgress
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import Discarded, Executed, HandlerFailed, NotStarted, Outcome
from integr8s_idem.errors import HandlerCancelledError, LeaseLostError, ServiceStoppedError, StoreError
from integr8s_idem.failures import FailureAction
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.handlers.reconciliation import ReconcilingExecution
from integr8s_idem.records import Completed, InProgress, Scheduled
from integr8s_idem.telemetry import DeliveryOutcome, Signal
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker.assignments import AbandonedError, Delivery, WorkItem
from integr8s_idem.worker.dead_letters import DeadLetter
from integr8s_idem.worker.delivery_processor import DeliveryProcessor, UnverifiedReplay
from integr8s_idem.worker.pipeline_tasks import PipelineTasks
from integr8s_idem.worker.poison_events import FirstOutcome, RunOnce
from integr8s_idem.worker.retries import Retries
from integr8s_idem.worker.value_limits import Turn, ValueLimits
from integr8s_idem.worker.waiting import Waiting

logger = logging.getLogger(__name__)

LONGEST_LOOK_AHEAD: Final = 60.0
"""Maximum seconds until the store is asked again for work that is not due yet: an operator may have released it."""


class Conclusions:
    """Decides what happens to work items after an attempt.  They do not need their slot any more."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        tasks: PipelineTasks,
        *,
        reschedule: Callable[[WorkItem], None],
        ended: Callable[[Sequence[Delivery], bool], None],
    ) -> None:
        """
        Args:
            reschedule: Called with an item that is to be handled again.
            ended: Called with deliveries that have ended, and whether their offsets may be committed.
        """
        self._processor = processor
        self._circuit = processor.circuit
        self._tasks = tasks
        self._reschedule = reschedule
        self._ended = ended
        self.limits: ValueLimits | None = None
        """Places of the items whose handlers are limited by a field; `None` if no handler is."""
        self._waiting: Waiting[WorkItem] = Waiting(reschedule, self.abandon)

    def conclude(self, item: WorkItem, outcome: FirstOutcome) -> None:
        """Process the outcome of an attempt, or a suspect that was reserved."""
        processor, execution = self._processor, item.execution
        match outcome:
            case Executed():
                self.succeeded([(item, outcome.attempt)])
            case Completed():
                self.duplicate(item)
            case Run():
                self.isolate(item, outcome)
            case NotStarted():
                self._leave_limit(item)
                self._reschedule(item)
            case Scheduled():
                # Not skipped by any policy: nobody runs it.
                self._wait_until_due(item, outcome)
            case InProgress():
                self._in_progress(item, outcome)
            case Discarded():
                processor.note_discarded(execution, outcome)
                self._settle(item, DeliveryOutcome.DISCARDED, outcome.attempt)
            case HandlerFailed(given_up=False):
                self._failed(item, outcome)
            case _:
                self._dead_letter_item(item, outcome)

    def _failed(self, item: WorkItem, failed: HandlerFailed) -> None:
        """Process an attempt that has failed, and is not the last one."""
        processor, execution = self._processor, item.execution
        if failed.rule is not None and failed.rule.action is FailureAction.STOP:
            self._stop(item, failed)
            return
        item.delivery.note_failure(failed.error, failed.attempt)
        if processor.retries is not None and failed.due_in is not None:
            processor.note_retry(execution, failed, failed.due_in.total_seconds())
            self._retry_later(item, processor.retries, failed.attempt, failed.due_in)
        else:
            self._wait(item, processor.retry_pause(execution, failed))

    def succeeded(self, items: Sequence[tuple[WorkItem, int]]) -> None:
        """End items whose handlers have succeeded, each with the number of its attempt, and count them."""
        tally = self._processor.tally
        for item, attempt in items:
            tally.handled += 1
            if attempt > 1 or item.execution.generation:
                tally.reruns += attempt > 1
                tally.reconciled += isinstance(item.execution, ReconcilingExecution) and item.execution.is_reconciled
            if item.delivery.recorded is not None:
                item.delivery.recorded.settled(DeliveryOutcome.EXECUTED, attempt)
        self._done(*[item for item, _ in items])

    def raised(self, item: WorkItem, error: Exception) -> None:
        """Process an error that leaves the outcome of an attempt unknown; the attempt does not count."""
        if isinstance(error, AbandonedError):
            self.abandon(item)
        elif isinstance(error, StoreError):
            self._circuit.mark_unavailable(error)
            self.wait_for_store(item)
        elif isinstance(error, LeaseLostError):
            self._processor.tally.leases_lost += 1
            item.delivery.note_failure(error, error.attempt)
            with logging_with(item, attempt=error.attempt):
                logger.warning("%s", error)
            self._wait(item, self._processor.backoff.pause(1))
        else:
            self.broken(item, error)

    def duplicate(self, item: WorkItem) -> None:
        """Count a duplicate and end the item."""
        self._processor.tally.duplicates += 1
        self._settle(item, DeliveryOutcome.DUPLICATE)

    def known_duplicate(self, item: WorkItem, done: Completed) -> None:
        """End an item whose work was done by this process, according to its local cache."""
        if item.delivery.recorded is not None and done.trace is not None:
            item.delivery.recorded.link_to_run(done.trace)
        self.duplicate(item)

    def abandon(self, item: WorkItem) -> None:
        """End the item without settling its delivery, which will be redelivered."""
        item.release()
        item.delivery.is_abandoned = True
        self._done(item)

    def cancelled(self, item: WorkItem, attempt: int = 0) -> None:
        """End an item whose task was cancelled, or handle it again if its assignment is open.

        The worker cancels tasks only after it has closed their assignments.  If the task was cancelled by its handler,
        nothing would redeliver the item, and its offset would never be committed.  That counts as a failed attempt, so
        that the attempts of a handler that always does it come to an end.

        `attempt`: number of the attempt that was cancelled; 0 if it is unknown.
        """
        item.delivery.note_attempt(attempt)
        if item.delivery.assignment.closed:
            self.abandon(item)
            return
        item.release()
        error = HandlerCancelledError(item.execution.handler.name, own_task=True)
        failures = item.execution.note_own_cancellation()
        self._processor.observer.count(Signal.HANDLER_FAILED, item.execution.event.event_type)
        item.delivery.note_failure(error)
        with logging_with(item):
            logger.warning(
                "%s: its handler, or a timer that an earlier one left in the same task, has cancelled it, retrying",
                item.execution.label,
            )
        self._wait(item, self._processor.backoff.pause(failures))

    def _stop(self, item: WorkItem, failed: HandlerFailed) -> None:
        """Stop the service with an event that is neither settled nor retried here."""
        # First, so that no later event of its lane starts.
        item.delivery.assignment.close()
        execution = item.execution
        item.delivery.note_failure(failed.error, failed.attempt)
        reason = describe_error(failed.error)
        stopped = ServiceStoppedError(execution.label, execution.handler.name, str(failed.rule), reason)
        stopped.__cause__ = failed.error
        with logging_with(item, attempt=failed.attempt):
            logger.error(
                "%s: handler %s failed at attempt %d (%s): the service stops",
                execution.label,
                execution.handler.name,
                failed.attempt,
                reason,
                exc_info=failed.error,
            )
        self._processor.observer.count(Signal.SERVICE_STOPPED)
        self._tasks.stop_service(stopped)
        self.abandon(item)

    def broken(self, item: WorkItem, error: BaseException) -> None:
        """Report a bug in the library: close the assignment, and stop the service."""
        item.delivery.assignment.close()
        self._tasks.report_bug(error, item)
        self.abandon(item)

    # Waiting.

    def wait_for_store(self, item: WorkItem) -> None:
        """Handle the item again once the store is available."""
        self._wait(item, until=self._circuit.available_again)

    def wait_for_limit(self, item: WorkItem, turn: Turn) -> None:
        """Handle the item again when it has its place.  It must not hold its key meanwhile."""
        item.release()
        self._waiting.add(item, item.delivery.assignment.closing, until=turn)

    def _leave_limit(self, *items: WorkItem) -> None:
        """Give up the places of items whose attempts have ended."""
        if self.limits is not None:
            for item in items:
                self.limits.leave(item)

    def abandon_waiting(self) -> None:
        """Abandon all items that are waiting."""
        self._waiting.abandon_all()

    def _in_progress(self, item: WorkItem, outcome: InProgress) -> None:
        """Wait for the other run, or do what the policy says instead."""
        processor, execution = self._processor, item.execution
        assert isinstance(execution, GuardedExecution)
        if execution.on_in_progress is OnInProgress.SKIP:
            processor.observer.count(Signal.DUPLICATE_BLOCKED, execution.event.event_type)
            processor.tally.duplicates += 1
            self._settle(item, DeliveryOutcome.IN_PROGRESS)
            return
        if execution.on_in_progress is OnInProgress.RAISE:
            self._wait(item, processor.backoff.pause(execution.work.note_look()))
            return
        processor.tally.waits += execution.work.looks == 0
        self._wait(item, *processor.executor.next_look(execution.work, outcome))

    def _wait_until_due(self, item: WorkItem, outcome: Scheduled) -> None:
        processor, execution = self._processor, item.execution
        assert isinstance(execution, GuardedExecution)
        work, seconds = execution.work, outcome.retry_after.total_seconds()
        if processor.retries is not None and work.failures is not None and work.failures.schedules:
            wait = processor.retries.wait_seconds(item.delivery, outcome.retry_after)
            if wait is None:
                attempt = max(outcome.attempt, work.copied_attempt, work.failed_runs)
                self._retry_later(item, processor.retries, attempt, outcome.retry_after)
                return
            seconds = wait
        if work.note_look() == 1:
            processor.tally.waits += 1
            processor.observer.count(Signal.WAITED, execution.event.event_type)
        self._wait(item, min(seconds + 0.01, LONGEST_LOOK_AHEAD))

    def _wait(self, item: WorkItem, seconds: float | None = None, until: asyncio.Future[None] | None = None) -> None:
        self._leave_limit(item)
        if seconds is None and until is None:
            seconds = 0.0
        self._waiting.add(item, item.delivery.assignment.closing, seconds=seconds, until=until)

    # Separate tasks: outcomes to be recorded alone, suspects, dead letters, and replays to be verified.

    def attempt(self, item: WorkItem, run_once: RunOnce, run: Run | None = None) -> asyncio.Task[None]:
        """Make an attempt in a task, and conclude with its outcome.  `run` is released if the task never starts."""

        async def attempting() -> None:
            try:
                outcome = await run_once()
            except Exception as error:  # noqa: BLE001  # `raised` handles all errors of an item
                self.raised(item, error)
                return
            self.conclude(item, outcome)

        def ended(task: asyncio.Task[None]) -> None:
            if run is not None and not run.is_over:
                run.release()
            if task.cancelled():
                self.cancelled(item)
            elif (error := task.exception()) is not None:
                self.broken(item, error)

        return self._tasks.begin_for(item.delivery, attempting(), ended, item)

    def isolate(self, item: WorkItem, run: Run) -> None:
        """Run a suspect alone."""
        suspects, execution, closing = self._processor.suspects, item.execution, item.delivery.assignment.closing
        assert suspects is not None
        assert isinstance(execution, GuardedExecution)
        with_others = partial(self._run_with_others, item.delivery)
        self.attempt(item, partial(suspects.run, execution, run, closing, self._circuit.wait_out, with_others), run)

    async def _run_with_others(self, delivery: Delivery, run_once: RunOnce) -> FirstOutcome:
        slots, isolation, closing = self._processor.slots, self._processor.isolation, delivery.assignment.closing
        if not await slots.acquire(unless=closing):
            raise AbandonedError
        try:
            await isolation.wait_until_open(unless=closing)
            if closing.done():
                raise AbandonedError
            isolation.enter()
            try:
                return await run_once()
            finally:
                isolation.leave()
        finally:
            slots.release()

    def verify(self, delivery: Delivery, replay: UnverifiedReplay) -> None:
        """Verify a replay with the store, and handle its executions."""

        async def verifying() -> None:
            executions = await self._processor.verified(delivery, replay)
            for item in delivery.begin_items(executions):
                self._reschedule(item)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._delivery_failed(delivery, task)

        self._tasks.begin_for(delivery, verifying(), ended)

    def dead_letter(self, delivery: Delivery, reason: DeadLetter) -> None:
        """Dead-letter a delivery that has no items."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._delivery_failed(delivery, task)
            else:
                self._ended((delivery,), True)

        self._tasks.begin_for(delivery, self._processor.dead_letter(delivery, reason), ended)

    def _retry_later(self, item: WorkItem, retries: Retries, attempt: int, due_in: timedelta) -> None:
        """Publish a copy to a retry topic and settle the item, or handle it here when it is due."""
        execution = item.execution
        assert isinstance(execution, GuardedExecution)

        is_published = False

        async def publishing() -> None:
            nonlocal is_published
            is_published = await retries.publish(item.delivery, execution, attempt, due_in)

        def end() -> None:
            if is_published:
                self._processor.tally.deferred += 1
                self._settle(item, DeliveryOutcome.RETRY_LATER, attempt)
            else:
                self._reschedule(item)

        self._begin_for(item, publishing(), end)

    def _begin_for(self, item: WorkItem, work: Coroutine[Any, Any, None], end: Callable[[], None]) -> None:
        """Start `work`, and call `end` when it has succeeded; abandon the item if it was cancelled or abandoned."""
        self._leave_limit(item)

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or isinstance(error, AbandonedError):
                self.abandon(item)
            elif error is not None:
                self.broken(item, error)
            else:
                end()

        self._tasks.begin_for(item.delivery, work, ended, item)

    def _dead_letter_item(self, item: WorkItem, outcome: Outcome[Any]) -> None:
        work = self._processor.dead_letter_outcome(item.delivery, item.execution, outcome)
        self._begin_for(item, work, partial(self._done, item))

    # Ends.

    def _settle(self, item: WorkItem, outcome: DeliveryOutcome, attempt: int = 0) -> None:
        if item.delivery.recorded is not None:
            item.delivery.recorded.settled(outcome, attempt)
        self._done(item)

    def _done(self, *items: WorkItem) -> None:
        self._leave_limit(*items)
        settled: list[Delivery] = []
        abandoned: list[Delivery] = []
        for item in items:
            delivery, execution = item.delivery, item.execution
            if isinstance(execution, GuardedExecution) and execution.work.looks:
                self._processor.executor.verdicts.end_wait(execution.work)
            delivery.pending -= 1
            if not delivery.pending:
                (abandoned if delivery.is_abandoned else settled).append(delivery)
        if settled:
            self._ended(settled, True)
        if abandoned:
            self._ended(abandoned, False)

    def broken_delivery(self, delivery: Delivery, error: BaseException) -> None:
        """Report a bug in the library, like `broken`, for a delivery that has no items."""
        delivery.assignment.close()
        self._tasks.report_bug(error, delivery)
        self._ended((delivery,), False)

    def _delivery_failed(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, AbandonedError):
            self._ended((delivery,), False)
        else:
            self.broken_delivery(delivery, error)
