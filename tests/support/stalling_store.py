"""A store after whose first answer the process stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from integr8s_idem.records import ReserveRequest, Verdict
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now
from tests.support.guarded import LEASE


class StallingStore(FlakyStore):
    """Stalls after the first reservation, for longer than the lease by the lease clock; its own clock does not move.

    Give `lease_clock` to the manager.
    """

    def __init__(self) -> None:
        super().__init__(MemoryIdempotencyRepository(clock=virtual_now))
        self._stalled = 0.0

    def lease_clock(self) -> float:
        """Return the time of the event loop, and how long the process has stalled."""
        return asyncio.get_running_loop().time() + self._stalled

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts = await super().reserve(requests)
        self._stalled = 2 * LEASE
        return verdicts
