"""Await the rest of a coroutine whose first step ran without being awaited.

try:
    waiting_for = work.send(None)
except StopIteration as end:
    result = end.value                      # it never waited for anything
else:
    result = await rest(work, waiting_for)  # in the same task

A coroutine that has a context of its own takes its first step by `context.run(work.send, None)`, and `rest_in_context`.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


async def as_coroutine(work: Awaitable[T]) -> T:
    """Await `work`, any awaitable, in a coroutine, whose first step can run without being awaited."""
    return await work


@types.coroutine
def rest(work: Coroutine[Any, Any, T], waiting_for: object) -> Generator[Any, Any, T]:
    """Await `work`, whose last step returned `waiting_for`, in the task in which that step ran."""
    step: Any
    while True:
        try:
            sent, step = (yield waiting_for), work.send
        except BaseException as error:  # noqa: BLE001  # thrown into `work`
            sent, step = error, work.throw
        try:
            waiting_for = step(sent)
        except StopIteration as end:
            result: T = end.value
            return result


@types.coroutine
def rest_in_context(context: Context, work: Coroutine[Any, Any, T], waiting_for: object) -> Generator[Any, Any, T]:
    """Await the rest of `work` as `rest` does, in the context in which its first step ran.

    Context variables that it sets are not visible outside.
    """
    # As `rest`, which would take longer with another call for each step.
    step: Any
    while True:
        try:
            sent, step = (yield waiting_for), work.send
        except BaseException as error:  # noqa: BLE001  # thrown into `work`
            sent, step = error, work.throw
        try:
            waiting_for = context.run(step, sent)
        except StopIteration as end:
            result: T = end.value
            return result
