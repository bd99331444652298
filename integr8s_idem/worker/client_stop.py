"""Stop a Kafka consumer completely, even if aiokafka does not.

Numbers such as A6 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from integr8s_idem.worker.client_options import bounded

_TASKS: Final = {
    "_coordinator": ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task"),
    "_fetcher": ("_fetch_task",),
    "_client": ("_sync_task",),
}
"""Background tasks of a consumer of aiokafka 0.14, by the attribute that holds the object that starts them."""


async def bounded_stop(consumer: Any, seconds: float) -> None:
    """Stop a consumer of aiokafka, for at most `seconds`.

    If a step of its `stop` fails or takes too long, aiokafka skips the steps after it: the consumer would remain
    connected, and would continue to send heartbeats (A6).

    Raises:
        KafkaError: The broker, or a task of the consumer, has failed.
        OSError: As above.
        TimeoutError: It took longer, or aiokafka cancelled it.
    """
    try:
        await bounded(consumer.stop(), seconds)
    finally:
        _stop_the_rest(consumer)


def _stop_the_rest(consumer: Any) -> None:
    """Cancel the tasks and close the connections that are left.  Attributes that are missing have nothing to stop."""
    for name, tasks in _TASKS.items():
        part = getattr(consumer, name, None)
        for task in tasks:
            _cancel(getattr(part, task, None))
    for task in getattr(getattr(consumer, "_fetcher", None), "_pending_tasks", ()):
        _cancel(task)
    for connection in connections(consumer):
        connection.close()


def connections(consumer: Any) -> Iterator[Any]:
    """Yield the connections of a consumer of aiokafka."""
    yield from list(getattr(getattr(consumer, "_client", None), "_conns", {}).values())


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
