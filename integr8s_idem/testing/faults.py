"""Faults around a delivery that a repeatable handler must survive."""

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
"""The points at which a worker can crash while it processes an event successfully, in order."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A single fault."""

    kind: Literal["crash", "stall", "lost answer", "outage", "redelivery"]
    where: str = ""
    """A crash point, or an operation of the store."""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip().replace(" ", "-")


FAULTS: Final = (
    *(Fault("crash", point.value) for point in CRASHES),
    Fault("stall", CrashPoint.BEFORE_HANDLER.value),
    Fault("stall", CrashPoint.AFTER_HANDLER.value),
    Fault("lost answer", "reserve"),
    Fault("lost answer", "complete"),
    Fault("outage", "reserve"),
    Fault("outage", "complete"),
    Fault("redelivery"),
)
"""All faults that Kafka, a store or an orchestrator can cause, one at a time."""


@dataclass(slots=True)
class PlannedFault:
    """A planned crash or stall of the process that reaches a point."""

    how: Literal["crash", "stall"]
    point: str
    occurrence: int = 1
    """1 for the first arrival, in any process."""
    arrivals: int = 0
    happened: bool = False


@dataclass(slots=True)
class Points:
    """The points reached so far, and the planned faults."""

    planned: list[PlannedFault] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, point: str) -> None:
        """Report that the current process is at `point`; if a crash is planned there, it takes no further step."""
        process = current_process()
        if process is None or not process.running:
            return
        self.seen[point] += 1
        for fault in self.planned:
            if fault.point == point and not fault.happened:
                fault.arrivals += 1
                if fault.arrivals == fault.occurrence:
                    fault.happened = True
                    (process.die if fault.how == "crash" else process.stall)()

    async def reached(self, point: str) -> None:
        """Report a point like `note`, but do not return in a process that crashes there."""
        self.note(point)
        process = current_process()
        if process is not None and not process.running:
            await asyncio.sleep(0)

    def missed(self) -> list[str]:
        """Return the planned faults that did not happen, with a suggestion for misspelled points."""
        return [f"{fault.how} at {fault.point}{self._guess(fault)}" for fault in self.planned if not fault.happened]

    def _guess(self, fault: PlannedFault) -> str:
        if self.seen[fault.point]:
            return f" at arrival {fault.occurrence} (there were {self.seen[fault.point]})"
        near = get_close_matches(fault.point, self.seen, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


class ClientPoints(CrashPlan):
    """A crash plan that reports the points around stores and brokers."""

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
