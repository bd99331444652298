"""Run several worker processes as one: start them, restart those that end, drain them, and report their sum.

Workers are started as new interpreters, never forked, and each is what `integr8s-idem run` starts alone.  They share
nothing but this process: Kafka divides the partitions among them as among workers on different machines.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from integr8s_idem.config import TelemetrySettings
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.runtime.restarts import Restarts, drained_status, ending, exit_status
from integr8s_idem.telemetry.merged_metrics import (
    RESTARTS,
    SUPERVISOR_HELP,
    WORKER_PROCESSES,
    MergedMetrics,
    plain_families,
)
from integr8s_idem.worker.health import Health, ProcessHealth, ServiceHealth

logger: Final = logging.getLogger(__name__)

_STARTING: Final[Any] = {"services": []}
"""Health of a process until it answers for the first time: the start of Python can take longer than an answer."""

_SUPERVISOR: Final = 0
"""The number of this process among those whose metrics are added."""


class Process(Protocol):
    """A running worker process."""

    @property
    def pid(self) -> int: ...

    @property
    def was_ready(self) -> bool:
        """Whether one of its services has polled its topics; final when `wait` returns."""

    async def wait(self) -> int:
        """Wait for its end, and return its exit status; -N if signal N killed it."""

    async def ask(self, question: str) -> Any:
        """Return the answer to `health` or `metrics`, or `None`."""

    def order(self, word: str) -> None:
        """Send `drain` or `stop`."""

    def kill(self) -> None:
        """Kill it."""


class Launcher(Protocol):
    """Starts worker processes."""

    async def start(self, number: int) -> Process:
        """Start the worker process `number`.

        Raises:
            OSError: The system cannot start another process.
        """


class _End(NamedTuple):
    """The end of a process, or of an attempt to start one."""

    returncode: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class _Slot:
    """The place of one worker process, which several processes occupy one after the other."""

    def __init__(self, number: int, restarts: Restarts) -> None:
        self.number = number
        self.restarts = restarts
        self.process: Process | None = None
        self.was_ready = False
        """Whether the last process was ready before it ended."""
        self.reason = "starting"
        """Why no process runs."""
        self.is_live = True
        """Whether it is live while no process runs."""
        self.answer: Any = None
        """Its last health."""

    @property
    def may_work(self) -> bool:
        """Whether its process is ready, or is starting and has not failed to start before."""
        return self.process is not None and (self.process.was_ready or not self.restarts.failed_starts)

    def health(self, services: Sequence[str]) -> tuple[ProcessHealth, dict[str, ServiceHealth]]:
        """Return the health of the process, and that of its services by name."""
        if self.process is None:
            return self._without_services(services, pid=None, live=self.is_live, reason=self.reason)
        if self.answer is None:
            return self._without_services(services, pid=self.process.pid, live=False, reason="does not answer")
        if not self.answer["services"]:
            return self._without_services(services, pid=self.process.pid, live=True, reason="starting")
        found = {each["name"]: ServiceHealth(**each) for each in self.answer["services"]}
        live, ready = (all(getattr(each, what) for each in found.values()) for what in ("live", "ready"))
        reason = "; ".join(f"{each.name}: {each.reason}" for each in found.values() if each.reason)
        return ProcessHealth(self.number, self.process.pid, live, ready, reason), found

    def _without_services(
        self, services: Sequence[str], *, pid: int | None, live: bool, reason: str
    ) -> tuple[ProcessHealth, dict[str, ServiceHealth]]:
        found = {name: ServiceHealth(name, live, ready=False, reason=reason) for name in services}
        return ProcessHealth(self.number, pid, live, False, reason), found


class Supervisor:
    """Runs worker processes until a signal.

    Args:
        launcher: Starts them.
        number: How many run at the same time.
        services: Names of the services that each of them runs.
        telemetry: Settings of the endpoints.
        grace_seconds: Time to drain, after which remaining processes are killed.
        restarts: Creates the policy for one process.
    """

    def __init__(
        self,
        launcher: Launcher,
        number: int,
        services: Sequence[str],
        telemetry: TelemetrySettings,
        *,
        grace_seconds: float,
        restarts: Callable[[], Restarts] = Restarts,
    ) -> None:
        self._launcher = launcher
        self._slots = [_Slot(each, restarts()) for each in range(1, number + 1)]
        self._services = services
        self._telemetry = telemetry
        self._grace_seconds = grace_seconds
        self._stops = 0
        self._stopping = asyncio.Event()
        self._status = 0
        self._metrics = MergedMetrics()
        self._own = CollectorRegistry()
        ProcessCollector(registry=self._own)
        self._restarted = 0

    async def run(self) -> int:
        """Run until stopped, and return the highest exit status of the processes that ended then: 0 after draining.

        Raises:
            SettingsError: The address of the metrics endpoint is in use.
        """
        async with AsyncExitStack() as stack:
            if self._telemetry.metrics_enabled:
                endpoints = await stack.enter_async_context(self._endpoints())
                logger.info("metrics and health on http://%s:%d", self._telemetry.metrics_host, endpoints.port)
            stack.enter_context(self._signals())
            async with asyncio.TaskGroup() as slots:
                for slot in self._slots:
                    slots.create_task(self._occupy(slot))
        logger.info("all worker processes have ended; exit status %d", self._status)
        return self._status

    def stop(self) -> None:
        """Drain at the first call; at the second, cancel running handlers; at the third, kill the processes."""
        self._stops += 1
        if self._stops == 1:
            logger.info("draining %d worker processes; a second signal stops immediately", len(self._running()))
            self._drain()
        elif self._stops == 2:
            logger.warning("stopping immediately; a third signal kills the worker processes")
            for process in self._running():
                process.order("stop")
        else:
            self._kill()

    # Processes.

    async def _occupy(self, slot: _Slot) -> None:
        """Keep a process running until the supervisor stops or gives up."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            end = await self._run_process(slot)
            lasted = loop.time() - started
            if self._stopping.is_set():
                self._status = max(self._status, drained_status(end.returncode))
                slot.reason = "stopped"
                return
            others_may_work = any(other.may_work for other in self._slots)
            pause = slot.restarts.pause_after(
                exit_status(end.returncode), was_ready=slot.was_ready, lasted=lasted, others_may_work=others_may_work
            )
            slot.reason, slot.is_live = str(end), False
            if pause is None:
                self._give_up(slot, end)
                return
            await self._pause(slot, end, pause)

    async def _run_process(self, slot: _Slot) -> _End:
        """Run one process to its end."""
        try:
            process = await self._launcher.start(slot.number)
        except OSError as error:
            slot.was_ready = False
            return _End(1, "cannot be started", error.strerror or str(error))
        logger.info("worker process %d started: process id %d", slot.number, process.pid)
        slot.process, slot.answer = process, _STARTING
        if self._stopping.is_set():
            process.order("drain")
        try:
            returncode = await process.wait()
            return _End(returncode, "ended", ending(returncode))
        finally:
            slot.process, slot.was_ready = None, process.was_ready
            self._metrics.retire(slot.number)

    async def _pause(self, slot: _Slot, end: _End, pause: float) -> None:
        """Wait before the next start."""
        logger.error("worker process %d %s; the next start is in %.2f s", slot.number, end, pause)
        try:
            async with asyncio.timeout(pause):
                await self._stopping.wait()
        except TimeoutError:
            self._restarted += 1
            slot.reason, slot.is_live = "starting", True

    def _give_up(self, slot: _Slot, end: _End) -> None:
        status = exit_status(end.returncode) or 1
        logger.error(
            "worker process %d failed before it was ready: %s; restarting it would not help. "
            "Draining the others, then exiting with status %d",
            slot.number,
            end.why,
            status,
        )
        self._status = status
        self._drain()

    def _drain(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        for process in self._running():
            process.order("drain")
        asyncio.get_running_loop().call_later(self._grace_seconds, self._kill)

    def _kill(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                logger.error("killing worker process %d, which has not ended", slot.number)
                slot.process.kill()

    def _running(self) -> list[Process]:
        return [slot.process for slot in self._slots if slot.process is not None]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT)
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    # Endpoints.

    def _endpoints(self) -> Endpoints:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)
        return Endpoints(
            self._telemetry.metrics_host,
            self._telemetry.metrics_port,
            health=self.health,
            registry=registry,
            refresh=self.refresh,
        )

    async def refresh(self, path: str) -> None:
        """Update the metrics or the health, by asking all processes."""
        update = self._update_metrics if path == "/metrics" else self._update_health
        await asyncio.gather(*(update(slot, slot.process) for slot in self._slots if slot.process is not None))
        if path == "/metrics":
            self._metrics.update(_SUPERVISOR, plain_families([*self._own.collect(), *self._collect()]))

    async def _update_health(self, slot: _Slot, process: Process) -> None:
        answer = await process.ask("health")
        if slot.process is process and (answer is not None or slot.answer is not _STARTING):
            slot.answer = answer

    async def _update_metrics(self, slot: _Slot, process: Process) -> None:
        families = await process.ask("metrics")
        # Without an answer, the last ones are still the best known.
        if slot.process is process and families is not None:
            self._metrics.update(slot.number, families)

    def _collect(self) -> Iterator[Metric]:
        """Return the metrics that only a supervisor has."""
        running = len(self._running())
        yield GaugeMetricFamily(WORKER_PROCESSES, SUPERVISOR_HELP[WORKER_PROCESSES], value=running)
        yield CounterMetricFamily(RESTARTS, SUPERVISOR_HELP[RESTARTS], value=self._restarted)

    def health(self) -> Health:
        """Return the last known health of each service, in all processes, and of the processes."""
        found = [slot.health(self._services) for slot in self._slots]
        services = tuple(
            _combined(name, [(process, own.get(name)) for process, own in found]) for name in self._services
        )
        return Health(services, tuple(process for process, _ in found))


def _combined(name: str, found: Sequence[tuple[ProcessHealth, ServiceHealth | None]]) -> ServiceHealth:
    """Return the health of a service: live or ready if it is in each process."""
    known = [(process.worker_process, own) for process, own in found if own is not None]
    by_reason: dict[str, list[str]] = {}
    for number, own in known:
        by_reason.setdefault(own.reason, []).append(str(number))
    reasons = [f"{_named(numbers)}: {reason}" for reason, numbers in by_reason.items() if reason]
    return ServiceHealth(
        name,
        live=all(own.live for _, own in known),
        ready=all(own.ready for _, own in known),
        reason="; ".join(reasons),
    )


def _named(numbers: Sequence[str]) -> str:
    return f"worker process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"
