"""What can go wrong around one delivery, and when: the list that a repeatable handler survives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal, TypeVar

from integr8s_idem.testing.crash_points import CrashPlan, CrashPoint
from integr8s_idem.testing.simulated_processes import current_process

T = TypeVar("T")


CRASHES: Final = (
    CrashPoint.AFTER_FETCH,
    CrashPoint.BEFORE_RESERVE,
    CrashPoint.AFTER_RESERVE,
    CrashPoint.BEFORE_HANDLER,
    CrashPoint.AFTER_HANDLER,
    CrashPoint.BEFORE_PUBLISH,
    CrashPoint.AFTER_PUBLISH,
    CrashPoint.BEFORE_COMPLETE,
    CrashPoint.AFTER_COMPLETE,
    CrashPoint.BEFORE_COMMIT,
    CrashPoint.AFTER_COMMIT,
)
"""Where a worker can die in the course of one event that goes well, in the order in which it gets there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: Literal["crash", "stall", "lost answer", "outage", "redelivery"]
    where: str = ""
    """A point, or a verb of the store."""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip().replace(" ", "-")


MISHAPS: Final = (
    *(Fault("crash", point.value) for point in CRASHES),
    Fault("stall", CrashPoint.BEFORE_HANDLER.value),
    Fault("stall", CrashPoint.AFTER_HANDLER.value),
    Fault("lost answer", "reserve"),
    Fault("lost answer", "complete"),
    Fault("outage", "reserve"),
    Fault("outage", "complete"),
    Fault("redelivery"),
)
"""All that Kafka, a store and an orchestrator of processes do to a worker, one at a time."""


@dataclass(slots=True)
class Fate:
    """What is to happen to the process that gets somewhere."""

    how: Literal["crash", "stall"]
    point: str
    occurrence: int = 1
    """1 for the first arrival, whichever process it is."""
    arrivals: int = 0
    happened: bool = False


@dataclass(slots=True)
class Points:
    """Who has got where, and what happens to them there."""

    fates: list[Fate] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, point: str) -> None:
        """The current process is at `point`; if it is to die there, it takes no further step."""
        process = current_process()
        if process is None or not process.running:
            return
        self.seen[point] += 1
        for fate in self.fates:
            if fate.point == point and not fate.happened:
                fate.arrivals += 1
                if fate.arrivals == fate.occurrence:
                    fate.happened = True
                    (process.die if fate.how == "crash" else process.stall)()

    async def reached(self, point: str) -> None:
        """As `note`; does not return to who dies here."""
        self.note(point)
        process = current_process()
        if process is not None and not process.running:
            await asyncio.sleep(0)

    def missed(self) -> list[str]:
        """What was to happen, and nobody got there: with a guess at what was meant."""
        return [f"{fate.how} at {fate.point}{self._guess(fate)}" for fate in self.fates if not fate.happened]

    def _guess(self, fate: Fate) -> str:
        if self.seen[fate.point]:
            return f" at arrival {fate.occurrence} (there were {self.seen[fate.point]})"
        near = get_close_matches(fate.point, self.seen, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


class PointsOfClients(CrashPlan):
    """The points around stores and brokers."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    def reached(self, point: CrashPoint) -> None:
        self._points.note(point.value)

    async def around(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        await self._points.reached(f"before_{verb}")
        answer = await call()
        await self._points.reached(f"after_{verb}")
        return answer
