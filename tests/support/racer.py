"""One process of a race for keys: `python -m tests.support.racer URL TASKS`, a key a line in, what came of it out.

It asks for each key from many tasks over connections of their own, sleeps until the lease of whoever has
the key ends, and asks again in that moment, until it has the key or finds that another taker has it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from integr8s_idem.records import InProgress, Reserved, ReserveRequest
from integr8s_idem.stores.redis import RedisIdempotencyRepository

LONG = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Wins:
    """The takeovers of one key by one process, as attempt, fence and token of each, and how often it asked."""

    taken: list[tuple[int, int, str]]
    asked: int


async def race(store: RedisIdempotencyRepository, key: str, tasks: int) -> Wins:
    """Ask for a key that is held at attempt 1 until its second attempt has begun."""
    asked = 0

    async def take() -> Reserved | None:
        nonlocal asked
        wish = ReserveRequest(key=key, token=secrets.token_bytes(16), lease=LONG, retention=LONG)
        while True:
            [verdict] = await store.reserve([wish])
            asked += 1
            if isinstance(verdict, Reserved):
                return verdict
            if not isinstance(verdict, InProgress):
                raise AssertionError(f"{key}: {verdict}")
            if verdict.attempt > 1:
                return None
            await asyncio.sleep(verdict.retry_after.total_seconds())

    ends = await asyncio.gather(*(take() for _ in range(tasks)))
    return Wins([(end.attempt, end.fence, end.token.hex()) for end in ends if end is not None], asked)


async def main(url: str, tasks: int) -> None:
    client = Redis.from_url(url)
    store = RedisIdempotencyRepository(client, timeout=LONG)
    await store.ping()
    _tell("ready")
    while key := (await asyncio.to_thread(sys.stdin.readline)).strip():
        wins = await race(store, key, tasks)
        _tell([wins.taken, wins.asked])
    await client.aclose()


def _tell(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
