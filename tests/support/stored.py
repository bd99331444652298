"""Encoded records of the Redis store: with a valid checksum, in older formats, and corrupted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import xor
from zlib import crc32

HEADER = 18
CHECKED_HEADER = 22


def checked(header: bytes) -> bytes:
    """Return the first 18 bytes of `header` with the checksum that Lua appends."""
    words = (int.from_bytes(header[at : min(at + 4, HEADER)], "big") for at in range(0, HEADER, 4))
    return header[:HEADER] + reduce(xor, words).to_bytes(4, "big")


def settled(status: int, record: bytes, flags: int, rest: bytes, now_ms: int) -> bytes:
    """Return a record as settle.lua settles it; `rest` follows the fingerprint and trace."""
    kept = record[2] & 3
    extras = record[CHECKED_HEADER : CHECKED_HEADER + (16 if kept & 1 else 0) + (24 if kept & 2 else 0)]
    later = max(now_ms - int.from_bytes(record[5:12], "big") // 1000, 0)
    header = bytes((3, 32 * status + kept + flags)) + record[3:12] + later.to_bytes(5, "big")
    words = (int.from_bytes(header[at : at + 4], "big") for at in range(0, 16, 4))
    return header + (reduce(xor, words) ^ crc32(extras)).to_bytes(4, "big") + extras + rest


def settled_earlier(record: bytes) -> bytes:
    """Return the settled record in the earlier format 2."""
    both = record[1]
    time = (int.from_bytes(record[4:11], "big") // 1000 + int.from_bytes(record[11:16], "big")).to_bytes(6, "big")
    extras = record[20 : 20 + (16 if both & 1 else 0) + (24 if both & 2 else 0)]
    rest = record[20 + len(extras) :] or bytes(4)
    header = checked(bytes((2, both // 32, both % 32)) + record[2:11] + time)
    return header + extras + crc32(extras).to_bytes(4, "big") + rest


def changed(record: bytes, at: int, new: bytes) -> bytes:
    """Return `record` with `new` at offset `at` of its header, and a valid checksum."""
    header = record[:at] + new + record[at + len(new) : HEADER]
    return checked(header) + record[CHECKED_HEADER:]


def unchecked(record: bytes) -> bytes:
    """Return the record in format 1, which has no checksum."""
    behind = CHECKED_HEADER + (16 if record[2] & 1 else 0) + (24 if record[2] & 2 else 0)
    return b"\1" + record[1:HEADER] + record[CHECKED_HEADER:behind] + record[behind + 8 :]


def flips(raw: bytes) -> Iterator[bytes]:
    """Yield `raw` with each of its bits flipped, one at a time."""
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
