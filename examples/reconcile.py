"""Find out whether an earlier attempt has charged the card: `python -m examples.reconcile`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, Platform, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from integr8s_idem.runtime import ServiceGroup


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


charges: list[str] = []
"""The charges at the bank, which accepts no idempotency key."""
pending = {"2"}
"""Orders whose charges the bank does not show yet."""
answers: list[str] = []

router = EventRouter()


async def find_charge(event: OrderPlaced) -> Answer:
    answer: Answer = Done("found") if event.order_id in charges else NotDone()
    if event.order_id in pending:
        pending.remove(event.order_id)
        answer = Unknown(retry_after=0.5, reason="the bank has not booked it yet")
    answers.append(f"{event.order_id}: {type(answer).__name__}")
    return answer


@router.on(OrderPlaced, reconcile=find_charge)
async def charge(event: OrderPlaced) -> str:
    if event.order_id == "3" and not answers.count("3: NotDone"):
        raise ConnectionError("the request was lost")
    charges.append(event.order_id)
    if event.order_id in ("1", "2"):
        raise ConnectionError("the response was lost")
    return "charged"


platform = Platform(
    Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


async def main() -> None:
    async with embedded() as servers:
        settings = Settings.model_validate(
            {
                **servers.settings(),
                "services": {"billing": {"ordering": "none", "retry_initial_seconds": 0.01, "retry_max_seconds": 0.1}},
                "telemetry": {"spans": "off", "metrics_enabled": False},
            }
        )
        publisher = EventPublisher(settings.kafka)
        await publisher.publish(*(OrderPlaced(order_id=str(number)) for number in range(4)))
        await publisher.close()
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        while group.reports()[0].tally.handled < 4 and not running.done():
            await asyncio.wait({running}, timeout=0.05)
        tally = group.reports()[0].tally
        group.stop()
        await running
    print(f"{tally.handled} handled, {tally.reconciled} of them without another run; charged: {sorted(charges)}")
    print(", ".join(sorted(answers)))


if __name__ == "__main__":
    asyncio.run(main())
