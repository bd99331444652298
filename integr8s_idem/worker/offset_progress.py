"""How far a partition is done: the contiguous watermark.  Pure.

Only what lies below the first unfinished delivery may be committed.  Offsets need not be contiguous:
compaction and transaction markers leave gaps, and what was never delivered is never waited for.
"""

from __future__ import annotations

from collections import deque


class Progress:
    """What was delivered from one partition during one assignment of it, and what of that is finished."""

    def __init__(self) -> None:
        self._delivered: deque[int] = deque()
        self._finished: set[int] = set()
        self._first: int | None = None
        self._next: int | None = None
        self.committed: int | None = None
        """What the broker has confirmed."""

    @property
    def next_offset(self) -> int | None:
        """Where fetching goes on; `None` if nothing was delivered or passed over yet."""
        return self._next

    @property
    def unfinished(self) -> int:
        """Deliveries that are not finished yet."""
        return len(self._delivered) - len(self._finished)

    @property
    def span(self) -> int:
        """Deliveries from the first unfinished one on: what would come again after a crash."""
        return len(self._delivered)

    def deliver(self, offset: int) -> bool:
        """Note a delivery.  `False`: it was delivered before, and is on its way or done."""
        if self._next is not None and offset < self._next:
            return False
        if self._first is None:
            self._first = offset
        self._delivered.append(offset)
        self._next = offset + 1
        return True

    def fetched_to(self, position: int, start: int) -> None:
        """Note the position of the client: what lies before it was delivered, or is never going to be.

        Transaction markers, aborted messages and compacted offsets move the position without a delivery.  Call this
        only while every record that the client handed out has been passed to `deliver`.

        Args:
            position: The next offset that the client hands out.
            start: Where fetching began; 0 if that is unknown.
        """
        if self._next is not None:
            self._next = max(self._next, position)
        elif position > start:
            self._first, self._next = start, position

    def finish(self, offset: int) -> None:
        """Note that a delivery may be acknowledged."""
        self._finished.add(offset)
        while self._delivered and self._delivered[0] in self._finished:
            self._finished.discard(self._delivered.popleft())

    @property
    def committable(self) -> int | None:
        """The offset to commit: all before it is done.  `None` if there is nothing to commit yet."""
        return self._delivered[0] if self._delivered else self._next

    @property
    def to_commit(self) -> int | None:
        """The offset to commit if that would advance the group."""
        offset, known = self.committable, self._first if self.committed is None else self.committed
        if offset is None or known is None or offset <= known:
            return None
        return offset
