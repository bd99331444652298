"""A process that races for keys: `python -m tests.support.racer URL TASKS` reads a key per line and prints the result.

Many tasks with separate connections reserve each key, sleep until the lease of its owner ends, and immediately try
again, until the task has the key or another one does.
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
    """The takeovers of a key by a process, as attempt, fence and token, and the number of its requests."""

    taken: list[tuple[int, int, str]]
    asked: int


async def race(store: RedisIdempotencyRepository, key: str, tasks: int) -> Wins:
    """Try to reserve a key that is held at attempt 1, until its second attempt has started."""
    asked = 0

    async def take() -> Reserved | None:
        nonlocal asked
        request = ReserveRequest(key=key, token=secrets.token_bytes(16), lease=LONG, retention=LONG)
        while True:
            [verdict] = await store.reserve([request])
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
    _print_json("ready")
    while key := (await asyncio.to_thread(sys.stdin.readline)).strip():
        wins = await race(store, key, tasks)
        _print_json([wins.taken, wins.asked])
    await client.aclose()


def _print_json(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
