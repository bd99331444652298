"""Record the outcomes of handlers, many in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from integr8s_idem.engine.run import Returned
from integr8s_idem.engine.work import Executed
from integr8s_idem.errors import StoreError
from integr8s_idem.worker.assignments import WorkItem
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.pipeline_tasks import PipelineTasks


class OutcomeRecorder:
    """Records outcomes in batches: those that arrive during one request are sent with the next."""

    def __init__(self, processor: DeliveryProcessor, tasks: PipelineTasks, conclusions: Conclusions) -> None:
        self._processor = processor
        self._tasks = tasks
        self._conclusions = conclusions
        self._returned: list[tuple[WorkItem, Returned[Any]]] = []
        self._is_recording = False
        self._context = copy_context()

    def record(self, item: WorkItem, returned: Returned[Any]) -> None:
        """Record that the handler of an item has returned, and conclude with that."""
        if returned.completion is None:
            self._conclusions.conclude(item, returned.run.unrecorded(returned))
            return
        self._returned.append((item, returned))
        if not self._is_recording:
            self._is_recording = True
            self._tasks.begin(self._record_all(), self._context, self._ended)

    async def _record_all(self) -> None:
        while self._returned:
            returned, self._returned = self._returned[:MOST_TOGETHER], self._returned[MOST_TOGETHER:]
            await self._record_together(returned)
            # Let the next handlers of these lanes run, so that their outcomes are part of the next request.
            await asyncio.sleep(0)
        # No await since the list was found empty: a later outcome starts another task.
        self._is_recording = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._tasks.has_succeeded(task):
            return
        self._is_recording = False
        # The handlers have succeeded: record that in the background.
        left, self._returned = self._returned, []
        for item, returned in left:
            returned.run.complete_later(returned)
            self._conclusions.abandon(item)

    async def _record_together(self, returned: Sequence[tuple[WorkItem, Returned[Any]]]) -> None:
        try:
            written = await self._processor.executor.complete_together([each for _, each in returned])
        except StoreError:
            written = [False] * len(returned)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            for item, _ in returned:
                self._conclusions.broken(item, error)
            return
        except BaseException:
            for item, _ in returned:
                self._conclusions.abandon(item)
            raise
        for (item, each), is_written in zip(returned, written, strict=True):
            if is_written:
                self._conclusions.conclude(item, Executed(None, each.run.attempt.number))
            else:
                self._record_alone(item, each)

    def _record_alone(self, item: WorkItem, returned: Returned[Any]) -> None:
        """Record one outcome that was not recorded with its batch, and retry until the store responds."""

        def ended(_: asyncio.Task[None]) -> None:
            if not returned.run.is_over:  # the task was cancelled before it started
                returned.run.complete_later(returned)

        self._conclusions.attempt(item, partial(returned.run.complete, returned)).add_done_callback(ended)
