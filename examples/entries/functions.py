"""Functions that do their work once per key: `python -m examples.entries.functions`.  Needs no server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository, idempotent
from integr8s_idem.errors import KeyReusedError

manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")


@dataclass
class Refund:
    number: int
    amount: Decimal


@idempotent(key="refund:{order_id}", fingerprint=["amount"], manager=manager)
async def refund(order_id: str, amount: Decimal) -> Refund:
    print(f"paying {amount} back for order {order_id}")
    await asyncio.sleep(0.01)
    return Refund(1, amount)


@idempotent(key="invoice:{order_id}", manager=manager)
def write_invoice(order_id: str) -> str:
    """Synchronous functions are supported as well."""
    print(f"writing the invoice of order {order_id}")
    return f"invoice-{order_id}.pdf"


async def main() -> None:
    first, duplicate = await asyncio.gather(refund("7", Decimal(30)), refund("7", Decimal(30)))
    print(first == duplicate, duplicate)
    try:
        await refund("7", Decimal(40))
    except KeyReusedError:
        print("another amount for the same order is refused")
    for _ in range(2):
        print(await asyncio.to_thread(write_invoice, "7"))


if __name__ == "__main__":
    asyncio.run(main())
