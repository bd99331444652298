"""A custom loop over aiokafka that processes each record once: `python -m examples.entries.aiokafka_loop`.

Needs the extra `embedded`: its Kafka is an emulator.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.aiokafka import by_header, guarded


async def charge(record: ConsumerRecord[Any, bytes]) -> str:
    order = (record.value or b"").decode()
    print(f"charging {order}")
    return f"receipt of {order}"


async def consume(servers: str, manager: IdempotencyManager, count: int) -> None:
    consumer = AIOKafkaConsumer(
        "orders",
        bootstrap_servers=servers,
        group_id="billing",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        # Closing the loop commits what is done.
        async with aclosing(guarded(consumer, manager, key=by_header("event_id"))) as deliveries:
            async for delivery in deliveries:
                print(await delivery.run(charge))
                count -= 1
                if not count:
                    break
    finally:
        await consumer.stop()
        await manager.close()  # waits for outcomes that the store has not accepted yet


async def produce(servers: str, *orders: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    for order in orders:
        headers = [("event_id", order.encode())]
        await producer.send_and_wait("orders", order.encode(), key=b"customer-1", headers=headers)
    await producer.stop()


async def main() -> None:
    # In production a store that all processes share: integr8s_idem.stores.open_store(settings.store).
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
    async with embedded() as running:
        servers = running.settings()["kafka"]["bootstrap_servers"]
        await produce(servers, "order-7", "order-7", "order-8")
        await consume(servers, manager, 3)


if __name__ == "__main__":
    asyncio.run(main())
