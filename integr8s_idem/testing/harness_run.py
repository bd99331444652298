"""The state of an entered `WorkerHarness`: its world, its workers and its clock."""

from __future__ import annotations

import asyncio
import time as real_time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from integr8s_idem.config import Settings
from integr8s_idem.runtime import Service
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.fast_forward import FastForward, fast_forward
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.memory_broker import MemoryBroker
from integr8s_idem.testing.provider_overrides import Overrides
from integr8s_idem.testing.simulated_processes import processes_in_loop
from integr8s_idem.testing.virtual_time import EPOCH
from integr8s_idem.testing.worker_run import WorkerRun, World

if TYPE_CHECKING:
    from integr8s_idem.testing.sqlite_store import SqliteStore

SIMULATED_LIMIT_SECONDS: Final = 3600.0
"""Limit of simulated time until everything must be settled."""

REAL_LIMIT_SECONDS: Final = 40.0
"""Limit of real time until everything must be settled: a crash on a file of SQLite took 21 on a busy machine."""

TICK_SECONDS: Final = 0.001
"""Real time to wait while a handler waits for something outside the event loop."""


class NotSettledError(AssertionError):
    """The delivered messages do not become settled."""

    def __init__(self, still_open: str, limit: str = "", remedy: str = "") -> None:
        super().__init__(still_open, limit, remedy)
        self.still_open = still_open
        self.limit = limit
        self.remedy = remedy

    def __str__(self) -> str:
        after = f" after {self.limit}, the limit of settled()" if self.limit else ""
        remedy = f" {self.remedy}." if self.remedy else ""
        return f"not settled{after}: {self.still_open}.{remedy} Read more: integr8s-idem errors NotSettledError"


class Running:
    """The workers of an entered harness."""

    def __init__(
        self, settings: Settings, services: Sequence[Service], overrides: Overrides, sqlite: SqliteStore | None
    ) -> None:
        """`sqlite`: the store in a file; if `None`, records are in memory."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def now() -> datetime:
            return EPOCH + timedelta(seconds=loop.time() - began)

        broker = MemoryBroker(lambda: round(now().timestamp() * 1000))
        inner = MemoryIdempotencyRepository(clock=now) if sqlite is None else sqlite.repository
        self.world = World(settings, broker, FlakyStore(inner), overrides, sqlite=sqlite)
        self.publisher = self.world.publisher()
        self.worker_runs: list[WorkerRun] = []
        """All runs of workers; the last one of each service is the current one."""
        self.repeats_all = False
        """Whether to deliver all messages once more when they are settled."""
        self._services = services
        self._loop = loop
        self._time: FastForward
        self._stack = ExitStack()

    async def begin(self) -> None:
        """Start a worker for every service and wait until it has joined its group."""
        self._time = fast_forward()
        self._stack.enter_context(processes_in_loop())
        if self.world.sqlite is not None:
            self._stack.enter_context(self.world.sqlite.connections.watched())
        try:
            self.worker_runs += [WorkerRun(self.world, service, 1) for service in self._services]
            await self.until(lambda: all(worker_run.joined for worker_run in self.worker_runs))
            self.world.overrides.check()
        except BaseException:
            await self.end(drain=False)
            raise

    async def end(self, *, drain: bool = True) -> None:
        """Stop all workers, and clean up after those that crashed."""
        try:
            living = [
                worker_run
                for worker_run in self.worker_runs
                if drain and worker_run.process.running and not worker_run.over
            ]
            for worker_run in living:
                worker_run.stop()
            for worker_run in living:
                await self.until(lambda over=worker_run: over.over)  # type: ignore[misc]  # binds the loop variable
                await worker_run.ended()
        finally:
            for worker_run in self.worker_runs:
                await worker_run.bury()
                await self._close_connections(worker_run)
            if self.world.sqlite is not None:
                await self.world.sqlite.close()
            self._stack.close()

    def topics(self) -> set[str]:
        """Return the topics that the workers read."""
        return {
            topic
            for worker_run in self.worker_runs
            if worker_run.worker is not None
            for topic in worker_run.worker.topics
        }

    def repeat_all(self) -> None:
        """Append all messages of the workers' topics to the broker once more, in order."""
        broker, topics = self.world.broker, self.topics()
        for message in [each for each in broker.messages() if not each.is_copy and each.topic in topics]:
            broker.repeat(message)

    def present(self) -> list[WorkerRun]:
        """Return the current worker run of each service."""
        return list({worker_run.service.name: worker_run for worker_run in self.worker_runs}.values())

    def is_settled(self) -> bool:
        present = self.present()
        return all(
            worker_run.process.running and worker_run.joined and worker_run.at_rest and worker_run.lag == 0
            for worker_run in present
        ) and all(worker_run.at_rest for worker_run in self.worker_runs if worker_run.process.running)

    async def settle(self) -> None:
        """Wait until everything is settled and the outboxes are empty.

        Raises:
            NotSettledError: This does not happen in time.
        """
        limits = self._limits()
        while True:
            await self.until(self.is_settled)
            if await self._has_unsent_events():
                self._check_limits(limits)
                await self._pass_time()
                await self._rest()
            elif self.is_settled() and not self.continue_when_settled():
                return  # nothing was relayed while the outboxes were counted

    async def _has_unsent_events(self) -> bool:
        """Whether an outbox contains events that the relay has not published yet."""
        outboxes = [worker_run.outbox for worker_run in self.present() if worker_run.outbox is not None]
        return any([await outbox.count() for outbox in outboxes])

    def continue_when_settled(self) -> bool:
        """Resume stalled workers, or repeat all messages; return whether there was anything to do."""
        zombies = [worker_run for worker_run in self.worker_runs if worker_run.process.stalled]
        for worker_run in zombies:
            worker_run.process.resume()
        if not zombies and self.repeats_all:
            self.repeats_all = False
            self.repeat_all()
            return True
        return bool(zombies)

    # Time.

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run all tasks, and advance the time when none can run, until `condition` is true.

        Raises:
            NotSettledError: `condition` does not become true in time.
        """
        limits = self._limits()
        while True:
            await self._rest()
            if condition():
                return
            self._check_limits(limits)
            await self._pass_time()

    async def _pass_time(self) -> None:
        """Advance to the next timer, unless something takes real time."""
        if self._is_busy():
            await asyncio.sleep(TICK_SECONDS)
        elif (timer := self._time.next_timer()) is not None:
            self._time.leap(timer - self._loop.time())

    def _limits(self) -> tuple[float, float]:
        """Return the time limits by the clock of the loop and by the real clock."""
        return self._loop.time() + SIMULATED_LIMIT_SECONDS, real_time.monotonic() + REAL_LIMIT_SECONDS

    def _check_limits(self, limits: tuple[float, float]) -> None:
        if self._loop.time() > limits[0]:
            raise NotSettledError(
                self._what_is_open(),
                f"{SIMULATED_LIMIT_SECONDS:,g} simulated seconds",
                "If an event waits for a longer pause, pass it with `await harness.advance(seconds)`",
            )
        if real_time.monotonic() > limits[1]:
            raise NotSettledError(self._what_is_open(), f"{REAL_LIMIT_SECONDS:g} seconds of real time")

    def _is_busy(self) -> bool:
        """Whether something may be running outside the event loop."""
        if any(worker_run.busy for worker_run in self.worker_runs if worker_run.process.running):
            return True
        sqlite = self.world.sqlite
        return sqlite is not None and (
            sqlite.connections.is_in_use() or any(worker_run.starting for worker_run in self.worker_runs)
        )

    async def _close_connections(self, worker_run: WorkerRun) -> None:
        if self.world.sqlite is not None:
            await self.world.sqlite.connections.close_of(worker_run.process)

    async def advance(self, seconds: float) -> None:
        """Advance by `seconds`, timer by timer."""
        end = self._loop.time() + seconds
        while True:
            await self._rest()
            timer = self._time.next_timer()
            if timer is None or timer >= end:
                break
            self._time.leap(timer - self._loop.time())
        self._time.leap(end - self._loop.time())
        await self._rest()

    async def _rest(self) -> None:
        await self._time.rest()
        for worker_run in self.worker_runs:
            if worker_run.over and not self._is_ending(worker_run):
                await worker_run.ended()  # raises its error
        for worker_run in self.present():
            if not worker_run.process.running:
                worker_run.lose()
                if worker_run.process.dead:
                    await self._close_connections(worker_run)
                if worker_run not in self.present():
                    continue  # another task that waits has replaced it meanwhile
                self.worker_runs.append(WorkerRun(self.world, worker_run.service, worker_run.number + 1))
                await self._time.rest()

    def _is_ending(self, worker_run: WorkerRun) -> bool:
        return worker_run.is_stopping or worker_run.process.dead

    def _what_is_open(self) -> str:
        states = []
        for worker_run in self.present():
            if worker_run.worker is None or not worker_run.joined:
                states.append(f"{worker_run.process.name} has not joined")
                continue
            report = worker_run.worker.report()
            states.append(
                f"{worker_run.process.name} is {report.state}{f' ({report.reason})' if report.reason else ''}, "
                f"{worker_run.lag} uncommitted messages, {worker_run.busy} running handlers, "
                f"{report.in_flight} events in flight"
            )
        down = ", ".join(sorted(self.world.store.down))
        return "; ".join(states) + (f"; store operations switched off by the test: {down}" if down else "")
