"""The smallest example, without a server or a container: `python examples/first_minute.py`"""

import asyncio

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository


async def main() -> None:
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")

    async def charge() -> str:
        print("charging the card")
        return "receipt-1"

    print(await manager.run("order:1", charge))  # charging the card, receipt-1
    print(await manager.run("order:1", charge))  # receipt-1, and nothing is charged


asyncio.run(main())
