"""With `on_key_reused = "run"`, a message that reuses a key is other work, also for consumers of its answer."""

from __future__ import annotations

from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage, TestKafkaBroker
from pydantic import BaseModel

from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from tests.support.guarded import guarded


class Order(BaseModel):
    number: int


async def test_messages_that_answer_a_reused_key_have_event_ids_of_their_own() -> None:
    here, received = guarded(on_key_reused="run"), dict[int, str | None]()
    broker = KafkaBroker(middlewares=[IdempotencyMiddleware(here.manager, key=by_header("event_id"))])

    @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    @broker.publisher("receipts")
    async def charge(order: Order) -> Order:
        return order

    @broker.subscriber("receipts")
    async def receive(order: Order, message: KafkaMessage) -> None:
        received[order.number] = message.headers.get("event_id")

    async with TestKafkaBroker(broker):
        for number in (1, 2):
            await broker.publish(Order(number=number), "orders", headers={"event_id": "e"})

    assert received.keys() == {1, 2}
    assert None not in received.values()
    assert received[1] != received[2]
