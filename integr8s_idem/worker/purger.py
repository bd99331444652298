"""Expired records taken away beside the work: seldom, in small batches, and never in its way."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from integr8s_idem.errors import StoreError
from integr8s_idem.stores import PurgeSupport
from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.store_circuit import StoreCircuit

logger = logging.getLogger(__name__)

BATCH: Final = 500
"""Records of one call."""

REST: Final = 4.0
"""A pause is this many times as long as the call before it: a fifth of one connection's time at most."""

SHORTEST_REST: Final = 0.05
"""Seconds."""


class Purger:
    """Calls `purge` of a store that has it, from `begin` to `stop`; of any other store it leaves alone."""

    def __init__(self, service: str, store: object, circuit: StoreCircuit, observer: Observer) -> None:
        """`store`: any, or `None`."""
        self._service = service
        self._store = store if isinstance(store, PurgeSupport) and store.purge_every else None
        self._circuit = circuit
        self._observer = observer
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """From now on."""
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._purge_for_ever(self._store))

    async def stop(self) -> None:
        """No more; a call that is under way is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _purge_for_ever(self, store: PurgeSupport) -> None:
        every = store.purge_every.total_seconds()
        while True:
            # Around its time, not at it: workers that start together need not purge together.
            await asyncio.sleep(every * random.uniform(0.5, 1.5))  # noqa: S311  # jitter, no secret
            try:
                await self._purge(store)
            except StoreError as error:
                # The next delivery finds out for itself whether that stops anything.
                self._observer.count(Signal.STORE_ERROR)
                logger.warning("%s: expired records not purged: %s", self._service, error)
            except Exception:
                # A store's bug in cleaning up is no reason to stop the work.
                self._observer.count(Signal.STORE_ERROR)
                logger.exception("%s: expired records not purged", self._service)

    async def _purge(self, store: PurgeSupport) -> None:
        """All that has expired, as long as the store answers."""
        loop = asyncio.get_running_loop()
        more = True
        while more and self._circuit.is_available:
            start = loop.time()
            purged = await store.purge(BATCH)
            self._observer.count(Signal.PURGED, amount=purged)
            more = purged >= BATCH
            if more:
                await asyncio.sleep(max(SHORTEST_REST, REST * (loop.time() - start)))
