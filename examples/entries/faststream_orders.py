"""FastStream subscribers that process each message once: `python -m examples.entries.faststream_orders`.

Needs the extra `faststream`.  It uses FastStream's in-memory test broker; with your own Kafka, run
`faststream run examples.entries.faststream_orders:app`.
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka import ConsumerRecord

try:
    from faststream import AckPolicy, FastStream
    from faststream.kafka import KafkaBroker, TestKafkaBroker
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        raise SystemExit(f"this needs {error.name}: pip install '.[faststream]' in the checkout") from None
    raise

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header

# In production a store that all processes share: integr8s_idem.stores.open_store(settings.store).
manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")


async def to_dead_letters(record: ConsumerRecord[bytes, bytes], error: Exception) -> None:
    print(f"dead letter: {error}")
    headers = {name: value.decode() for name, value in record.headers}
    await broker.publish(record.value, f"{record.topic}.dead", headers={**headers, "error": str(error)})


guard = IdempotencyMiddleware(manager, key=by_header("event_id"), given_up=to_dead_letters)
broker = KafkaBroker("localhost:9092", middlewares=[guard], log_level=logging.DEBUG)
app = FastStream(broker, on_startup=[lambda: guard.check(broker)], after_shutdown=[manager.close])


@broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
@broker.publisher("receipts")
async def charge(order: dict[str, str]) -> dict[str, str]:
    print(f"charging order {order['order_id']}")
    return {"receipt": f"receipt-{order['order_id']}"}


@broker.subscriber("receipts", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
async def send_mail(receipt: dict[str, str]) -> None:
    """Messages published by `charge` have ids derived from the key of its message, so duplicates are recognized."""
    print(f"mail: {receipt['receipt']}")


async def main() -> None:
    async with TestKafkaBroker(broker):
        for _ in range(2):
            await broker.publish({"order_id": "7"}, "orders", headers={"event_id": "e-1"})
        await broker.publish({"order_id": "8"}, "orders", headers={"event_id": "e-2"})
        await broker.publish({"order_id": "9"}, "orders")  # without a key, duplicates cannot be detected


if __name__ == "__main__":
    asyncio.run(main())
