from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.errors import PublishError
from services.background import every


async def test_the_sweep_continues_after_the_broker_was_down(caplog: pytest.LogCaptureFixture) -> None:
    rounds = asyncio.Queue[int]()
    count = 0

    async def sweep() -> None:
        nonlocal count
        count += 1
        rounds.put_nowait(count)
        if count == 1:
            raise PublishError("a topic", "the broker is down")

    sweeping = asyncio.create_task(every(0.001, sweep))
    assert [await rounds.get() for _ in range(3)] == [1, 2, 3]
    sweeping.cancel()
    await asyncio.wait([sweeping])

    assert "the broker is down" in caplog.text


async def test_a_bug_in_a_sweep_is_raised() -> None:
    async def sweep() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        await every(0.001, sweep)
