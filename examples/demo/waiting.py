"""Wait for other processes by polling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

LOOK_SECONDS: Final = 0.05


async def until(fact: Callable[[], Awaitable[bool]]) -> None:
    """Return once `fact()` is true."""
    while not await fact():  # noqa: ASYNC110  # other processes cannot set an event
        await asyncio.sleep(LOOK_SECONDS)
