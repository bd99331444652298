"""Events and handlers, independent of Kafka and of the guard."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from dishka import FromDishka

from integr8s_idem import Attempt, BaseEvent, EventRouter, Outgoing

from .payments import Audit, Payments, Receipt


class OrderPlaced(BaseEvent):
    """A customer has ordered."""

    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    amount: Decimal


class OrderPaid(BaseEvent):
    """The card was charged."""

    event_type: Literal["order_paid"] = "order_paid"
    order_id: str
    receipt: str


router = EventRouter()
audit_router = EventRouter()


@router.on(OrderPlaced)
async def charge(
    event: OrderPlaced,
    payments: FromDishka[Payments],
    attempt: FromDishka[Attempt],  # attempt.number, attempt.fence, attempt.deadline, attempt.key_for("charge")
    outgoing: FromDishka[Outgoing],
) -> Receipt:
    """Charge the card, once per order."""
    receipt = await payments.charge(event.order_id, event.amount, idempotency_key=attempt.key_for("charge"))
    outgoing.publish(OrderPaid(order_id=event.order_id, receipt=receipt.id))  # published after success
    return receipt  # stored, and returned for duplicates


@audit_router.on(OrderPaid)
async def note_payment(event: OrderPaid, audit: FromDishka[Audit]) -> None:
    """Record a payment. This is repeatable by nature, so the service needs no guard."""
    audit.note(event.order_id, event.receipt)
