"""Start the tasks of a pipeline, and report errors that end them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from integr8s_idem.telemetry.log_fields import SOURCE, LogSource, logging_with
from integr8s_idem.worker.assignments import Delivery

logger = logging.getLogger(__name__)


class PipelineTasks:
    """Starts tasks, and stops the service if one of them has a bug."""

    def __init__(self, service: str, fail: Callable[[BaseException], None]) -> None:
        """`fail` stops the service rather than lose an event, for example because of a bug in the library."""
        self._service = service
        self._fail = fail
        self._running: set[asyncio.Task[None]] = set()
        self._reported: BaseException | None = None
        """The last error that was reported."""

    @property
    def running(self) -> set[asyncio.Task[None]]:
        """Tasks that have not ended."""
        return set(self._running)

    def begin(
        self, work: Coroutine[Any, Any, None], context: Context, ended: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        """Start `work` in a copy of `context`, and call `ended` when it has ended.

        A `finally` in `work` would not do: it does not run if the task is cancelled before its first step.
        """
        # `ended` is called in the copy too: it may end phases in `context`, which cannot be entered twice.
        own = context.copy()
        task = asyncio.get_running_loop().create_task(work, context=own)
        self._running.add(task)
        task.add_done_callback(partial(self._ended, ended), context=own)
        return task

    def _ended(self, ended: Callable[[asyncio.Task[None]], None], task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        ended(task)

    def begin_for(
        self,
        delivery: Delivery,
        work: Coroutine[Any, Any, None],
        ended: Callable[[asyncio.Task[None]], None],
        source: LogSource | None = None,
    ) -> asyncio.Task[None]:
        """Start `work` as one of the tasks that handle `delivery`.  `source` of log records: `delivery` by default."""

        def ended_for(task: asyncio.Task[None]) -> None:
            delivery.remove_task(task)
            ended(task)

        context = delivery.context.copy()
        context.run(SOURCE.set, source or delivery)
        task = self.begin(work, context, ended_for)
        delivery.add_task(task)
        return task

    def has_succeeded(self, task: asyncio.Task[None]) -> bool:
        """Whether an ended task was not cancelled and raised no error; an error is reported as a bug."""
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None and error is not self._reported:
            self.report_bug(error)
        return error is None

    def stop_service(self, error: BaseException) -> None:
        """Stop the service, which fails with `error`."""
        self._fail(error)

    def report_bug(self, error: BaseException, source: LogSource | None = None) -> None:
        """Log `error`, and stop the service.  `source`: the delivery or item, if it is known."""
        self._reported = error
        with logging_with(source):
            logger.error("%s: handling a delivery failed because of a bug", self._service, exc_info=error)
        self._fail(error)
