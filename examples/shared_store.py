"""Two processes share the records of one Redis: `python -m examples.shared_store`.  Starts its own Redis."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import aclosing

from integr8s_idem import IdempotencyManager
from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.embedded import embedded
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client


async def refund() -> str:
    print(f"{os.environ['NAME']}: refunding order 7", flush=True)
    return "refund-1"


async def serve(url: str) -> None:
    """Do what each process does."""
    async with aclosing(redis_client(RedisStoreSettings(url=url))) as client:
        store = RedisIdempotencyRepository(client)
        await store.ping()
        manager = IdempotencyManager(repository=store, scope="billing")
        try:
            receipt = await manager.run("refund:7", refund)
            print(f"{os.environ['NAME']}: {receipt}", flush=True)
        finally:
            await manager.close()


async def main() -> None:
    async with embedded() as servers:
        assert servers.redis_url is not None
        for name in ("first", "second"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "examples.shared_store", servers.redis_url, env={**os.environ, "NAME": name}
            )
            if await process.wait():
                sys.exit(1)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]) if len(sys.argv) > 1 else main())
