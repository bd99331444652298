"""Wait for conditions instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONGEST_WAIT = 60.0
"""Seconds; generous, since the machine may be busy. A passing test never waits this long."""


async def eventually(
    fact: Callable[[], object], *, within: float = LONGEST_WAIT, state: Callable[[], object] | None = None
) -> None:
    """Return once `fact()` is true; fail with `state()` after `within` seconds."""
    give_up_at = time.monotonic() + within
    while not fact():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"the condition was not true within {within:g} s{f': {state()}' if state else ''}")
        await asyncio.sleep(0.02)


def wait_until(
    fact: Callable[[], object], *, within: float = LONGEST_WAIT, state: Callable[[], object] | None = None
) -> None:
    """Wait like `eventually`, in tests without an event loop."""
    give_up_at = time.monotonic() + within
    while not fact():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"the condition was not true within {within:g} s{f': {state()}' if state else ''}")
        time.sleep(0.05)
