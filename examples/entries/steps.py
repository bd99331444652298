"""A run that fails halfway continues where it stopped: `python -m examples.entries.steps`.  Needs no server."""

from __future__ import annotations

import asyncio

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository


class Inventory:
    async def reserve(self, order_id: str) -> str:
        print(f"reserving the goods of order {order_id}")
        return f"shelf 12, order {order_id}"


class Carrier:
    def __init__(self) -> None:
        self.asked = 0

    async def book(self, goods: str) -> str:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("the carrier does not answer")
        return f"a van for {goods}"


async def main() -> None:
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="fulfilment")
    inventory, carrier = Inventory(), Carrier()

    async def fulfil() -> str:
        steps = manager.steps()  # in a handler: steps: FromDishka[Steps]
        goods = await steps.run("reserve", inventory.reserve, "7")
        return await steps.run("book", carrier.book, goods)

    try:
        await manager.run("order:7", fulfil)
    except ConnectionError as error:
        print(error)
    print(await manager.run("order:7", fulfil))  # the reservation is not repeated


if __name__ == "__main__":
    asyncio.run(main())
