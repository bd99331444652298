"""The store's gate: closed while the store gives no answer, so that an outage empties no topic anywhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from integr8s_idem.errors import StoreError
from integr8s_idem.records import StoreHealth
from integr8s_idem.telemetry import Gauge, Observer
from integr8s_idem.worker.retries import Backoff

logger = logging.getLogger(__name__)

PROBE = Backoff(initial=0.2, longest=2.0)
"""Pauses between two looks at a store that is down: seconds after it is back, work goes on."""


class StoreGate:
    """Open while the store answers.  Whoever finds it silent closes the gate; a probe opens it again."""

    def __init__(self, ping: Callable[[], Awaitable[StoreHealth]] | None, observer: Observer) -> None:
        """`ping`: `None` for a service without a store, whose gate is always open."""
        self._ping = ping
        self._observer = observer
        self._opened: asyncio.Future[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        self.reason = ""
        """Why it is closed."""

    @property
    def is_open(self) -> bool:
        return self._opened is None

    def close(self, error: StoreError) -> None:
        """The store has failed us: stop everything until it answers again."""
        if self._opened is not None or self._ping is None:
            return
        self.reason = str(error)
        logger.warning("store unavailable, pausing: %s", error)
        self._observer.measure(Gauge.STORE_UP, 0)
        loop = asyncio.get_running_loop()
        self._opened = loop.create_future()
        self._probe = loop.create_task(self._look_until_it_answers())

    async def wait(self, *, unless: asyncio.Future[None]) -> None:
        """Return once the gate is open, or `unless` is done."""
        if self._opened is not None:
            await asyncio.wait({self._opened, unless}, return_when=asyncio.FIRST_COMPLETED)

    async def wait_out(self, error: StoreError) -> None:
        """The store has failed us with work that is done: return when it is back."""
        self.close(error)
        if self._opened is not None:
            await asyncio.wait({self._opened})

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

    async def stop(self) -> None:
        """Look no longer."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})

    async def _look_until_it_answers(self) -> None:
        tries = 0
        while True:
            tries += 1
            await asyncio.sleep(PROBE.pause(tries))
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # a probe that dies would leave the gate closed for ever
                self.reason = str(error) or type(error).__name__
                continue
            break
        logger.info("store available again, going on")
        opened, self._opened, self.reason = self._opened, None, ""
        if opened is not None:
            opened.set_result(None)
