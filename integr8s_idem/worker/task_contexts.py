"""Many pieces of work by one task, each in a context of its own."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def in_context(context: Context, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `work` in `context`, as a task of its own would run it: what it sets there, the next does not see."""
    step: Any = work.send
    told: object = None
    while True:
        try:
            waiting_for = context.run(step, told)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            told, step = (yield waiting_for), work.send
        except BaseException as error:  # noqa: BLE001  # it is for `work` to say what comes of it
            told, step = error, work.throw
