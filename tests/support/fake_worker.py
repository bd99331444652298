"""`ServiceWorker` on a broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from integr8s_idem.config.sections import KafkaSettings, ServiceSettings
from integr8s_idem.errors import EventTooLargeError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.worker import EventPublisher, ServiceWorker
from tests.support.fake_consumer import FakeBroker, FakeConsumer


class FakePublisher(EventPublisher):
    """Puts messages into a broker in memory."""

    def __init__(self, broker: FakeBroker, limit: int = 1_000_000) -> None:
        super().__init__(KafkaSettings())
        self.broker = broker
        self.limit = limit

    async def publish(self, *events: BaseEvent) -> None:
        self.broker.publish(*events)

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        size = len(value or b"") + sum(len(name) + len(text or b"") for name, text in headers)
        if size > self.limit:
            raise EventTooLargeError(topic, size, self.limit)
        self.broker.put(topic, value, key=key, headers=headers)


class RunningWorker:
    """A worker under way, with what it works on."""

    def __init__(self, worker: ServiceWorker, broker: FakeBroker, consumer: FakeConsumer) -> None:
        self.worker = worker
        self.broker = broker
        self.consumer = consumer
        self.task = asyncio.create_task(worker.run())

    async def until(self, condition: Callable[[], bool], seconds: float = 3_600) -> None:
        """Wait, in virtual time."""
        async with asyncio.timeout(seconds):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.05)

    async def crash(self) -> None:
        """It is gone without a word, as far as the broker is concerned."""
        doomed = {self.task, *self.worker._pipeline.tasks}
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)


@asynccontextmanager
async def running(
    dispatcher: EventDispatcher,
    broker: FakeBroker,
    publisher: FakePublisher | None = None,
    *,
    replay: Any = None,
    **service: Any,
) -> AsyncIterator[RunningWorker]:
    """A worker that consumes `broker` until the block is left; then it drains.  `replay`: a `ReplaySettings`."""
    consumer = FakeConsumer(broker)
    worker = ServiceWorker(
        "billing",
        dispatcher,
        publisher or FakePublisher(broker),
        KafkaSettings(),
        ServiceSettings(**service),
        replay=replay,
        consumer=lambda settings, group: consumer,
    )
    under_way = RunningWorker(worker, broker, consumer)
    try:
        yield under_way
    finally:
        worker.stop()
        _, hanging = await asyncio.wait({under_way.task}, timeout=3_600)
        assert not hanging, "told to stop, it goes on"
    if not under_way.task.cancelled():
        under_way.task.result()
