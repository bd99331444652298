"""A DynamoDB clock that a test sets."""

from __future__ import annotations

from integr8s_idem.stores.dynamodb.clock import ServerClock


class VirtualClock(ServerClock):
    """A clock that only moves when `now` is set, and ignores the dates in answers of DynamoDB."""

    known = True

    def __init__(self, now: int) -> None:
        super().__init__()
        self.now = now
        """Microseconds since 1970."""

    def earliest(self) -> int:
        return self.now

    def latest(self) -> int:
        return self.now
