"""Track the watermark of a partition: the offset that may be committed.  No I/O.

Only offsets below the first unfinished delivery may be committed.  Offsets need not be contiguous: compaction and
transaction markers leave gaps, and offsets that were never delivered are not waited for.
"""

from __future__ import annotations

from collections import deque


class Progress:
    """Offsets of one assignment that were delivered, and those of them that are finished."""

    def __init__(self) -> None:
        self._delivered: deque[int] = deque()
        self._finished: set[int] = set()
        self._first: int | None = None
        self._next: int | None = None
        self.committed: int | None = None
        """Last offset that the broker confirmed."""

    @property
    def next_offset(self) -> int | None:
        """Next offset to fetch; `None` if nothing was delivered or skipped yet."""
        return self._next

    @property
    def unfinished(self) -> int:
        """Deliveries that are not finished yet."""
        return len(self._delivered) - len(self._finished)

    @property
    def span(self) -> int:
        """Deliveries from the first unfinished one on, which would be redelivered after a crash."""
        return len(self._delivered)

    def deliver(self, *offsets: int) -> list[bool]:
        """Note deliveries; return `False` for each offset that was delivered before."""
        are_new = []
        for offset in offsets:
            is_new = self._next is None or offset >= self._next
            are_new.append(is_new)
            if is_new:
                if self._first is None:
                    self._first = offset
                self._delivered.append(offset)
                self._next = offset + 1
        return are_new

    def fetched_to(self, position: int, start: int) -> None:
        """Note the position of the client: offsets before it were delivered, or never will be.

        Transaction markers, aborted messages and compacted offsets move the position without a delivery.  Call this
        only when every record that the client returned has been passed to `deliver`.

        Args:
            position: The next offset that the client returns.
            start: First offset that was fetched; 0 if it is unknown.
        """
        if self._next is not None:
            self._next = max(self._next, position)
        elif position > start:
            self._first, self._next = start, position

    def finish(self, offset: int) -> None:
        """Note that a delivery may be acknowledged."""
        delivered, finished = self._delivered, self._finished
        if not delivered or delivered[0] != offset:
            finished.add(offset)
            return
        delivered.popleft()
        while finished and delivered and delivered[0] in finished:
            finished.discard(delivered.popleft())

    @property
    def committable(self) -> int | None:
        """The offset to commit, below which everything is finished; `None` if there is none yet."""
        return self._delivered[0] if self._delivered else self._next

    @property
    def to_commit(self) -> int | None:
        """The offset to commit if that would advance the group."""
        offset, known = self.committable, self._first if self.committed is None else self.committed
        if offset is None or known is None or offset <= known:
            return None
        return offset
