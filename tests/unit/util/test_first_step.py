"""Coroutines of one task in separate contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

import pytest

from integr8s_idem._util.first_step import rest_in_context
from integr8s_idem.testing.virtual_time import virtual_time

T = TypeVar("T")
NAME: ContextVar[str] = ContextVar("name", default="nobody")


async def in_context(context: Context, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which waits for something, in `context`."""
    return await rest_in_context(context, work, context.run(work.send, None))


@virtual_time
async def test_context_variables_set_by_work_stay_in_its_context() -> None:
    async def work(name: str) -> tuple[str, str]:
        before = NAME.get()
        NAME.set(name)
        await asyncio.sleep(1)
        inherited = await asyncio.create_task(reads())
        assert inherited == name
        return before, NAME.get()

    async def reads() -> str:
        return NAME.get()

    NAME.set("me")
    inherited = copy_context()

    assert await in_context(inherited.copy(), work("one")) == ("me", "one")
    assert await in_context(inherited.copy(), work("two")) == ("me", "two")
    assert await in_context(Context(), work("three")) == ("nobody", "three")
    assert NAME.get() == "me"


@virtual_time
async def test_errors_and_cancellations_are_propagated() -> None:
    seen: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    async def cleans_up() -> None:
        NAME.set("mine")
        try:
            await asyncio.sleep(10)
        finally:
            seen.append(NAME.get())
            await asyncio.sleep(1)
            seen.append("clean")

    with pytest.raises(ValueError, match="mine"):
        await in_context(copy_context(), fails())
    task = asyncio.create_task(run_in_context(cleans_up))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert seen == ["mine", "clean"]


async def run_in_context(work: object) -> None:
    assert callable(work)
    await in_context(copy_context(), work())


@virtual_time
async def test_work_may_use_timeouts() -> None:
    async def swallows() -> str:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(10)
        except TimeoutError:
            return "late"
        return "done"

    assert await in_context(copy_context(), swallows()) == "late"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
