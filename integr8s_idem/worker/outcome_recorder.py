"""Record the outcomes of handlers, many in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from integr8s_idem.engine.run import Returned
from integr8s_idem.errors import StoreError
from integr8s_idem.worker.assignments import WorkItem
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.pipeline_tasks import PipelineTasks

MOST_TURNS: Final = 5
"""Iterations of the event loop for which outcomes wait for others, while more handlers are about to run."""

LONGEST_WAIT: Final = 0.003
"""Seconds for which outcomes wait for others, while deliveries wait for handlers.  Handlers that wait for something
end one by one, and each would cause a request.  No slot waits for the outcomes, nor does a delivery that is known when
the wait begins."""

ENOUGH: Final = 64
"""Outcomes that do not wait for others."""


class OutcomeRecorder:
    """Records outcomes in batches: those that arrive during one request are sent with the next."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        tasks: PipelineTasks,
        conclusions: Conclusions,
        more_to_come: Callable[[], bool],
        may_wait: Callable[[], bool],
        meanwhile: Callable[[Sequence[WorkItem]], None] | None,
    ) -> None:
        """
        Args:
            more_to_come: Whether handlers are about to run that may return at once.
            may_wait: Whether more handlers will end soon, and no delivery waits for an outcome.
            meanwhile: Called with the items of each request, to schedule work for the time until the store answers.
        """
        self._meanwhile = meanwhile
        self._more_to_come = more_to_come
        self._may_wait = may_wait
        self._processor = processor
        self._isolation = processor.isolation
        self._tasks = tasks
        self._conclusions = conclusions
        self._returned: list[tuple[WorkItem, Returned[Any]]] = []
        self._is_recording = False
        self._enough: asyncio.Future[None] | None = None
        """Resolved when the outcomes have waited for others; made only if they do."""
        self._context = copy_context()

    def record(self, item: WorkItem, returned: Returned[Any]) -> None:
        """Record that the handler of an item has returned, and conclude with that."""
        if returned.completion is None:
            self._conclusions.conclude(item, returned.run.unrecorded(returned))
            return
        self._returned.append((item, returned))
        if self._enough is not None and (len(self._returned) >= ENOUGH or _is_awaited(self._returned[-1])):
            self._stop_waiting()
        if not self._is_recording:
            self._is_recording = True
            # Not one of the tasks that are cancelled with the service: the handlers have succeeded.
            client = self._processor.executor.client
            client.in_background(self._record_all(), self._context.copy()).add_done_callback(self._ended)

    async def _record_all(self) -> None:
        while await self._gather():
            returned, self._returned = self._returned[:MOST_TOGETHER], self._returned[MOST_TOGETHER:]
            await self._record_together(returned)
        # No await since the list was found empty: a later outcome starts another task.
        self._is_recording = False

    async def _gather(self) -> bool:
        """Let handlers run whose outcomes can be part of the next request; return whether there is an outcome."""
        for _ in range(MOST_TURNS):
            # In the first turn, the lanes continue whose outcomes were part of the last request.
            await asyncio.sleep(0)
            if len(self._returned) >= MOST_TOGETHER or not self._more_to_come():
                break
        if 0 < len(self._returned) < ENOUGH and self._may_wait() and not any(map(_is_awaited, self._returned)):
            await self._wait_for_others()
        return bool(self._returned)

    async def _wait_for_others(self) -> None:
        loop = asyncio.get_running_loop()
        self._enough = loop.create_future()
        timer = loop.call_later(LONGEST_WAIT, self._stop_waiting)
        # As if a handler ran: the work would lapse if a suspect crashed the process now.
        self._isolation.enter()
        try:
            await self._enough
        finally:
            self._isolation.leave()
            timer.cancel()
            self._enough = None

    def _stop_waiting(self) -> None:
        if self._enough is not None and not self._enough.done():
            self._enough.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._tasks.has_succeeded(task):
            return
        self._is_recording = False
        left, self._returned = self._returned, []
        self._record_later(left)

    async def _record_together(self, returned: Sequence[tuple[WorkItem, Returned[Any]]]) -> None:
        try:
            outcomes = [each for _, each in returned]
            if self._meanwhile is not None:
                self._meanwhile([item for item, _ in returned])
            written = await self._processor.executor.complete_together(outcomes, shielded=False)
        except StoreError:
            written = [False] * len(returned)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            for item, _ in returned:
                self._conclusions.broken(item, error)
            return
        except BaseException:  # if it is a cancellation, the executor records them in the background
            for item, _ in returned:
                self._conclusions.abandon(item)
            raise
        recorded: list[tuple[WorkItem, int]] = []
        others: list[tuple[WorkItem, Returned[Any]]] = []
        for (item, each), is_written in zip(returned, written, strict=True):
            if is_written:
                recorded.append((item, each.run.attempt.number))
            else:
                others.append((item, each))
        self._conclusions.succeeded(recorded)
        for item, each in others:
            self._record_alone(item, each)

    def _record_later(self, returned: Sequence[tuple[WorkItem, Returned[Any]]]) -> None:
        """Record in the background that handlers have succeeded, for deliveries that nobody waits for any more."""
        for item, each in returned:
            each.run.complete_later(each)
            self._conclusions.abandon(item)

    def _record_alone(self, item: WorkItem, returned: Returned[Any]) -> None:
        """Record one outcome that was not recorded with its batch, and retry until the store responds."""
        if item.delivery.assignment.ended:
            self._record_later([(item, returned)])
            return

        def ended(_: asyncio.Task[None]) -> None:
            if not returned.run.is_over:  # the task was cancelled before it started
                returned.run.complete_later(returned)

        self._conclusions.attempt(item, partial(returned.run.complete, returned)).add_done_callback(ended)


def _is_awaited(outcome: tuple[WorkItem, Returned[Any]]) -> bool:
    """Whether deliveries of its lane wait for an outcome."""
    lane = outcome[0].delivery.lane
    return lane is not None and bool(lane.waiting)
