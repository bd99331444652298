"""The existing consumer: a loop over aiokafka, without the library."""

from __future__ import annotations

import json
from typing import Any

from aiokafka import AIOKafkaConsumer

from examples.adoption.payments import charge

TOPIC = "orders"
GROUP = "billing"


async def consume(servers: str, count: int) -> None:
    """Charge the orders in the next `count` messages."""
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=servers,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        for _ in range(count):
            record: Any = await consumer.getone()
            order = json.loads(record.value)
            await charge(order["number"], order["cents"])
            await consumer.commit()
    finally:
        await consumer.stop()
