"""Bugs of delayed retries, injected into a worker process: the checks must detect each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry import DeliveryOutcome
from integr8s_idem.worker.assignments import WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.retries import Retries
from tests.simulation.bugs import attempt_of_the_copy_ignored

COMMITTED_AFTER: Final = 1.0
"""Seconds; longer than the interval between commits."""


def _offset_before_copy() -> None:
    """Settle an event before its copy is published, and publish the copy after its offset was committed."""

    def retry_later(self: Conclusions, item: WorkItem, retries: Retries, attempt: int, due_in: timedelta) -> None:
        execution = item.execution
        assert isinstance(execution, GuardedExecution)

        async def publish() -> None:
            await asyncio.sleep(COMMITTED_AFTER)
            await retries.publish(item.delivery, execution, attempt, due_in)

        self._tasks.begin_for(item.delivery, publish(), lambda _: None, item)
        self._settle(item, DeliveryOutcome.RETRY_LATER, attempt)

    setattr(Conclusions, "_retry_later", retry_later)  # noqa: B010  # a type checker would reject an assignment


def _attempt_of_copy_ignored() -> None:
    """Count the attempts of the record only, although it may have expired."""
    attempt_of_the_copy_ignored().__enter__()  # until the process ends


BUGS: Final[dict[str, Callable[[], None]]] = {
    "offset_before_copy": _offset_before_copy,
    "attempt_of_copy_ignored": _attempt_of_copy_ignored,
}
