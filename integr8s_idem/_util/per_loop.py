"""One object per event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Callable that returns the object of an event loop, created by `make` on first use.

    The object must not reference the loop, or neither is ever freed.
    """

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        self._make = make
        self._objects: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        # Usually the same loop asks, and a dictionary lookup takes three times as long.  Loop and object are in one
        # tuple, since another thread may replace them at any time.
        self._latest: tuple[ref[asyncio.AbstractEventLoop], T] | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop) -> T:
        latest = self._latest
        if latest is not None and latest[0]() is loop:
            return latest[1]
        found = self._objects.get(loop)
        if found is None:
            found = self._objects[loop] = self._make(loop)
        self._latest = ref(loop), found
        return found
