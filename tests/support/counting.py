"""An observer and a store that record how they are called."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from integr8s_idem.records import Completion, ReserveRequest, Verdict
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Gauge, Observation, Signal, SilentObserver
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now


class CountingObserver(SilentObserver):
    def __init__(self) -> None:
        self.counts: Counter[Signal] = Counter()
        self.reasons: Counter[tuple[Signal, str, str]] = Counter()
        """Keyed by signal, event type and reason, if given."""
        self.gauges: dict[Gauge, float] = {}
        self.observations: list[Observation] = []
        """Of services in observe mode."""

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        self.counts[signal] += amount
        if reason:
            self.reasons[signal, event_type, reason] += amount

    def observed(self, event_type: str, observation: Observation) -> None:
        self.observations.append(observation)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        self.gauges[gauge] = value


class CountingStore(FlakyStore):
    """A store with virtual time that records the sizes of `reserve` requests."""

    def __init__(self) -> None:
        super().__init__(MemoryIdempotencyRepository(clock=virtual_now))
        self.batch_sizes: list[int] = []

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        self.batch_sizes.append(len(requests))
        return await super().reserve(requests)


class BusyStore(CountingStore):
    """A store that takes a millisecond to record outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_recording = False

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        self.is_recording = True
        try:
            await asyncio.sleep(0.001)
            return await super().complete(completions)
        finally:
            self.is_recording = False


class SentOutcomes(CountingStore):
    """Also records the sizes of `complete` requests, and when each outcome was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.sent_at: list[float] = []

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        self.sizes.append(len(completions))
        self.sent_at += [asyncio.get_running_loop().time()] * len(completions)
        return await super().complete(completions)
