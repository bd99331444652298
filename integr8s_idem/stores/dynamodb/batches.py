"""Many keys, one request each, so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")


async def each(
    asks: Sequence[AskT], key_of: Callable[[AskT], str], ask: Callable[[AskT], Awaitable[AnswerT]], most: int
) -> list[AnswerT]:
    """The answers to `asks`, in their order: up to `most` at once, one after the other for one key.

    The first error ends the whole; what was under way is cancelled.
    """
    if len(asks) == 1:
        return [await ask(asks[0])]
    of_key: dict[str, list[int]] = {}
    for index, one in enumerate(asks):
        of_key.setdefault(key_of(one), []).append(index)
    answers: dict[int, AnswerT] = {}
    waiting = iter(of_key.values())

    async def work() -> None:
        for indexes in waiting:
            for index in indexes:
                answers[index] = await ask(asks[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most, len(of_key))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [answers[index] for index in range(len(asks))]
