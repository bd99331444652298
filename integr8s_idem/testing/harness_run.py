"""What a `WorkerHarness` has while it runs: a world, the workers in it, and the time that leaps for them."""

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

PATIENCE_SECONDS: Final = 3600.0
"""Of leaping time, in which everything must be settled."""

REAL_PATIENCE_SECONDS: Final = 20.0
"""Of the test's own time."""

TICK_SECONDS: Final = 0.001
"""How long to wait for a handler that waits for something outside of the event loop."""


class NotSettledError(AssertionError):
    """What was delivered does not come to an end."""

    def __init__(self, still_open: str) -> None:
        super().__init__(still_open)
        self.still_open = still_open

    def __str__(self) -> str:
        return f"not settled: {self.still_open}. Read more: integr8s-idem errors NotSettledError"


class Running:
    """Workers under way."""

    def __init__(
        self, settings: Settings, services: Sequence[Service], overrides: Overrides, sqlite: SqliteStore | None
    ) -> None:
        """`sqlite`: the store in a file; records are in memory if there is none."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def now() -> datetime:
            return EPOCH + timedelta(seconds=loop.time() - began)

        broker = MemoryBroker(lambda: round(now().timestamp() * 1000))
        inner = MemoryIdempotencyRepository(clock=now) if sqlite is None else sqlite.repository
        self.world = World(settings, broker, FlakyStore(inner), overrides, sqlite=sqlite)
        self.publisher = self.world.publisher()
        self.lives: list[WorkerRun] = []
        """The present one of each service last."""
        self.repeats_all = False
        """Everything is to be delivered once more when it is settled."""
        self._services = services
        self._loop = loop
        self._time: FastForward
        self._stack = ExitStack()

    async def begin(self) -> None:
        """Let every service join its group."""
        self._time = fast_forward()
        self._stack.enter_context(processes_in_loop())
        if self.world.sqlite is not None:
            self._stack.enter_context(self.world.sqlite.connections.watched())
        try:
            self.lives += [WorkerRun(self.world, service, 1) for service in self._services]
            await self.until(lambda: all(life.joined for life in self.lives))
            self.world.overrides.check()
        except BaseException:
            await self.end(drain=False)
            raise

    async def end(self, *, drain: bool = True) -> None:
        """Let every worker end, and clear away what is left of those that died."""
        try:
            living = [life for life in self.lives if drain and life.process.running and not life.over]
            for life in living:
                life.stop()
            for life in living:
                await self.until(lambda over=life: over.over)  # type: ignore[misc]  # bound to this one
                await life.ended()
        finally:
            for life in self.lives:
                await life.process.bury()
                await self._close_connections(life)
            self._stack.close()

    def topics(self) -> set[str]:
        """Those that are read here."""
        return {topic for life in self.lives if life.worker is not None for topic in life.worker.topics}

    def repeat_all(self) -> None:
        """Put everything into the broker once more that is read here, in its order."""
        broker, topics = self.world.broker, self.topics()
        for message in [each for each in broker.messages() if not each.is_copy and each.topic in topics]:
            broker.repeat(message)

    def present(self) -> list[WorkerRun]:
        """The life of each service that counts."""
        return list({life.service.name: life for life in self.lives}.values())

    def is_settled(self) -> bool:
        present = self.present()
        return all(
            life.process.running and life.joined and life.at_rest and life.behind == 0 for life in present
        ) and all(life.at_rest for life in self.lives if life.process.running)

    async def settle(self) -> None:
        """Return once everything is settled, and the outboxes are empty.

        Raises:
            NotSettledError: That does not happen.
        """
        limits = self._limits()
        while True:
            await self.until(self.is_settled)
            if await self._waits_to_be_sent():
                self._check_patience(limits)
                await self._pass_time()
                await self._rest()
            elif not self.go_on():
                return

    async def _waits_to_be_sent(self) -> bool:
        """Whether a transaction has left events that no relay has published yet."""
        outboxes = [life.outbox for life in self.present() if life.outbox is not None]
        return any([await outbox.count() for outbox in outboxes])

    def go_on(self) -> bool:
        """All is settled: what was to happen then happens now.  Whether there was something."""
        zombies = [life for life in self.lives if life.process.stalled]
        for life in zombies:
            life.process.resume()
        if not zombies and self.repeats_all:
            self.repeats_all = False
            self.repeat_all()
            return True
        return bool(zombies)

    # Time.

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let everything go on that can, and time leap where nothing can, until it is so.

        Raises:
            NotSettledError: It never is.
        """
        limits = self._limits()
        while True:
            await self._rest()
            if condition():
                return
            self._check_patience(limits)
            await self._pass_time()

    async def _pass_time(self) -> None:
        """Leap to the next timer, unless something goes on that takes real time."""
        if self._is_busy():
            await asyncio.sleep(TICK_SECONDS)
        elif (timer := self._time.next_timer()) is not None:
            self._time.leap(timer - self._loop.time())

    def _limits(self) -> tuple[float, float]:
        """When patience ends: by the clock of the loop, and by that of the test."""
        return self._loop.time() + PATIENCE_SECONDS, real_time.monotonic() + REAL_PATIENCE_SECONDS

    def _check_patience(self, limits: tuple[float, float]) -> None:
        if self._loop.time() > limits[0] or real_time.monotonic() > limits[1]:
            raise NotSettledError(self._what_is_open())

    def _is_busy(self) -> bool:
        """Whether something goes on outside of the event loop, for all that one can know."""
        if any(life.busy for life in self.lives if life.process.running):
            return True
        sqlite = self.world.sqlite
        return sqlite is not None and (sqlite.connections.is_in_use() or any(life.starting for life in self.lives))

    async def _close_connections(self, life: WorkerRun) -> None:
        if self.world.sqlite is not None:
            await self.world.sqlite.connections.close_of(life.process)

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, timer by timer."""
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
        for life in self.lives:
            if life.over and not self._is_ending(life):
                await life.ended()  # raises what it ended by
        for life in self.present():
            if not life.process.running:
                life.lose()
                if life.process.dead:
                    await self._close_connections(life)
                self.lives.append(WorkerRun(self.world, life.service, life.number + 1))
                await self._time.rest()

    def _is_ending(self, life: WorkerRun) -> bool:
        return life.told_to_stop or life.process.dead

    def _what_is_open(self) -> str:
        told = []
        for life in self.present():
            if life.worker is None or not life.joined:
                told.append(f"{life.process.name} has not joined")
                continue
            report = life.worker.report()
            told.append(
                f"{life.process.name} is {report.state}{f' ({report.reason})' if report.reason else ''}, "
                f"{life.behind} messages behind, {life.busy} handlers running, {report.in_flight} events in hand"
            )
        down = ", ".join(sorted(self.world.store.down))
        return "; ".join(told) + (f"; the store is made not to answer: {down}" if down else "")
