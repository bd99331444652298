"""The tasks of a pipeline, counted and watched: none of them may end by an error without anybody knowing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from integr8s_idem.worker.assignments import Delivery

logger = logging.getLogger(__name__)


class PipelineTasks:
    """Begins tasks, and stops the service if one of them has a bug."""

    def __init__(self, service: str, fail: Callable[[BaseException], None]) -> None:
        """`fail`: called with a bug of the library: better a stopped service than a lost event."""
        self._service = service
        self._fail = fail
        self._running: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> set[asyncio.Task[None]]:
        """Those that have not ended."""
        return set(self._running)

    def begin(
        self, work: Coroutine[Any, Any, None], context: Context, ended: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        """Begin `work` in a copy of `context`.

        `ended` is called back, since a task that is cancelled before its first step runs no `finally`.
        """
        task = asyncio.get_running_loop().create_task(work, context=context.copy())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(ended)
        return task

    def begin_for(
        self, delivery: Delivery, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        """Begin `work` as one of the tasks that handle `delivery`."""

        def ended_for(task: asyncio.Task[None]) -> None:
            delivery.tasks.discard(task)
            ended(task)

        task = self.begin(work, delivery.context, ended_for)
        delivery.tasks.add(task)
        return task

    def has_succeeded(self, task: asyncio.Task[None]) -> bool:
        """Whether a task that has ended was neither cancelled nor has a bug."""
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None:
            self.report_bug(error)
        return error is None

    def report_bug(self, error: BaseException) -> None:
        """Stop the service: `error` is a bug."""
        logger.error("%s: a delivery could not be handled", self._service, exc_info=error)
        self._fail(error)
