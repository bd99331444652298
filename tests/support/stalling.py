"""A lease clock that jumps, and a store and an observer that make it jump: what a stalled process sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta

from integr8s_idem.records import Reserved, ReserveRequest, Verdict
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Past, Phase, Span
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.counting import CountingObserver
from tests.support.guarded import LEASE

HOUR = timedelta(hours=1)


class ManualClock:
    """A clock that only moves when `leap` is called, by default past the end of a lease."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds

    def wall(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def leap(self, seconds: float = 2 * LEASE) -> None:
        self.seconds += seconds

    async def stall(self) -> None:
        """Leap, as the `stall` of a store."""
        self.leap()


class StallingStore(FlakyStore):
    """Stalls once, right after a reservation."""

    def __init__(self, inner: IdempotencyRepository) -> None:
        super().__init__(inner)
        self.stall: Callable[[], Awaitable[None]] | None = None
        self.skipped = 0
        """Number of `reserve` calls before the one that stalls."""
        self.reserved: list[Reserved] = []

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts = await super().reserve(requests)
        self.reserved += [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        if self.stall is not None and self.skipped == 0:
            stall, self.stall = self.stall, None
            await stall()
        elif self.stall is not None:
            self.skipped -= 1
        return verdicts


class StallingObserver(CountingObserver):
    """Stalls once when the phase of a handler begins: after the first check, before the call."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.stalls_in = 0
        """Countdown to the handler that stalls; 0 for none."""

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        if phase is Phase.HANDLE and self.stalls_in:
            self.stalls_in -= 1
            if not self.stalls_in:
                self.clock.leap()
        return super().phase(phase, event_type, attempt=attempt, handler=handler, past=past)
