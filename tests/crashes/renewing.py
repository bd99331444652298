"""Run a process that dies during a lease renewal: `python -m tests.crashes.renewing URL FOLDER POINT LEASE`.

It runs work named POINT for longer than a lease, until it kills itself at that crash point.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from redis.asyncio import Redis

from integr8s_idem import Attempt, IdempotencyConfig, IdempotencyManager
from integr8s_idem.engine.work import Work
from integr8s_idem.keys import Key
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint
from tests.support.effects import Effects


def manager_of(client: Redis, lease: float, plan: CrashPlan) -> IdempotencyManager:
    config = IdempotencyConfig(processing_timeout_seconds=lease)
    return IdempotencyManager(config, CrashingStore(RedisIdempotencyRepository(client), plan), scope="billing")


async def main(url: str, folder: Path, point: CrashPoint, lease: float) -> None:
    effects = Effects(folder)

    async def charge(attempt: Attempt) -> str:
        effects.note("begin", point.value, attempt)
        await asyncio.sleep(10 * lease)
        return "never"

    manager = manager_of(Redis.from_url(url), lease, CrashPlan(point))
    await manager.run_work(Work(Key.of(point.value)), charge, returns=charge)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), CrashPoint(sys.argv[3]), float(sys.argv[4])))
