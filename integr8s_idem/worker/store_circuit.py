"""Whether the store answers: a service pauses while it does not, so that an outage dead-letters nothing."""

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
"""Pauses between two looks at a store that is down: seconds after it is back, work goes on."""

WATCH_SECONDS = 5.0
"""Time between two looks at a store that is up, to notice that it has lost its data."""


class StoreCircuit:
    """Whoever finds the store unavailable marks it so; a probe finds out when it is available again."""

    def __init__(self, ping: Callable[[], Awaitable[StoreHealth]] | None, observer: Observer) -> None:
        """`ping`: `None` for a service without a store, which is always available."""
        self._ping = ping
        self._observer = observer
        self._available_again: asyncio.Future[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        self._identity = ""
        self._primary = ""
        self._start = ""
        self.reason = ""
        """Why it is unavailable."""

    @property
    def is_available(self) -> bool:
        return self._available_again is None

    @property
    def available_again(self) -> asyncio.Future[None] | None:
        """Done when it is; `None` while the store is available."""
        return self._available_again

    def mark_unavailable(self, error: StoreError) -> None:
        """The store has failed: pause until it answers again."""
        if self._available_again is not None or self._ping is None:
            return
        self.reason = str(error)
        logger.warning("store unavailable, pausing: %s", error)
        self._observer.measure(Gauge.STORE_UP, 0)
        loop = asyncio.get_running_loop()
        self._available_again = loop.create_future()
        self._probe = loop.create_task(self._look_until_it_answers())

    async def wait(self, *, unless: asyncio.Future[None]) -> None:
        """Return once the store is available, or `unless` is done."""
        if self._available_again is not None:
            await asyncio.wait({self._available_again, unless}, return_when=asyncio.FIRST_COMPLETED)

    async def wait_out(self, error: StoreError) -> None:
        """The store has failed while an outcome is recorded: return when it is available again."""
        self.mark_unavailable(error)
        if self._available_again is not None:
            await asyncio.wait({self._available_again})

    async def check(self) -> None:
        """Ask the store for a sign of life now.

        Raises:
            StoreConfigurationError: It refuses us, and waiting does not help.
            StoreUnavailableError: It does not answer.
        """
        if self._ping is None:
            return
        health = await self._ping()
        self._observer.measure(Gauge.STORE_UP, 1)
        for warning in sorted(set(health.warnings) - self._warned):
            self._warned.add(warning)
            logger.warning("store %s %s: %s", health.kind, health.version, warning)
        self._recognise(health)

    def _recognise(self, health: StoreHealth) -> None:
        """Say aloud that the store has lost what it knew; nothing is lost by going on."""
        if not health.identity:
            return
        primary, successor_of = health.lineage
        # One thing that happened is counted once, as the worst that it can be.
        if self._identity and health.identity != self._identity:
            self._observer.count(Signal.STORE_DATA_LOST)
            logger.error(
                "store %s has lost its records: it was emptied, replaced or restarted without its data. No event is "
                "lost, but events handled before will be handled again if they are delivered again. Find out who "
                "flushed it, or make it keep its data (appendonly yes, maxmemory-policy noeviction)",
                health.kind,
            )
        elif self._primary and successor_of and primary != self._primary:
            self._observer.count(Signal.STORE_FAILOVER)
            logger.warning(
                "store %s has another primary: what the one before it took last may be lost, and events whose "
                "records are may be handled again if they are delivered again",
                health.kind,
            )
        elif self._start and health.start and health.start != self._start and not health.keeps_all:
            self._observer.count(Signal.STORE_RESTART)
            logger.warning(
                "store %s was started anew: unless it had ended in good order, what it took last may be lost, and "
                "events whose records are may be handled again if they are delivered again (appendfsync always "
                "prevents it)",
                health.kind,
            )
        self._identity = health.identity
        self._primary = primary or self._primary
        self._start = health.start or self._start
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """A store can lose its data without ever being silent."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._available_again is not None:
                continue  # the probe looks
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # a watch that dies would leave losses unseen
                if isinstance(error, StoreConfigurationError) and str(error) not in self._warned:
                    self._warned.add(str(error))
                    logger.error("%s", error)
                # Whether that stops anything is for the next delivery to find out: some run without a store.
                self._observer.measure(Gauge.STORE_UP, 0)
                logger.debug("store not seen: %s", error)

    async def stop(self) -> None:
        """Look no longer."""
        for looking in (self._probe, self._watching):
            if looking is not None:
                looking.cancel()
                await asyncio.wait({looking})

    async def _look_until_it_answers(self) -> None:
        tries = 0
        while True:
            tries += 1
            await asyncio.sleep(PROBE.pause(tries))
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # a probe that dies would leave the service paused for ever
                self.reason = str(error) or type(error).__name__
                continue
            break
        logger.info("store available again, going on")
        again, self._available_again, self.reason = self._available_again, None, ""
        if again is not None:
            again.set_result(None)
