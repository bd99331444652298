"""Objects of which each event loop has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Returns the object of an event loop, which `make` makes when it is asked for first.

    The object must not refer to the loop, or neither is ever freed.
    """

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        self._make = make
        self._of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        # Nearly always the same loop asks: a look into the dictionary takes three times as long.  Both in one tuple,
        # since another thread may replace them at any time.
        self._latest: tuple[ref[asyncio.AbstractEventLoop], T] | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop) -> T:
        latest = self._latest
        if latest is not None and latest[0]() is loop:
            return latest[1]
        found = self._of_loops.get(loop)
        if found is None:
            found = self._of_loops[loop] = self._make(loop)
        self._latest = ref(loop), found
        return found
