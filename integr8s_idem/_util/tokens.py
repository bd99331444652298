"""Tokens of reservations: 16 random bytes each, drawn from the operating system many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import iter_unpack
from typing import Final

TOKEN_BYTES: Final = 16
_AT_ONCE: Final = 256
_drawn: Iterator[tuple[bytes]] = iter(())


def new_token() -> bytes:
    """One that nobody else has, in no thread and no process."""
    global _drawn  # one step of an iterator is atomic: no two threads get the same
    for (drawn,) in _drawn:
        return drawn
    _drawn = fresh = iter_unpack(f"{TOKEN_BYTES}s", os.urandom(TOKEN_BYTES * _AT_ONCE))
    token: bytes = next(fresh)[0]
    return token


def _forget() -> None:
    global _drawn
    _drawn = iter(())


if hasattr(os, "register_at_fork"):  # a child would draw what its parent draws
    os.register_at_fork(after_in_child=_forget)
