"""Delays between retries."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delays with full jitter, so that work that failed together is not retried together.

    See "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    initial: float
    """Maximum first delay in seconds."""
    longest: float
    """Maximum delay in seconds."""

    def pause(self, tries: int) -> float:
        """Return the seconds to wait after `tries` attempts, at least one hundredth of the limit."""
        limit = min(self.initial * 2 ** min(max(tries - 1, 0), 30), self.longest)
        return random.uniform(limit / 100, limit)  # noqa: S311  # jitter, not a secret
