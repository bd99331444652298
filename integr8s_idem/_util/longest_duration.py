"""The longest duration that stores keep: databases cannot represent all durations of Python."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

LONGEST: Final = timedelta(days=36_500)
"""A longer delay, lease or lifetime of a record counts as this century."""


def limited(length: timedelta) -> timedelta:
    """Return `length`, limited to a range from zero to a century, so that two of them can be added."""
    return min(max(length, timedelta(0)), LONGEST)
