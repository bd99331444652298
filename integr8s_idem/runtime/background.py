"""Run a worker with the relay of its outbox and the background tasks of its service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from dishka import AsyncContainer

from integr8s_idem.config import KafkaSettings
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.runtime.outbox_relay import make_relay
from integr8s_idem.runtime.service import Background
from integr8s_idem.worker.consumer import ServiceWorker
from integr8s_idem.worker.publisher import EventPublisher


async def run_worker(
    worker: ServiceWorker,
    dispatcher: EventDispatcher,
    publisher: EventPublisher,
    kafka: KafkaSettings,
    background: Iterable[Coroutine[Any, Any, None]] = (),
) -> None:
    """Run `worker` until it is stopped, concurrently with the relay of its outbox and the coroutines in `background`.

    They are cancelled when the worker ends.  If one of them fails, the worker drains, and the error is raised.
    """
    loop = asyncio.get_running_loop()
    outbox = dispatcher.outbox
    relay = make_relay(outbox, publisher, kafka, dispatcher.observer) if outbox is not None else None
    consuming = loop.create_task(worker.run())
    relaying = loop.create_task(relay.run() if relay is not None else wait_forever())
    tasks = {relaying, *(loop.create_task(each) for each in background)}
    try:
        done, _ = await asyncio.wait({consuming, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if consuming not in done:
            worker.stop()
        await consuming
        if relay is not None and not relaying.done():
            # Publish the events of the last handlers before stopping.
            relay.stop()
            await asyncio.wait({relaying}, timeout=kafka.request_timeout_seconds)
    finally:
        consuming.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait({consuming, *tasks})
    for task in tasks:
        if task in done or not task.cancelled():
            task.result()


async def run_background(work: Background, container: AsyncContainer) -> None:
    """Run a background task of a service; if it returns, the service continues without it."""
    await work(container)
    await wait_forever()


async def wait_forever() -> None:
    """Wait until cancelled."""
    await asyncio.get_running_loop().create_future()
