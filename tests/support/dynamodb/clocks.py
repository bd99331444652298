"""A clock of DynamoDB that a test puts forward."""

from __future__ import annotations

from integr8s_idem.stores.dynamodb.clock import ServerClock


class VirtualClock(ServerClock):
    """It stands until `now` is changed, whatever DynamoDB's answers tell of the time."""

    known = True

    def __init__(self, now: int) -> None:
        super().__init__()
        self.now = now
        """Microseconds since 1970."""

    def earliest(self) -> int:
        return self.now

    def latest(self) -> int:
        return self.now
