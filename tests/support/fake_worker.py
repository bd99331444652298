"""`ServiceWorker` on an in-memory broker."""

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
    """Publishes messages to an in-memory broker."""

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
    """A running worker with its broker and consumer."""

    def __init__(self, worker: ServiceWorker, broker: FakeBroker, consumer: FakeConsumer) -> None:
        self.worker = worker
        self.broker = broker
        self.consumer = consumer
        self.task = asyncio.create_task(worker.run())

    async def until(self, condition: Callable[[], bool], seconds: float = 3_600) -> None:
        """Wait for `condition`, in virtual time."""
        async with asyncio.timeout(seconds):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.05)

    async def crash(self) -> None:
        """Cancel all tasks, without leaving the group."""
        tasks = {self.task, *self.worker._pipeline.tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def running(
    dispatcher: EventDispatcher,
    broker: FakeBroker,
    publisher: FakePublisher | None = None,
    *,
    replay: Any = None,
    on_first_poll: Any = lambda: None,
    list_topics: Any = None,
    kafka: Any = None,
    **service: Any,
) -> AsyncIterator[RunningWorker]:
    """Run a worker that consumes `broker`, and drain it at the end of the block.

    `replay` is a `ReplaySettings`, `on_first_poll` a function without arguments, `list_topics` that of the worker, and
    `kafka` a `KafkaSettings`.
    """
    consumer = FakeConsumer(broker)
    worker = ServiceWorker(
        "billing",
        dispatcher,
        publisher or FakePublisher(broker),
        kafka or KafkaSettings(),
        ServiceSettings(**service),
        replay=replay,
        consumer=lambda settings, group: consumer,
        on_first_poll=on_first_poll,
        list_topics=list_topics,
    )
    running_worker = RunningWorker(worker, broker, consumer)
    try:
        yield running_worker
    finally:
        worker.stop()
        _, hanging = await asyncio.wait({running_worker.task}, timeout=3_600)
        assert not hanging, "the worker does not stop"
    if not running_worker.task.cancelled():
        running_worker.task.result()
