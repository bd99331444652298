"""Map keys to buckets of a Redis Cluster.  Pure.

A cluster runs a script only on keys of a single slot, of 16 384.  Keys are therefore grouped in buckets, and
each bucket is one slot: the record of `KEY` is stored as `{idem:17}KEY`.  Buckets are spread evenly over
the slots, so that nodes with equal shares of slots have equal shares of buckets.

The number of buckets must never change: existing records would not be found.
"""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import Final

SLOTS: Final = 16_384
BUCKETS: Final = 128
"""Few enough that keys of a batch share calls, enough to balance a cluster of dozens of nodes."""
_SHIFT: Final = 7
"""Shifts a slot to its bucket: each bucket covers 128 slots."""


def slot_of(name: bytes) -> int:
    """Return the slot of a name or hash tag, as Redis computes it."""
    return crc_hqx(name, 0) & (SLOTS - 1)


def bucket_of(key: str) -> int:
    """Return the bucket of `key`, 0 to 127."""
    return slot_of(key.encode()) >> _SHIFT


def _tags() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return tag and slot of each bucket: the first number whose tag is in a slot of that bucket."""
    found: dict[int, tuple[str, int]] = {}
    for number in count():
        tag = f"idem:{number}"
        slot = slot_of(tag.encode())
        found.setdefault(slot >> _SHIFT, (f"{{{tag}}}", slot))
        if len(found) == BUCKETS:
            break
    return tuple(found[bucket][0] for bucket in range(BUCKETS)), tuple(found[bucket][1] for bucket in range(BUCKETS))


TAGS, BUCKET_SLOTS = _tags()
"""By bucket: the hash tag that its keys start with, and its slot."""


def stored_name(key: str) -> str:
    """Return the Redis key under which the cluster stores the record of `key`."""
    return TAGS[bucket_of(key)] + key


def key_of(name: str) -> str:
    """Return the key of a stored name; the inverse of `stored_name`."""
    return name[name.find("}") + 1 :]
