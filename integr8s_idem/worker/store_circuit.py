"""Track whether the store is available: a service pauses while it is not, so that an outage causes no dead letters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from integr8s_idem.errors import StoreConfigurationError, StoreError
from integr8s_idem.records import StoreHealth
from integr8s_idem.telemetry import Gauge, Observer, Signal
from integr8s_idem.worker.backoff import Backoff

logger = logging.getLogger(__name__)

PROBE = Backoff(initial=0.2, longest=2.0)
"""Delays between probes of an unavailable store, short enough to resume within seconds."""

WATCH_SECONDS = 5.0
"""Interval of checks of an available store, to detect that it has lost its data."""


class StoreCircuit:
    """Tracks whether the store is available: errors mark it unavailable, and a probe detects that it responds again."""

    def __init__(self, ping: Callable[[], Awaitable[StoreHealth]] | None, observer: Observer) -> None:
        """`ping` is `None` for a service without a store, which always counts as available."""
        self._ping = ping
        self._observer = observer
        self._available_again: asyncio.Future[None] | None = None
        self.is_available = True
        self._probe: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        self._identity = ""
        self._primary = ""
        self._start = ""
        self.reason = ""
        """Why the store is unavailable."""

    @property
    def available_again(self) -> asyncio.Future[None] | None:
        """A future that is done when the store is available again; `None` while it is available."""
        return self._available_again

    def mark_unavailable(self, error: StoreError) -> None:
        """Mark the store unavailable because of `error`, and probe it until it responds."""
        if self._available_again is not None or self._ping is None:
            return
        self.reason = str(error)
        logger.warning("store unavailable, pausing: %s", error)
        self._observer.measure(Gauge.STORE_UP, 0)
        loop = asyncio.get_running_loop()
        self._available_again, self.is_available = loop.create_future(), False
        self._probe = loop.create_task(self._probe_until_available())

    async def wait(self, *, unless: asyncio.Future[None]) -> None:
        """Return when the store is available, or when `unless` is done."""
        if self._available_again is not None:
            await asyncio.wait({self._available_again, unless}, return_when=asyncio.FIRST_COMPLETED)

    async def wait_out(self, error: StoreError) -> None:
        """Mark the store unavailable because of `error`, and return when it is available again."""
        self.mark_unavailable(error)
        if self._available_again is not None:
            await asyncio.wait({self._available_again})

    async def check(self) -> None:
        """Ping the store.

        Raises:
            StoreConfigurationError: The store rejects the worker's configuration, so that waiting does not help.
            StoreUnavailableError: The store does not respond.
        """
        if self._ping is None:
            return
        health = await self._ping()
        self._observer.measure(Gauge.STORE_UP, 1)
        for warning in sorted(set(health.warnings) - self._warned):
            self._warned.add(warning)
            logger.warning("store %s %s: %s", health.kind, health.version, warning)
        self._detect_data_loss(health)

    def _detect_data_loss(self, health: StoreHealth) -> None:
        """Count and log that the store has lost records, or may have; the service continues."""
        if not health.identity:
            return
        primary, successor_of = health.lineage
        # One incident is counted once, as the worst case.
        if self._identity and health.identity != self._identity:
            self._observer.count(Signal.STORE_DATA_LOST)
            logger.error(
                "store %s has lost its records: it was flushed, replaced, or restarted without its data. No event is "
                "lost, but events that were handled before are handled again if they are redelivered. Find out who "
                "flushed it, or make it persist its data (appendonly yes, maxmemory-policy noeviction)",
                health.kind,
            )
        elif self._primary and successor_of and primary != self._primary:
            self._observer.count(Signal.STORE_FAILOVER)
            logger.warning(
                "store %s has failed over to another primary: the last writes to the previous primary may be lost, and "
                "events whose records are lost are handled again if they are redelivered",
                health.kind,
            )
        elif self._start and health.start and health.start != self._start and not health.keeps_all:
            self._observer.count(Signal.STORE_RESTART)
            logger.warning(
                "store %s was restarted: unless it was shut down cleanly, its last writes may be lost, and events "
                "whose records are lost are handled again if they are redelivered (appendfsync always prevents this)",
                health.kind,
            )
        self._identity = health.identity
        self._primary = primary or self._primary
        self._start = health.start or self._start
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Check the store periodically, since it can lose its data without becoming unavailable."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._available_again is not None:
                continue  # the probe checks it
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # if this task died, data loss would go unnoticed
                if isinstance(error, StoreConfigurationError) and str(error) not in self._warned:
                    self._warned.add(str(error))
                    logger.error("%s", error)
                # Does not pause the service, since some handlers run without a store.
                self._observer.measure(Gauge.STORE_UP, 0)
                logger.debug("store check failed: %s", error)

    async def stop(self) -> None:
        """Stop probing and checking the store."""
        for task in (self._probe, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _probe_until_available(self) -> None:
        tries = 0
        while True:
            tries += 1
            await asyncio.sleep(PROBE.pause(tries))
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # if the probe died, the service would stay paused forever
                self.reason = str(error) or type(error).__name__
                continue
            break
        logger.info("store available again, resuming")
        again, self._available_again, self.reason = self._available_again, None, ""
        self.is_available = True
        if again is not None:
            again.set_result(None)
