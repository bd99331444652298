"""Races for one key at the moment its lease ends: many tasks in several processes, on a real Redis."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from msgspec import structs

from integr8s_idem.records import (
    Completed,
    Completion,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoredResult,
    Verdict,
)
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.support.redis import RedisServer

PROCESSES: Final = 4
TASKS: Final = 25
"""Concurrent `reserve` calls in each process."""
LIFE: Final = timedelta(minutes=5)


def run(first: int, count: int) -> Figures:
    """Run the rounds numbered `first` to `first + count - 1`."""
    with RedisServer() as server:
        return asyncio.run(_rounds(server, range(first, first + count)))


async def _rounds(server: RedisServer, numbers: range) -> Figures:
    figures = Figures(lost=0, repeats=0)
    client = server.client()
    store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=60))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        racers = [await stack.enter_async_context(_racer(server.url)) for _ in range(PROCESSES)]
        for number in numbers:
            figures.update(await _round(store, racers, number))
    return figures


async def _round(store: RedisIdempotencyRepository, racers: list[Process], number: int) -> Figures:
    """Let the lease of a first owner end, race for its key, and check the writes of both owners."""
    rng = random.Random(number)
    key = f"race:{number}"
    first = await _reserve(store, key, timedelta(milliseconds=rng.randint(1, 60)))
    if not isinstance(first, Reserved):
        raise ViolationError(f"round {number}: a new key was answered with {first}")
    answers = await asyncio.gather(*(_race(racer, key) for racer in racers))
    winners = [winner for winners, _ in answers for winner in winners]
    if [attempt for attempt, _, _ in winners] != [2] or winners[0][1] <= first.fence:
        raise ViolationError(f"round {number}: {winners} took over from fence {first.fence}")
    second = structs.replace(first, attempt=2, fence=winners[0][1], token=bytes.fromhex(winners[0][2]))
    await _check_writes(store, first, second, number)
    return Figures(rounds=1, asked=sum(asked for _, asked in answers), takeovers=1)


async def _check_writes(store: RedisIdempotencyRepository, first: Reserved, second: Reserved, number: int) -> None:
    """Check that the first owner's writes are rejected before and after the second owner completes."""
    result = StoredResult(b'"the second"')
    await _check_stale_writes(store, first, number)
    if await store.complete([Completion(reservation=second, ttl=LIFE, result=result)]) != [True]:
        raise ViolationError(f"round {number}: the owner cannot complete")
    await _check_stale_writes(store, first, number)
    late = await _reserve(store, first.key, LIFE)
    if not isinstance(late, Completed) or late.result != result:
        raise ViolationError(f"round {number}: a late reserve was answered with {late}")


async def _check_stale_writes(store: RedisIdempotencyRepository, first: Reserved, number: int) -> None:
    before = await _record(store, first.key)
    answers = [
        *await store.complete([Completion(reservation=first, ttl=LIFE, result=StoredResult(b'"the first"'))]),
        *await store.fail([Failure(reservation=first, ttl=LIFE, error="the first")]),
        *await store.renew([first], LIFE),
        *await store.release([first]),
    ]
    after = await _record(store, first.key)
    if any(answers) or before != after:
        raise ViolationError(f"round {number}: a stale owner got {answers}; {before} became {after}")


async def _record(store: RedisIdempotencyRepository, key: str) -> IdempotencyRecord | None:
    """Return the record without its expiry, which is computed from a remaining ttl in whole milliseconds."""
    [record] = await store.get([key])
    return None if record is None else replace(record, expires_at=None)


async def _reserve(store: RedisIdempotencyRepository, key: str, lease: timedelta) -> Verdict:
    token = random.randbytes(16)
    [verdict] = await store.reserve([ReserveRequest(key=key, token=token, lease=lease, retention=LIFE)])
    return verdict


@asynccontextmanager
async def _racer(url: str) -> AsyncIterator[Process]:
    """Start a process that races for the keys on its standard input, and exits at end of input."""
    command = (sys.executable, "-m", "tests.support.racer", url, str(TASKS))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert await _line(process) == "ready"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _race(racer: Process, key: str) -> Any:
    assert racer.stdin is not None
    racer.stdin.write(f"{key}\n".encode())
    return await _line(racer)


async def _line(racer: Process) -> Any:
    assert racer.stdout is not None
    line = await asyncio.wait_for(racer.stdout.readline(), 60)
    if not line:
        raise RuntimeError(f"a racer exited with status {await racer.wait()}")
    return json.loads(line)


CAMPAIGN = Campaign(
    name="races",
    counts="rounds",
    says=f"{PROCESSES * TASKS} tasks in {PROCESSES} processes race for one key at the moment its lease ends, on Redis",
    scenarios=(8, 9),
    in_test=100,
    target=5_000,
    batch=500,
    run=run,
)
