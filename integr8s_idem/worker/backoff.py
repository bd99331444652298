"""Delays between retries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from integr8s_idem.failures import FailureRule


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delays, with full jitter by default, so that work that failed together is not retried together.

    See "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    initial: float
    """Maximum first delay in seconds."""
    longest: float
    """Maximum delay in seconds."""
    jitter: bool = True
    """Whether delays are random, up to their maximum."""

    def pause(self, tries: int) -> float:
        """Return the seconds to wait after `tries` attempts, at least one hundredth of the limit."""
        limit = min(self.initial * 2.0 ** min(max(tries - 1, 0), 30), self.longest)
        if not self.jitter:
            return limit
        return random.uniform(limit / 100, limit)  # noqa: S311  # jitter, not a secret

    def pause_by(self, rule: FailureRule | None, tries: int) -> float:
        """Return the seconds to wait after `tries` attempts, the last of which failed and is retried by `rule`."""
        if rule is None:
            return self.pause(tries)
        if rule.delay is not None:
            return rule.delay.total_seconds()
        first = self.initial if rule.first_pause is None else rule.first_pause.total_seconds()
        longest = max(first, self.longest) if rule.longest_pause is None else rule.longest_pause.total_seconds()
        return Backoff(first, longest, rule.jitter).pause(tries)
