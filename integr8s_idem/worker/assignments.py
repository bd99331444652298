"""One stretch of time in which a partition is ours.

A partition that is taken away and comes back is another assignment: what was begun under the earlier one
can no longer move offsets, so a late completion never rewinds or overtakes the group.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.worker.kafka_protocols import Partition, Record
from integr8s_idem.worker.offset_progress import Progress


@dataclass(eq=False, slots=True)
class Assignment:
    """One partition for as long as it stays ours."""

    partition: Partition
    progress: Progress = field(default_factory=Progress)
    start: int | None = None
    """Where fetching began."""
    damaged: bool = False
    """It holds a batch that cannot be read: it rests until somebody skips that on purpose and restarts."""
    ended: bool = False
    """The partition is no longer ours: nothing of this assignment is committed any more."""
    running: set[Delivery] = field(default_factory=set)
    """Deliveries that were begun and have not come to an end."""
    _idle: asyncio.Future[None] | None = None
    closing: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once no delivery of it may be begun or tried again."""

    @property
    def next_offset(self) -> int | None:
        """Where fetching goes on; `None` if nothing was delivered and its beginning is not known yet."""
        delivered = self.progress.next_offset
        return self.start if delivered is None else delivered

    def close(self) -> None:
        """Begin nothing more, and let waiting deliveries go."""
        if not self.closing.done():
            self.closing.set_result(None)

    @property
    def closed(self) -> bool:
        return self.closing.done()

    def began(self, delivery: Delivery) -> None:
        """`delivery` is on its way."""
        self.running.add(delivery)

    def ended_one(self, delivery: Delivery) -> None:
        """`delivery` has come to its end, settled or let go."""
        self.running.discard(delivery)
        if self._idle is not None and not self._idle.done() and not self.running:
            self._idle.set_result(None)

    def idle(self) -> asyncio.Future[None]:
        """Done once nothing of it is on its way."""
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
            if not self.running:
                self._idle.set_result(None)
        return self._idle

    def handlers(self) -> set[asyncio.Task[Any]]:
        """The tasks that have its deliveries in hand."""
        return {delivery.task for delivery in self.running if delivery.task is not None}


@dataclass(eq=False, slots=True)
class Delivery:
    """One arrival of a message."""

    record: Record
    assignment: Assignment
    task: asyncio.Task[Any] | None = None
    """What handles it now."""
    size: int = field(init=False)
    """Bytes it keeps in memory, roughly."""

    def __post_init__(self) -> None:
        self.size = len(self.record.value or b"") + len(self.record.key or b"")


class AbandonedError(Exception):
    """A delivery is let go because its assignment is closing: it will come again, here or elsewhere."""
