"""Durations in the public API: a `timedelta`, or a number of seconds."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, TypeAlias, overload

from integr8s_idem._util.durations import length_of
from integr8s_idem.errors import ApplicationError

Duration: TypeAlias = timedelta | int | float
"""A `timedelta`, or a number of seconds."""


@overload
def duration(value: Duration, name: str) -> timedelta: ...


@overload
def duration(value: Duration | None, name: str) -> timedelta | None: ...


def duration(value: Duration | None, name: str) -> timedelta | None:
    """Convert `value` to a `timedelta`; `None` stays `None`.

    Args:
        value: The duration.
        name: Name of the parameter, for errors.

    Raises:
        ApplicationError: It is negative, not a number, or longer than a `timedelta` can be.
    """
    if value is None:
        return None
    converted = length_of(value)
    if converted is None or converted < timedelta():
        raise ApplicationError(
            f"{name} must be a non-negative timedelta or number of seconds, as in {name}=timedelta(minutes=1) or "
            f"{name}=60, not {value!r}"
        )
    return converted


_DELAY: Final = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def delay_in_name(text: str) -> timedelta:
    """Return the duration that a part of a topic's name states, such as `10m`.

    Raises:
        ValueError: It is not a number from 1 to 99 999 and one of s, m, h and d.
    """
    found = _DELAY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a delay: write a number and s, m, h or d, as in 10m")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])
