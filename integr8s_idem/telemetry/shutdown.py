"""Stop an exporter of spans or log records within a limited time, without blocking the event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Final, Protocol

_log: Final = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A provider or an exporter of an OpenTelemetry SDK."""

    def shutdown(self) -> object:
        """Export what is left, and stop.  Blocks."""
        ...


async def shut_down(provider: Stoppable, exporter: Stoppable, timeout: timedelta, *, name: str, what: str) -> None:
    """Let `provider` export what is left, for at most `timeout`, and stop.

    What the collector does not accept in time is lost, and a warning is logged.

    Args:
        name: Prefix of the names of threads.
        what: What is lost, for the warning.
    """
    sent = asyncio.Event()
    # A daemon thread, since the interpreter waits for threads of the loop's executor at exit.
    arguments = (provider, asyncio.get_running_loop(), sent)
    Thread(target=_shut_down, args=arguments, name=f"{name}-close", daemon=True).start()
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            await sent.wait()
    except TimeoutError:
        _log.warning("the last %s were not exported within %g s and are lost", what, timeout.total_seconds())
        # Ends the retries and the thread, since a process may outlive its services.
        Thread(target=exporter.shutdown, name=f"{name}-abort", daemon=True).start()


def _shut_down(provider: Stoppable, loop: asyncio.AbstractEventLoop, sent: asyncio.Event) -> None:
    try:
        provider.shutdown()
    finally:
        # The loop is closed if nobody waits any longer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(sent.set)
