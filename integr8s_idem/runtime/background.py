"""What runs beside the worker of a service: the relay of its outbox, and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from dishka import AsyncContainer

from integr8s_idem.config import KafkaSettings
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.runtime.service import Background
from integr8s_idem.worker.consumer import ServiceWorker
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.relay import Relay


async def run_worker(
    worker: ServiceWorker,
    dispatcher: EventDispatcher,
    publisher: EventPublisher,
    kafka: KafkaSettings,
    beside: Iterable[Coroutine[Any, Any, None]] = (),
) -> None:
    """Run `worker` until it is stopped, with the relay of its outbox and everything in `beside`.

    These are cancelled at its end.  If one of them fails, the worker drains, and the error is raised.
    """
    loop = asyncio.get_running_loop()
    relay = _relay_of(dispatcher, publisher, kafka)
    consuming = loop.create_task(worker.run())
    relaying = loop.create_task(relay.run() if relay is not None else wait_forever())
    tasks = {relaying, *(loop.create_task(each) for each in beside)}
    try:
        done, _ = await asyncio.wait({consuming, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if consuming not in done:
            worker.stop()
        await consuming
        if relay is not None and not relaying.done():
            # What the last handlers have left is published before the end.
            relay.stop()
            await asyncio.wait({relaying}, timeout=kafka.request_timeout_seconds)
    finally:
        consuming.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait({consuming, *tasks})
    for task in tasks:
        if not task.cancelled():
            task.result()


async def run_background(work: Background, container: AsyncContainer) -> None:
    """Run one background task of a service; the service goes on without one that has nothing more to do."""
    await work(container)
    await wait_forever()


async def wait_forever() -> None:
    """Wait until cancelled."""
    await asyncio.get_running_loop().create_future()


def _relay_of(dispatcher: EventDispatcher, publisher: EventPublisher, kafka: KafkaSettings) -> Relay | None:
    """Publishes what transactions of this service have left behind, also those of other processes."""
    if dispatcher.outbox is None:
        return None
    # A message that is under way when the claim ends could be overtaken by the next of its key.
    return Relay(dispatcher.outbox, publisher, claim_seconds=max(60.0, 3 * kafka.request_timeout_seconds))
