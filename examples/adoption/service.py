"""The same consumer as a service.  Its mode, observe or enforce, is a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json

from examples.adoption.consumer import GROUP, TOPIC
from examples.adoption.payments import charge
from integr8s_idem import BaseEvent, EventRouter, Platform, Service
from integr8s_idem.codecs import Headers, header
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    number: str
    cents: int


class OrderCodec:
    """Reads the messages as they are: a JSON body, and the id in a header."""

    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        return {**from_json(body), "event_type": "order_placed", "event_id": header(headers, "id")}


router = EventRouter()


@router.on(OrderPlaced)
async def charge_order(event: OrderPlaced) -> None:
    await charge(event.number, event.cents)


platform = Platform(
    Service(
        "billing",
        topics=[TOPIC],
        group_id=GROUP,
        providers=[
            IdempotencyProvider(),
            KafkaProvider(),
            IdempotentDispatcherProvider(router, codec=OrderCodec()),
        ],
    )
)
