"""Read durations that are given as a `timedelta` or as a number of seconds."""

from __future__ import annotations

from datetime import timedelta


def length_of(value: object) -> timedelta | None:
    """Return `value` as a `timedelta`; `None` if it is not a duration, or longer than a `timedelta` can be."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return timedelta(seconds=value)
    except (ValueError, OverflowError):
        return None
