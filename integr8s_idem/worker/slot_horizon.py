"""How many items may wait for slots while their keys are reserved."""

from __future__ import annotations

from typing import Final

from integr8s_idem.config import OnInProgress
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.worker.assignments import Delivery, WorkItem
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.lane import HORIZON

MOST_WAITING: Final = 128
"""Maximum items that wait for slots while their keys are reserved, in addition to those for which slots are free."""

LEAST_WAITING: Final = 16
"""At a rate that allows fewer than these, requests to the store take little time, and shared ones would save little."""

FEW_ATTEMPTS: Final = 2
"""With no more attempts than these, no item waits: a key that is released costs the next owner of its partition one."""


class SlotHorizon:
    """As many items as begin in `HORIZON`, so that those of slow handlers are reserved only when slots are free."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self.size = 0
        """How many items may wait."""
        self._begun = 0
        """Items that have begun since `_since`."""
        self._since: float | None = None

    def note(self, begun: int, now: float) -> None:
        """Note that the deliveries of a batch begin, at a time by the event loop's clock."""
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if elapsed >= HORIZON:
            size = int(self._begun * HORIZON / elapsed)
            self.size = min(size, self._most) if size >= LEAST_WAITING else 0
            self._begun, self._since = 0, now
        self._begun += begun

    def slow_down(self) -> None:
        """Let no item wait until the rate is known again."""
        self.size, self._begun, self._since = 0, 0, None


def horizon_for(processor: DeliveryProcessor) -> SlotHorizon:
    """Return the horizon of a service.  Without isolation or with `on_in_progress = "skip"`, no item may wait.

    The reasons are those of lanes (`look_ahead`).
    """
    manager = processor.dispatcher.manager
    if manager is not None:
        config = manager.config
        can_be_isolated = processor.suspects is not None and config.max_attempts > FEW_ATTEMPTS
        if not can_be_isolated or config.on_in_progress is OnInProgress.SKIP:
            return SlotHorizon(0)
    return SlotHorizon()


def has_waited(each: Delivery | WorkItem) -> bool:
    """Whether its key was released because it waited for long: it is reserved again only when a slot is free."""
    execution = each.execution if isinstance(each, WorkItem) else None
    return isinstance(execution, GuardedExecution) and execution.work.uncounted_attempts > 0
