"""In-process cache of completed work, which answers duplicates without asking the store.

Disabled unless a setting gives the number of keys.  An entry expires before its record does, except for time that the
machine is suspended, which its clock does not count.  A record that another process, or another manager of this one,
deletes stays in this cache until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from time import monotonic
from typing import Final

from integr8s_idem.records import Completed, is_other_payload

LARGEST: Final = 1_024
"""Maximum size of a cached result in bytes; duplicates of work with a larger result ask the store."""


class LocalCache:
    """A bounded cache of the keys completed last."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._entries: dict[str, tuple[float, bytes | None, Completed]] = {}
        self._forgotten_at = float("-inf")

    def keep(self, done: Completed, fingerprint: bytes | None, begun: float, ttl: timedelta) -> None:
        """Cache an outcome.  `begun`: the time by `time.monotonic()` before the outcome was sent to the store."""
        # The deletion may have removed this outcome.  One time for all keys keeps the memory bounded; the price is that
        # outcomes of other keys that are being written during a deletion are not cached.
        if begun <= self._forgotten_at:
            return
        if done.result is not None and len(done.result.body) > LARGEST:
            return
        self._entries.pop(done.key, None)  # move the key to the end
        if len(self._entries) >= self._max_keys:
            self._entries.pop(next(iter(self._entries)), None)
        self._entries[done.key] = (begun + ttl.total_seconds(), fingerprint, done)

    def look(self, key: str, fingerprint: bytes | None) -> Completed | None:
        """Return the cached outcome of `key` if it belongs to this payload."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        until, cached, done = entry
        if monotonic() >= until:
            self._entries.pop(key, None)
            return None
        return None if is_other_payload(cached, fingerprint) else done

    def forget(self, keys: Iterable[str]) -> None:
        """Remove `keys` after their deletion, and do not cache outcomes whose write has already begun."""
        self._forgotten_at = monotonic()
        for key in keys:
            self._entries.pop(key, None)
