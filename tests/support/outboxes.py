"""A database with orders and an outbox, and relays that publish the outbox to an in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import PublishError
from integr8s_idem.events import Message
from integr8s_idem.stores.sql import SqlOutbox, metadata, migrate, sql_engine
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.relay import Relay


class Broker(EventPublisher):
    """Keeps published messages; refuses IDs in `broken`, and all messages while `is_down`."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings())
        self.published: list[Message] = []
        self.broken: set[str] = set()
        self.is_down = False

    async def send_message(self, message: Message) -> None:
        await asyncio.sleep(0)
        if self.is_down or message.event_id in self.broken:
            raise PublishError(message.topic, "the broker is down")
        self.published.append(message)

    def ids(self, key: bytes | None = None) -> list[str]:
        return [one.event_id for one in self.published if key in (None, one.key)]


@asynccontextmanager
async def database_with_orders(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Yield an engine for a database with an empty outbox and an empty table `orders`.  `options`: of the engine."""
    engine = sql_engine(url, **options)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.execute(text("DROP TABLE IF EXISTS orders"))
        await connection.execute(text("CREATE TABLE orders (number INTEGER)"))
    await migrate(engine)
    yield engine
    await engine.dispose()


@asynccontextmanager
async def relays(engine: AsyncEngine, *brokers: Broker) -> AsyncIterator[list[SqlOutbox]]:
    outboxes = [SqlOutbox(engine) for _ in brokers]
    running = [Relay(box, broker, claim_seconds=60) for box, broker in zip(outboxes, brokers, strict=True)]
    tasks = [asyncio.create_task(relay.run()) for relay in running]
    yield outboxes
    for relay, box in zip(running, outboxes, strict=True):
        relay.stop()
        box.notice()
    await asyncio.gather(*tasks)
