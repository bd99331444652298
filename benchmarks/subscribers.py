"""What does the guard of a FastStream subscriber cost, compared with the same subscriber without it?

Both commit the offset of each message after it is handled, as the guard demands.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from aiokafka import AIOKafkaProducer
from faststream import AckPolicy

from benchmarks.contestants import ensure
from benchmarks.kafka import ACK_ONE_IN, EVENTS, Handler, OrderPlaced, Topic, filled_topic, new_scope, subscribe
from benchmarks.measuring import Flat
from benchmarks.rounds import Comparison, Measured, Options, Progress, Turn, compare
from integr8s_idem import IdempotencyConfig, IdempotencyManager
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from integr8s_idem.records import IdempotencyStatus

KEYS: Final = ("faststream_guarded",)
POLICY: Final = AckPolicy.NACK_ON_ERROR
REPEATED: Final = 100
"""Number of events that are sent twice, to check that duplicates are blocked."""


class Guarded:
    """Guarded subscribers of a topic."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    @asynccontextmanager
    async def _middleware(self, handler: Handler) -> AsyncIterator[IdempotencyMiddleware]:
        """Guard `handler` in a new scope; afterwards all that it has handled must be recorded."""
        manager = IdempotencyManager(IdempotencyConfig(), self._topic.repository, scope=new_scope())
        try:
            yield IdempotencyMiddleware(manager, key=by_header("event_id"))
        finally:
            await manager.close()
        records = self._topic.repository.scan(manager.space.root)
        completed = sum([record.status is IdempotencyStatus.COMPLETED async for record in records])
        ensure(completed == handler.handled, f"{handler.handled} handled, {completed} recorded")

    async def read(self, _: float) -> Measured:
        """Read new events."""
        handler = Handler(self._topic.events // ACK_ONE_IN)
        async with self._middleware(handler) as guard:
            return await subscribe(self._topic.kafka.bootstrap, self._topic.name, handler, POLICY, [guard])

    async def check_duplicates_are_refused(self) -> None:
        """Raise AssertionError unless events that are sent twice are handled once."""
        name = f"{self._topic.name}.twice"
        await self._topic.kafka.create_topics({name: 1})
        order = partial(OrderPlaced, customer_id="customer", total_cents=100)
        orders = [order(order_id=f"order-{number}") for number in range(REPEATED)]
        async with AIOKafkaProducer(bootstrap_servers=self._topic.kafka.bootstrap) as producer:
            for event in (*orders, *orders, order(order_id="the last one")):
                await producer.send_and_wait(name, encode_event(event), headers=event_headers(event))
        # The messages of a partition are handled in order: after the last one no duplicate can follow.
        handler = Handler(REPEATED + 1)
        seen: list[str] = []

        async def handle(event: OrderPlaced) -> None:
            seen.append(event.order_id)
            handler.handled += 1
            if event.order_id == "the last one":
                handler.finished.set()

        handler.begin()
        handler.handle = handle  # type: ignore[method-assign]
        async with self._middleware(handler) as guard:
            await subscribe(self._topic.kafka.bootstrap, name, handler, POLICY, [guard])
        ensure(seen == [*(event.order_id for event in orders), "the last one"], f"a duplicate got through: {seen}")


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with filled_topic(int(EVENTS * options.seconds), progress) as (topic, env):
        guarded = Guarded(topic)
        progress("checking that every duplicate is blocked")
        await guarded.check_duplicates_are_refused()
        turns: dict[str, Turn] = {
            "faststream_guarded": guarded.read,
            "faststream_nack": partial(topic.faststream, policy=POLICY, one_in=ACK_ONE_IN),
        }
        figures = {"faststream_guarded": ("faststream_guarded", "faststream_nack")}
        results = await compare(Comparison("subscriber", turns, figures), options, progress)
        return results | {"subscribers.server": topic.server(env)}
