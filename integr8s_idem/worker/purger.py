"""Purge expired records in the background, in small batches."""

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
"""Maximum records of one call."""

REST: Final = 4.0
"""Factor of a call's duration for the pause after it, so that purging takes at most a fifth of a connection's time."""

SHORTEST_REST: Final = 0.05
"""Minimum pause between two calls in seconds."""


class Purger:
    """Calls `purge` of a store that supports it, from `begin` until `stop`."""

    def __init__(self, service: str, store: object, circuit: StoreCircuit, observer: Observer) -> None:
        self._service = service
        self._store = store if isinstance(store, PurgeSupport) and store.purge_every else None
        self._circuit = circuit
        self._observer = observer
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start purging in a task."""
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._purge_periodically(self._store))

    async def stop(self) -> None:
        """Stop purging, and cancel a running call."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _purge_periodically(self, store: PurgeSupport) -> None:
        every = store.purge_every.total_seconds()
        while True:
            # Jitter, so that workers that start together do not purge together.
            await asyncio.sleep(every * random.uniform(0.5, 1.5))  # noqa: S311  # not a secret
            try:
                await self._purge(store)
            except StoreError as error:
                # Does not pause the service: the next delivery shows whether the store is unavailable.
                self._observer.count(Signal.STORE_ERROR)
                logger.warning("%s: expired records not purged: %s", self._service, error)
            except Exception:
                # A bug in a store's `purge` must not stop the service.
                self._observer.count(Signal.STORE_ERROR)
                logger.exception("%s: expired records not purged", self._service)

    async def _purge(self, store: PurgeSupport) -> None:
        """Purge all expired records while the store is available."""
        loop = asyncio.get_running_loop()
        more = True
        while more and self._circuit.is_available:
            start = loop.time()
            purged = await store.purge(BATCH)
            self._observer.count(Signal.PURGED, amount=purged)
            more = purged >= BATCH
            if more:
                await asyncio.sleep(max(SHORTEST_REST, REST * (loop.time() - start)))
