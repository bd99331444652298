"""Stop a Kafka client completely, even if aiokafka does not.

Numbers such as A6 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from integr8s_idem.worker.client_options import bounded

_TASKS: Final = {
    "_coordinator": ("_coordination_task", "_heartbeat_task", "_commit_refresh_task"),
    "_fetcher": ("_fetch_task",),
    "_sender": ("_sender_task",),
    "_client": ("_sync_task",),
    "client": ("_sync_task",),
}
"""Background tasks of consumers and producers in aiokafka 0.14, by the attribute that starts them."""


async def bounded_stop(client: Any, seconds: float) -> None:
    """Stop a consumer or producer of aiokafka, for at most `seconds`.

    If a step of its `stop` fails or takes too long, aiokafka skips the steps after it: the client would remain
    connected, and a consumer would continue to send heartbeats (A6).

    Raises:
        KafkaError: The broker, or a task of the client, has failed.
        OSError: As above.
        TimeoutError: It took longer, or aiokafka cancelled it.
    """
    try:
        await bounded(client.stop(), seconds)
    finally:
        _stop_the_rest(client)


def _stop_the_rest(client: Any) -> None:
    """Cancel the tasks and close the connections that are left.  Attributes that are missing have nothing to stop."""
    for name, tasks in _TASKS.items():
        part = getattr(client, name, None)
        for task in tasks:
            _cancel(getattr(part, task, None))
    for task in getattr(getattr(client, "_fetcher", None), "_pending_tasks", ()):
        _cancel(task)
    for connection in connections(client):
        connection.close()


def connections(client: Any) -> Iterator[Any]:
    """Yield the connections of a consumer or producer of aiokafka."""
    inner = getattr(client, "_client", None) or getattr(client, "client", None)
    yield from list(getattr(inner, "_conns", {}).values())


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
