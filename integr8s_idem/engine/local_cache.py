"""Work that this process has completed itself: its duplicates need not be told apart by the store.

Off unless a setting says how many keys to keep.  What is kept here ends before its record does, but for the time that
the machine is suspended, which its clock does not count.  A record that somebody else deletes on purpose is known here
until then.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Final

from integr8s_idem.records import Completed

LARGEST: Final = 1_024
"""Bytes of a result that is kept here; duplicates of work with a larger one ask the store."""


class LocalCache:
    """The last keys that were completed, up to a number of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[str, tuple[float, bytes | None, Completed]] = {}

    def keep(self, done: Completed, fingerprint: bytes | None, begun: float, ttl: timedelta) -> None:
        """`begun`: before the outcome was sent to the store, by this process's monotonic clock (`time.monotonic()`)."""
        if done.result is not None and len(done.result.body) > LARGEST:
            return
        self._kept.pop(done.key, None)  # what is kept anew stands last
        if len(self._kept) >= self._most:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[done.key] = (begun + ttl.total_seconds(), fingerprint, done)

    def look(self, key: str, fingerprint: bytes | None) -> Completed | None:
        """The outcome of `key`, if it is known here, and is that of this payload."""
        found = self._kept.get(key)
        if found is None:
            return None
        until, kept, done = found
        if monotonic() >= until:
            self._kept.pop(key, None)
            return None
        same = fingerprint is None or kept is None or kept == fingerprint
        return done if same else None

    def forget(self, key: str) -> None:
        """It is to be done again."""
        self._kept.pop(key, None)
