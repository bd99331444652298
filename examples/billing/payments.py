"""Fakes of a payment provider and of the list of paid orders."""

from __future__ import annotations

from decimal import Decimal

from pydantic import BaseModel


class Receipt(BaseModel):
    """The response of the payment provider."""

    id: str


class Payments:
    """A payment provider that charges once per idempotency key, like real ones."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, Decimal]] = []
        """Order and amount of every charge."""
        self._receipts: dict[str, Receipt] = {}

    async def charge(self, order_id: str, amount: Decimal, *, idempotency_key: str) -> Receipt:
        """Charge `amount` for `order_id`, or return the earlier receipt for this key."""
        if idempotency_key not in self._receipts:
            self.charges.append((order_id, amount))
            self._receipts[idempotency_key] = Receipt(id=f"receipt-{len(self.charges)}")
        return self._receipts[idempotency_key]


class Audit:
    """The paid orders.  Recording an order twice has no effect."""

    def __init__(self) -> None:
        self.paid: dict[str, str] = {}
        """Receipts by order."""

    def note(self, order_id: str, receipt: str) -> None:
        self.paid[order_id] = receipt
