"""Contestants with the native code of `speedups/`, if it is installed; all others use Python code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from benchmarks.rounds import Measured, Turn
from integr8s_idem._util import speedups

NATIVE: Final = speedups.LOADED.native
"""The native code, which only the contestants that are called so use; `None` if it is not installed."""


@contextmanager
def native_code() -> Iterator[None]:
    """Use the native code."""
    with patch.object(speedups, "native", NATIVE):
        yield


def with_native_code(turn: Turn) -> Turn:
    """Use the native code during a turn."""

    async def native(seconds: float) -> Measured:
        with native_code():
            return await turn(seconds)

    return native
