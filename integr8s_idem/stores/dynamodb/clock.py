"""DynamoDB's clock, as far as its answers tell it.

DynamoDB has no command that tells the time, and no condition that reads it.  Each of its answers carries a `Date`,
though: whole seconds, by AWS's clock.  That second lay between the sending of the request and the arrival of the
answer; a few answers, each at another moment of its second, leave little room.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

from integr8s_idem._util.lease_clock import system_clock_ns
from integr8s_idem.errors import StoreConfigurationError

SECOND: Final = 1_000_000
"""All times here are microseconds."""

_DRIFT: Final = 5_000
"""One part in so many: how far a quartz may go wrong (200 ppm)."""


def ticks() -> int:
    """Microseconds of a clock that nobody sets; it goes on while a laptop sleeps, where the system has such a clock."""
    return system_clock_ns() // 1_000


class ServerClock:
    """Between which two moments DynamoDB's clock stands now, in microseconds since 1970.

    Whoever writes a time that others wait for takes `latest`, whoever judges whether it has passed takes `earliest`:
    so nothing ends early, and everything at most twice the room between the two late.

    Args:
        tick: A clock that nobody sets, in microseconds.
    """

    def __init__(self, tick: Callable[[], int] = ticks) -> None:
        self.tick = tick
        self._low = self._high = 0
        """How far DynamoDB's clock is ahead of `tick`, at least and at most, when last heard."""
        self._heard: int | None = None

    @property
    def known(self) -> bool:
        """Whether any answer has come yet."""
        return self._heard is not None

    def earliest(self) -> int:
        now = self.tick()
        return now + self._low - self._strayed(now)

    def latest(self) -> int:
        now = self.tick()
        return now + self._high + self._strayed(now)

    def heard(self, date: str | None, sent: int) -> None:
        """Learn from the `Date` of an answer, now, to a request that was sent at `sent` of `tick`.

        Raises:
            StoreConfigurationError: No `Date`: there is no time to go by.
        """
        arrived = self.tick()
        if date is None:
            raise StoreConfigurationError(
                "start", "its answers carry no Date, and leases need a clock: something at endpoint_url takes it away"
            )
        told = int(parsedate_to_datetime(date).timestamp()) * SECOND
        low, high = told - arrived, told + SECOND - sent
        if self._heard is not None:
            strayed = self._strayed(arrived)
            narrow = max(low, self._low - strayed), min(high, self._high + strayed)
            # What does not fit together: this machine was suspended, or another one answers. The newest is right.
            if narrow[0] <= narrow[1]:
                low, high = narrow
        self._low, self._high, self._heard = low, high, arrived

    def _strayed(self, now: int) -> int:
        assert self._heard is not None, "nothing was heard from DynamoDB yet"
        return max(0, now - self._heard) // _DRIFT
