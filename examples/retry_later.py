"""Charge orders while one of them waits for a later retry: `python -m examples.retry_later`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, Platform, RetryAfter, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup


class ChargeRequested(BaseEvent):
    event_type: Literal["charge_requested"] = "charge_requested"
    number: int


router = EventRouter()
declined = {1}
charged: list[int] = []


@router.on(ChargeRequested, delayed_retries="overtake")
async def charge(event: ChargeRequested) -> None:
    if event.number in declined:
        declined.remove(event.number)
        raise RetryAfter(timedelta(seconds=2), "the payment gateway is down")
    charged.append(event.number)


platform = Platform(
    Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


async def main() -> None:
    async with embedded() as servers:
        settings = Settings.model_validate(
            {
                **servers.settings(),
                "services": {"billing": {"retry_topics": ["2s", "10m"]}},
                "telemetry": {"spans": "off", "metrics_enabled": False},
            }
        )
        publisher = EventPublisher(settings.kafka)
        await publisher.publish(*(ChargeRequested(number=number, aggregate_id="cart") for number in (1, 2, 3)))
        await publisher.close()
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        while len(charged) < 3 and not running.done():
            await asyncio.wait({running}, timeout=0.05)
        group.stop()
        await running
    print(f"charged in this order: {', '.join(map(str, charged))}")


if __name__ == "__main__":
    asyncio.run(main())
