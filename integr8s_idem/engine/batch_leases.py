"""The leases of a batch that the caller completes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from integr8s_idem.engine.leases import start_deadline
from integr8s_idem.records import Reserved

FORGET_AFTER_LEASES: Final = 10
"""Number of leases after which an unsettled reservation of a batch is no longer tracked."""

MOST_LATE_RENEWALS: Final = 3
"""Number of renewals before a start.  If each takes nearly the whole lease, so will the next one."""


class BatchLeases:
    """Tracks leases whose holder settles and renews them in batches.

    It knows until when the work of each may start, by the lease clock, and which batch it belongs to.  Unsettled leases
    are dropped after a while.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Reserved, float] = {}
        self._batches: dict[Reserved, int] = {}
        self._last_batch = 0

    def add(self, reservations: Iterable[Reserved], asked_at: float) -> None:
        """Track the leases of a batch that was requested at `asked_at`."""
        self._drop_lapsed(asked_at)
        self._last_batch += 1
        for each in reservations:
            self._deadlines[each] = start_deadline(each, asked_at)
            self._batches[each] = self._last_batch

    def renewed(self, reservations: Iterable[Reserved], asked_at: float) -> None:
        """Restart leases that were renewed by a request at `asked_at`."""
        for each in reservations:
            if each not in self._batches:
                self._last_batch += 1
                self._batches[each] = self._last_batch
            self._deadlines[each] = start_deadline(each, asked_at)

    def forget(self, reservations: Iterable[Reserved]) -> None:
        """Stop tracking reservations that are settled or lost."""
        for each in reservations:
            self._deadlines.pop(each, None)
            self._batches.pop(each, None)

    def may_start(self, reservation: Reserved, now: float) -> bool:
        """Whether enough of the lease of `reservation` is left; `False` if it is not tracked."""
        return now < self._deadlines.get(reservation, float("-inf"))

    def late_beside(self, reservation: Reserved, now: float) -> list[Reserved]:
        """Return `reservation` and the other reservations of its batch that are late."""
        batch = self._batches.get(reservation)
        late = [each for each, until in self._deadlines.items() if now >= until and self._batches[each] == batch]
        return list(dict.fromkeys([reservation, *late]))

    def _drop_lapsed(self, now: float) -> None:
        gone = [
            each
            for each, until in self._deadlines.items()
            if now > until + FORGET_AFTER_LEASES * each.lease.total_seconds()
        ]
        self.forget(gone)
