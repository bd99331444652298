"""The connection of a worker process to its supervisor, seen by the worker.

A socket pair, inherited at the start.  The supervisor sends a word on a line: `drain` or `stop`, or a question,
`health` or `metrics`, which is answered with a line of JSON.  The end of the stream means that the supervisor is dead,
however it died, and a worker does not outlive its supervisor.  A thread reads the socket, so that a blocked event loop
or a slow import does not hide this.  A worker announces that it is ready before it handles its first event, which may
kill it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from prometheus_client import REGISTRY

from integr8s_idem.telemetry.merged_metrics import plain_families
from integr8s_idem.worker.health import Health

_log: Final = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 2.0
"""Timeout for the event loop to report the health of the services."""


class Drainable(Protocol):
    """The services of this process."""

    def health(self) -> Health:
        """Return their health; called in the event loop."""
        ...

    def drain(self) -> None:
        """Start draining; does nothing if they already drain."""
        ...

    def stop_now(self) -> None:
        """Cancel running handlers."""
        ...


@dataclass(frozen=True)
class _Attached:
    services: Drainable
    loop: asyncio.AbstractEventLoop


class SupervisorLink:
    """The link of this process; `start` it before anything that takes long.

    Args:
        number: Number of this worker process.
        fd: The inherited file descriptor of the socket.
        grace_seconds: Time to drain after the supervisor has died; then this process exits.
        end_process: Exits at once, from any thread, with a status.
    """

    def __init__(
        self, number: int, fd: int, *, grace_seconds: float, end_process: Callable[[int], object] = os._exit
    ) -> None:
        os.set_inheritable(fd, False)  # for the children of handlers
        self.number = number
        self._socket = socket.socket(fileno=fd)
        self.grace_seconds = grace_seconds
        self._end_process = end_process
        self._attached: _Attached | None = None
        self._sending = threading.Lock()
        self._is_ready = False

    def start(self) -> None:
        """Start answering the supervisor."""
        threading.Thread(target=self._serve, name="integr8s-idem supervisor link", daemon=True).start()

    @contextmanager
    def attached(self, services: Drainable) -> Iterator[None]:
        """Let the supervisor see and stop `services` inside the block, in the running event loop.

        Signals drain as well, but a second one does not stop the services at once: systemd and containers send SIGTERM
        to the supervisor and to the workers.
        """
        loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT)
        for number in caught:
            loop.add_signal_handler(number, services.drain)
        self._attached = _Attached(services, loop)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def announce_ready(self) -> None:
        """Tell the supervisor that a service has polled, unless it knows; returns when the line is in the socket."""
        if self._is_ready:
            return
        self._is_ready = True
        with suppress(OSError):  # the supervisor is dead, which the thread notices
            self._send(json.dumps({"ready": True}))

    def _serve(self) -> None:
        try:
            self._obey()
            self._outlive_nobody()
        except Exception:  # noqa: BLE001 -- without this thread, the process could outlive its supervisor
            traceback.print_exc()  # logging may be what failed
        self._end_process(1)

    def _obey(self) -> None:
        """Answer the supervisor and follow its orders until it is dead."""
        with suppress(ConnectionError), self._socket, self._socket.makefile("rb") as stream:
            for line in stream:
                word = line.decode().strip()
                if word in ("drain", "stop"):
                    self._order(word)
                else:
                    self._send(self._answer(word))

    def _send(self, line: str) -> None:
        with self._sending:
            self._socket.sendall(line.encode() + b"\n")

    def _answer(self, question: str) -> str:
        """Return the answer as JSON; it is `null` if there is none."""
        try:
            answer = self._health() if question == "health" else plain_families(REGISTRY.collect())
            return json.dumps({"question": question, "answer": answer})
        except Exception:  # noqa: BLE001 -- a collector can raise or return anything, and orders must be read
            _log.exception("cannot answer the supervisor: %s", question)
            return json.dumps({"question": question, "answer": None})

    def _health(self) -> Any:
        if self._attached is None:
            return {"services": []}
        if self._attached.loop.is_closed():  # the process is about to exit
            return None
        asking = asyncio.run_coroutine_threadsafe(_health_of(self._attached.services), self._attached.loop)
        try:
            return {"services": [asdict(service) for service in asking.result(HEALTH_SECONDS).services]}
        except TimeoutError:
            asking.cancel()
            return None

    def _order(self, word: str) -> None:
        if self._attached is None:
            self._end_process(0)  # still starting: there is nothing to drain
            return
        services, loop = self._attached.services, self._attached.loop
        try:
            loop.call_soon_threadsafe(services.drain if word == "drain" else services.stop_now)
        except RuntimeError:  # the loop is closed: the process is about to exit, unless a thread does not end
            if word == "stop":
                self._end_process(1)

    def _outlive_nobody(self) -> None:
        """Drain, since the supervisor has died, and return at the end of the grace period."""
        if self._attached is None:
            return
        self._order("drain")
        _log.error("the supervisor of this worker process has died: draining")
        time.sleep(self.grace_seconds)
        _log.error("exiting with handlers that are still running")


async def _health_of(services: Drainable) -> Health:
    return services.health()
