"""Place an order and deliver it twice, while workers run: `python -m examples.billing.place_order ORDER_ID`."""

from __future__ import annotations

import asyncio
import sys
from decimal import Decimal
from pathlib import Path

from integr8s_idem import EventPublisher, load_settings
from integr8s_idem.errors import IdempotencyError

from .handlers import OrderPlaced

SETTINGS = Path(__file__).with_name("settings.toml")


async def place(order_id: str) -> None:
    """Publish an order twice, like a producer that retries because it missed the broker's acknowledgment."""
    settings = load_settings(SETTINGS)
    publisher = EventPublisher(settings.kafka)
    order = OrderPlaced(order_id=order_id, amount=Decimal("9.90"), aggregate_id=order_id)
    try:
        await publisher.publish(order)
        await publisher.publish(order)
    finally:
        await publisher.close()
    print(f"order {order_id} was published twice to {publisher.topic_of(order.event_type)}")


if __name__ == "__main__":
    try:
        asyncio.run(place(sys.argv[1] if len(sys.argv) > 1 else "1"))
    except IdempotencyError as error:
        sys.exit(str(error))
