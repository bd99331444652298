"""REQUEST scopes that raise the original error if closing them fails, for example if a commit is rejected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dishka import AsyncContainer
from dishka.exceptions import ExitError


@asynccontextmanager
async def scope_of_a_call(opening: AbstractAsyncContextManager[AsyncContainer]) -> AsyncIterator[AsyncContainer]:
    """Open a scope and raise its errors unwrapped.

    Raises:
        BaseException: Any error of the block, even if the scope then fails to close.
        Exception: The error of a provider after its `yield`; several errors are raised as Dishka's `ExitError`.
    """
    failed: BaseException | None = None
    try:
        async with opening as request:
            try:
                yield request
            except BaseException as error:
                failed = error
                raise
    except ExitError as error:
        if failed is not None:
            # A failure to close the scope, such as a rejected commit, must not hide why the handler failed.
            raise failed from failed.__cause__ or error
        original = unwrapped(error)
        raise original from original.__cause__


def unwrapped(error: Exception) -> Exception:
    """Return the only error in `error`.  Dishka wraps even a single error in a group, once more per outer scope."""
    while isinstance(error, ExitError) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
