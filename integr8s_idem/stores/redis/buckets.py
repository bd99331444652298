"""Where a Redis Cluster keeps a record.  Pure.

A cluster runs a script only on keys of one of its 16 384 slots.  Keys are therefore gathered in buckets,
each of which is one slot: `{idem:17}KEY` is where `KEY` is kept.  The slot of a bucket is spread evenly over
all slots, so that nodes with equal shares of slots have equal shares of buckets.

The number of buckets is part of where a record is: with another one, no record is found again.
"""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import Final

SLOTS: Final = 16_384
BUCKETS: Final = 128
"""Few enough that keys of a batch share calls, enough that a cluster of dozens of nodes is in balance."""
_SHIFT: Final = 7
"""From a slot to its bucket: each has as many slots as there are buckets."""


def slot_of(name: bytes) -> int:
    """The slot of a name or hash tag, as Redis counts it."""
    return crc_hqx(name, 0) & (SLOTS - 1)


def bucket_of(key: str) -> int:
    """0 to 127."""
    return slot_of(key.encode()) >> _SHIFT


def _tags() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """For each bucket the first number whose tag has a slot of that bucket."""
    found: dict[int, tuple[str, int]] = {}
    for number in count():
        tag = f"idem:{number}"
        slot = slot_of(tag.encode())
        found.setdefault(slot >> _SHIFT, (f"{{{tag}}}", slot))
        if len(found) == BUCKETS:
            break
    return tuple(found[bucket][0] for bucket in range(BUCKETS)), tuple(found[bucket][1] for bucket in range(BUCKETS))


TAGS, BUCKET_SLOTS = _tags()
"""By bucket: what its keys start with, and its slot."""


def stored_name(key: str) -> str:
    """What the cluster calls the record of `key`."""
    return TAGS[bucket_of(key)] + key


def key_of(name: str) -> str:
    """What `stored_name` was made of."""
    return name[name.find("}") + 1 :]
