"""A process that runs the work `order:1` once: `python -m tests.support.contender URL FOLDER LEASE SECONDS`.

It prints the time of its wall clock, runs or waits for the work, and prints the result. The work takes SECONDS and is
recorded in the journal of `Effects(FOLDER)`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from redis.asyncio import Redis

from integr8s_idem import Attempt, IdempotencyConfig, IdempotencyManager
from integr8s_idem.engine.work import Work
from integr8s_idem.keys import Key
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.support.effects import Effects


async def main(url: str, folder: Path, lease: float, seconds: float) -> None:
    effects = Effects(folder)
    client = Redis.from_url(url)
    config = IdempotencyConfig(processing_timeout_seconds=lease)
    manager = IdempotencyManager(config, RedisIdempotencyRepository(client), scope="billing")

    async def charge(attempt: Attempt) -> str:
        effects.note("begin", "order:1", attempt)
        await asyncio.sleep(seconds)
        effects.apply("order:1", attempt)
        return f"receipt of {os.getpid()}"

    _print_line(f"{time.time():.0f}")
    work = Work(Key.of("order:1"))
    _print_line(await manager.run_work(work, charge, returns=charge, wait_timeout=timedelta(minutes=1)))
    await manager.close()
    await client.aclose()


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
