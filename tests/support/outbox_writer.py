"""`python -m tests.support.outbox_writer URL PREFIX LAST KEY...`: plain code that publishes by an outbox.

For each key in turn, it commits orders 0 to LAST - 1 one after the other, each with its event.  The table `placed` says
which are committed, with the ids of their events, so that another process can continue.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql import sql_engine

CREATE = "CREATE TABLE placed (order_key VARCHAR(50) NOT NULL, number INTEGER NOT NULL, event_id VARCHAR(50) NOT NULL)"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    number: int
    note: str = ""


async def place(session: AsyncSession, outbox: Outbox, key: str, last: int, note: str = "") -> bool:
    """Place the next order of `key`, and return whether there was one."""
    count = text("SELECT count(*) FROM placed WHERE order_key = :key")
    number = await session.scalar(count, {"key": key})
    assert number is not None
    if number >= last:
        return False
    async with outbox(session) as out:
        event_id = out.publish(OrderPlaced(number=number, aggregate_id=key, note=note))
    row = {"key": key, "number": number, "id": event_id}
    await session.execute(text("INSERT INTO placed VALUES (:key, :number, :id)"), row)
    return True


async def main(url: str, prefix: str, last: int, keys: list[str]) -> None:
    engine = sql_engine(url, lock_timeout_seconds=20)
    outbox = Outbox(Settings(kafka=KafkaSettings(topic_prefix=prefix)), service="shop")
    while keys:
        for key in list(keys):
            async with AsyncSession(engine) as session, session.begin():
                if not await place(session, outbox, key, last):
                    keys.remove(key)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
