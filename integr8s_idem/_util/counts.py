"""Check arguments that count something."""

from __future__ import annotations


def is_count(number: object) -> bool:
    """Return whether `number` is an integer of at least 1.  `True` is not, although Python counts with it."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
