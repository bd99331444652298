"""Run several coroutines in one task, each in its own context."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def rest_in_context(context: Context, work: Coroutine[Any, Any, T], waiting_for: object) -> Generator[Any, Any, T]:
    """Await `work`, whose first step ran in `context` and returned `waiting_for`, in the same context and task.

    Context variables that it sets are not visible outside.
    """
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
