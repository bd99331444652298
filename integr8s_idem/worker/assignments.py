"""One stretch of time in which a partition is ours.

A partition that is taken away and comes back is another assignment: what was begun under the earlier one
can no longer move offsets, so a late completion never rewinds or overtakes the group.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.worker.offsets import Progress
from integr8s_idem.worker.records import Partition, Record


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
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """What handles its deliveries."""
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


@dataclass(eq=False, slots=True)
class Delivery:
    """One arrival of a message."""

    record: Record
    assignment: Assignment

    @property
    def size(self) -> int:
        """Bytes it keeps in memory, roughly."""
        return len(self.record.value or b"") + len(self.record.key or b"")


class AbandonedError(Exception):
    """A delivery is let go because its assignment is closing: it will come again, here or elsewhere."""
