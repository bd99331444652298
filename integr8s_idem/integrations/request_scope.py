"""REQUEST scopes that end with an error of their own, such as a commit that the database refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dishka import AsyncContainer
from dishka.exceptions import ExitError


@asynccontextmanager
async def scope_of_a_call(opening: AbstractAsyncContextManager[AsyncContainer]) -> AsyncIterator[AsyncContainer]:
    """The scope, whose errors are told as what they are.

    Raises:
        BaseException: What the block raises, even if the scope then cannot be closed.
        Exception: What a provider raises behind its `yield`; several of them as Dishka's `ExitError`.
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
            # The scope's own trouble, such as a refused commit, must not hide why the handler failed.
            raise failed from failed.__cause__ or error
        only = the_only_one(error)
        raise only from only.__cause__


def the_only_one(error: Exception) -> Exception:
    """What went wrong, if it is one thing: Dishka puts even that into a group, and in one more for each outer scope."""
    while isinstance(error, ExitError) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
