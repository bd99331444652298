"""Records of the Redis store as bytes: with a check that holds, in the older format, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import xor

HEADER = 18
CHECKED_HEADER = 22


def checked(header: bytes) -> bytes:
    """The first 18 bytes of `header`, with the check that Lua would put behind them."""
    words = (int.from_bytes(header[at : min(at + 4, HEADER)], "big") for at in range(0, HEADER, 4))
    return header[:HEADER] + reduce(xor, words).to_bytes(4, "big")


def changed(record: bytes, at: int, new: bytes) -> bytes:
    """`record` with `new` from the place `at` of its header, as if it had been written so."""
    header = record[:at] + new + record[at + len(new) : HEADER]
    return checked(header) + record[CHECKED_HEADER:]


def unchecked(record: bytes) -> bytes:
    """The same record in format 1, which had no checks."""
    behind = CHECKED_HEADER + (16 if record[2] & 1 else 0) + (24 if record[2] & 2 else 0)
    return b"\1" + record[1:HEADER] + record[CHECKED_HEADER:behind] + record[behind + 8 :]


def flips(raw: bytes) -> Iterator[bytes]:
    """`raw` with each of its bits the other way round, one at a time."""
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
