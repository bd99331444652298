"""Tokens of reservations: 16 random bytes each, read from the operating system in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from struct import iter_unpack
from typing import Final

TOKEN_BYTES: Final = 16
_BATCH: Final = 256
_drawn: Iterator[tuple[bytes]] = iter(())


def new_token() -> bytes:
    """Return a token that is unique across threads and processes."""
    global _drawn  # advancing an iterator is atomic, so threads never get the same token
    for (drawn,) in _drawn:
        return drawn
    _drawn = fresh = iter_unpack(f"{TOKEN_BYTES}s", os.urandom(TOKEN_BYTES * _BATCH))
    token: bytes = next(fresh)[0]
    return token


def iter_tokens(count: int) -> Iterator[bytes]:
    """Return an iterator over that many tokens."""
    drawn = os.urandom(TOKEN_BYTES * count)
    return iter([drawn[start : start + TOKEN_BYTES] for start in range(0, len(drawn), TOKEN_BYTES)])


def _forget() -> None:
    global _drawn
    _drawn = iter(())


if hasattr(os, "register_at_fork"):  # otherwise a child process would use the tokens of its parent
    os.register_at_fork(after_in_child=_forget)
