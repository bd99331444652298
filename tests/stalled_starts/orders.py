"""Instructions for a worker process of a stalled-starts trial."""

from __future__ import annotations

from dataclasses import dataclass

from integr8s_idem import IdempotencyConfig
from tests.crashes.orders import Order


@dataclass(frozen=True)
class StallOrder(Order):
    """Instructions for a worker."""

    entry: str = ""
    """The entry point, as in `tests.stalled_starts.entries.ENTRIES`."""
    works: int = 24
    """Number of works; every worker gets all of them."""
    concurrency: int = 16
    seconds: float = 0.03
    """Seconds for which a handler blocks its thread."""
    blocked_work: int = -1
    """The work whose first attempt blocks for `blocked_seconds`; negative for none."""
    blocked_seconds: float = 0.0
    is_reversed: bool = False
    """Whether the worker starts with the last work."""

    @property
    def names(self) -> list[str]:
        """The works, in the order in which this worker does them."""
        names = [f"work-{number}" for number in range(self.works)]
        return names[::-1] if self.is_reversed else names

    @property
    def idempotency(self) -> IdempotencyConfig:
        # Two FastStream batches that wait for each other's keys can only continue when one of them times out.
        return IdempotencyConfig(
            key_prefix=self.key_prefix,
            processing_timeout_seconds=self.lease,
            max_attempts=self.max_attempts,
            wait_timeout_seconds=2 * self.lease,
        )

    def seconds_of(self, work: str, attempt: int) -> float:
        """Return the seconds for which a run blocks its thread."""
        is_blocked = attempt == 1 and work == f"work-{self.blocked_work}"
        return self.blocked_seconds if is_blocked else self.seconds
