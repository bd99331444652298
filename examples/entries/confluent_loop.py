"""A custom loop over confluent-kafka that processes each message once: `python -m examples.entries.confluent_loop`.

Needs the extra `embedded`: its Kafka is an emulator.
"""

from __future__ import annotations

import asyncio

from confluent_kafka import Consumer, Message, Producer

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.confluent import by_header, guarded


def charge(message: Message) -> str:
    order = (message.value() or b"").decode()
    print(f"charging {order}")
    return f"receipt of {order}"


def consume(servers: str, manager: IdempotencyManager, count: int) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "billing",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["orders"])
    try:
        for delivery in guarded(consumer, manager, key=by_header("event_id")):
            print(delivery.run(charge))
            count -= 1
            if not count:
                break
    finally:
        consumer.close()


def produce(servers: str, *orders: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for order in orders:
        producer.produce("orders", order.encode(), b"customer-1", headers=[("event_id", order.encode())])
    producer.flush()


def work(servers: str) -> None:
    """The main program; no event loop is needed."""
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
    produce(servers, "order-7", "order-7", "order-8")
    consume(servers, manager, 3)


async def main() -> None:
    async with embedded() as running:
        await asyncio.to_thread(work, running.settings()["kafka"]["bootstrap_servers"])


if __name__ == "__main__":
    asyncio.run(main())
