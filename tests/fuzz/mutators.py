"""Seeded mutators: the same random source creates the same hostile input on every machine."""

from __future__ import annotations

import json
from random import Random
from typing import Any

TEXTS = (
    "", "a", "0", ":", "::", "{}", "{a}", "*", "?", "[", "#", "%", "%3A", ";1", "..", "/", "\\", '"', "'", " ", "a ",
    "\0", "\n", "\r\n", "\t", "\x1b[2J", "\x7f", "\u202e", "\u200b", "\ufeff", "é", "e\u0301", "😀", "\ud800", "\udcff",
    "None", "null", "true", "NaN", "1e999", "order_placed", "event_id", "redis://u:p@h/0", "${jndi:x}", "__proto__",
)  # fmt: skip
"""Characters with a special meaning: separators, globs, escapes, surrogates and bidirectional marks."""

NUMBERS = (0, -0.0, 1, 1.0, -1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400, 1e308, 5e-324, 0.1)
_RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-", b"01", b"1.", b".5", b"'a'", b"undefined", b"/*x*/",
    b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b'"\\ud800"', b'"\\u0000"', b'"\\x"', b"\x00", b",",
    b"]", b"}", b"{", b"[", b'"', b"9" * 5_000, b"[" * 2_000, b'{"a":' * 2_000, b"\\", b":", b"\n", b"null",
    b"{}", b'{"":1,"":2}',
)  # fmt: skip
"""Fragments of invalid or unusual JSON."""


def text(random: Random, longest: int = 4) -> str:
    """Return a text of a few pieces, and sometimes of very many."""
    pieces = [random.choice(TEXTS) for _ in range(random.randint(0, longest))]
    return "".join(pieces) * (random.choice((50, 2_000)) if random.random() < 0.02 else 1)


def value(random: Random, depth: int = 3) -> Any:
    """Return a random JSON value, including NaN."""
    kind = random.randrange(9 if depth else 6)
    match kind:
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2 | 3:
            return random.choice(NUMBERS) if random.random() < 0.9 else random.choice((float("nan"), float("inf")))
        case 4 | 5:
            return text(random)
        case 6:
            return [value(random, depth - 1) for _ in range(random.randint(0, 4))]
        case _:
            return {text(random, 2): value(random, depth - 1) for _ in range(random.randint(0, 4))}


def damaged(random: Random, raw: bytes) -> bytes:
    """Return `raw` with flipped bits, replaced bytes, or parts deleted, duplicated, swapped or inserted."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        raw = _damage(random, raw)
    return raw


def _damage(random: Random, raw: bytes) -> bytes:
    at, end = sorted((random.randint(0, len(raw)), random.randint(0, len(raw))))
    match random.randrange(7):
        case 0 if raw:
            return flipped(raw, random.randrange(8 * len(raw)))
        case 1:
            return raw[:at] + random.randbytes(random.randint(1, 4)) + raw[at + 1 :]
        case 2:
            return raw[:at] + raw[min(end, at + 40) :]
        case 3:
            return raw[:end]
        case 4:
            return raw[:at] + raw[at:end][:200] * random.randint(1, 3) + raw[at:]
        case 5:
            middle = (at + end) // 2
            return raw[:at] + raw[middle:end] + raw[at:middle] + raw[end:]
    return raw[:at] + random.choice(_RAW) + raw[at:]


def flipped(raw: bytes, bit: int) -> bytes:
    """Return `raw` with one bit flipped."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def document(random: Random, table: dict[str, Any]) -> bytes:
    """Return `table` as JSON in a form that producers write, with some names or values changed."""
    table = dict(table)
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        name = random.choice(list(table)) if table and random.random() < 0.8 else text(random, 2)
        if random.random() < 0.25:
            table.pop(name, None)
        else:
            table[name] = value(random)
    if random.random() < 0.3:
        table = {name: table[name] for name in random.sample(list(table), len(table))}
    separators = random.choice((None, (",", ":"), (" ,\n", " : ")))
    written = json.dumps(table, ensure_ascii=random.random() < 0.7, separators=separators)
    raw = written.encode("utf-8", "surrogatepass")
    if random.random() < 0.15:
        name = json.dumps(random.choice(list(table) or [""]))
        raw = raw[:-1] + f", {name}: {json.dumps(value(random))}}}".encode("utf-8", "surrogatepass")
    return raw
