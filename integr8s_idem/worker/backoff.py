"""How long to pause before trying again."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential pauses with full jitter: many failures at one moment do not come back at one moment.

    See "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    initial: float
    """Seconds: the longest first pause."""
    longest: float
    """Seconds: no pause is longer."""

    def pause(self, tries: int) -> float:
        """Seconds to wait after `tries` tries, at least one hundredth of the limit."""
        limit = min(self.initial * 2 ** min(max(tries - 1, 0), 30), self.longest)
        return random.uniform(limit / 100, limit)  # noqa: S311  # jitter, no secret
