"""What a real shop has elsewhere: a payment company, and a list of what was paid.  Here both are fakes."""

from __future__ import annotations

from decimal import Decimal

from pydantic import BaseModel


class Receipt(BaseModel):
    """What the payment company answers."""

    id: str


class Payments:
    """A payment company that knows idempotency keys, as the real ones do: equal keys, one charge."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, Decimal]] = []
        """Order and amount of every charge that was made."""
        self._receipts: dict[str, Receipt] = {}

    async def charge(self, order_id: str, amount: Decimal, *, idempotency_key: str) -> Receipt:
        """Take `amount` for `order_id`, or answer again what was answered to this key before."""
        if idempotency_key not in self._receipts:
            self.charges.append((order_id, amount))
            self._receipts[idempotency_key] = Receipt(id=f"receipt-{len(self.charges)}")
        return self._receipts[idempotency_key]


class Audit:
    """The paid orders.  Noting one twice changes nothing."""

    def __init__(self) -> None:
        self.paid: dict[str, str] = {}
        """Receipts by order."""

    def note(self, order_id: str, receipt: str) -> None:
        self.paid[order_id] = receipt
