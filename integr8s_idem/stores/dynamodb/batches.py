"""Run one request per key, with limited concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def map_concurrently(
    items: Sequence[ItemT], key_of: Callable[[ItemT], str], call: Callable[[ItemT], Awaitable[ResultT]], limit: int
) -> list[ResultT]:
    """Call `call` for each item and return the results in order, up to `limit` concurrently and one at a time per key.

    The first error cancels all other calls.
    """
    if len(items) == 1:
        return [await call(items[0])]
    by_key: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        by_key.setdefault(key_of(item), []).append(index)
    results: dict[int, ResultT] = {}
    pending = iter(by_key.values())

    async def work() -> None:
        for indexes in pending:
            for index in indexes:
                results[index] = await call(items[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(by_key))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [results[index] for index in range(len(items))]
