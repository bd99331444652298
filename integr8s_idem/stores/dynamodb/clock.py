"""Estimate DynamoDB's clock from its responses.

DynamoDB has no request that returns the time, and no condition that reads it.  But each response has a `Date` header:
the time of AWS in whole seconds, at some moment between request and response.  A few responses, at different fractions
of a second, narrow the clock down to a small interval.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

from integr8s_idem._util.lease_clock import system_clock_ns
from integr8s_idem.errors import StoreConfigurationError

SECOND: Final = 1_000_000
"""All times in this module are in microseconds."""

_DRIFT_DIVISOR: Final = 5_000
"""Maximum drift of a quartz clock: one part in 5,000 (200 ppm)."""


def ticks() -> int:
    """Return a monotonic time, which includes suspend if the system has such a clock."""
    return system_clock_ns() // 1_000


class ServerClock:
    """The interval that contains the current time of DynamoDB, in microseconds since 1970.

    Write deadlines with `latest`, and check them with `earliest`: then none passes early, and each passes late by at
    most twice the length of the interval.

    Args:
        tick: A monotonic clock in microseconds.
    """

    def __init__(self, tick: Callable[[], int] = ticks) -> None:
        self.tick = tick
        self._low = self._high = 0
        """Minimum and maximum offset of DynamoDB's clock to `tick`, at the last response."""
        self._observed_at: int | None = None

    @property
    def known(self) -> bool:
        """Whether there has been any response."""
        return self._observed_at is not None

    def earliest(self) -> int:
        now = self.tick()
        return now + self._low - self._drift(now)

    def latest(self) -> int:
        now = self.tick()
        return now + self._high + self._drift(now)

    def observe(self, date: str | None, sent: int) -> None:
        """Update the interval with the `Date` of a response received now, to a request sent at `sent` by `tick`.

        Raises:
            StoreConfigurationError: The response has no `Date`.
        """
        arrived = self.tick()
        if date is None:
            raise StoreConfigurationError(
                "start",
                "its responses have no Date header, which leases need as a clock: something at endpoint_url removes it",
            )
        second = int(parsedate_to_datetime(date).timestamp()) * SECOND
        low, high = second - arrived, second + SECOND - sent
        if self._observed_at is not None:
            drift = self._drift(arrived)
            intersection = max(low, self._low - drift), min(high, self._high + drift)
            # It is empty if this machine was suspended or another server responds; then the latest response counts.
            if intersection[0] <= intersection[1]:
                low, high = intersection
        self._low, self._high, self._observed_at = low, high, arrived

    def _drift(self, now: int) -> int:
        assert self._observed_at is not None, "there has been no response yet"
        return max(0, now - self._observed_at) // _DRIFT_DIVISOR
