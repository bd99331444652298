"""Futures whose errors come from other people's code."""

from __future__ import annotations

import asyncio
from typing import Any


def fail_future(future: asyncio.Future[Any], error: BaseException) -> None:
    """End `future`, unless it has ended, with an error of any kind.

    `Future.set_exception` rejects `StopIteration`, and does not cancel.  So a `StopIteration` becomes a
    `RuntimeError`, as in a coroutine that raises it (PEP 479), and a `CancelledError` cancels the future.
    """
    if future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        future.cancel()
    elif isinstance(error, StopIteration):
        wrapped = RuntimeError("a function raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
