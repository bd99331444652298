"""A supervisor with worker processes of a test, in virtual time."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from integr8s_idem.config import TelemetrySettings
from integr8s_idem.runtime.restarts import Restarts
from integr8s_idem.runtime.supervisor import Supervisor
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.health import ServiceHealth

GRACE = 80.0
WITHOUT_ENDPOINTS = TelemetrySettings(metrics_enabled=False)
READY = ServiceHealth("billing", live=True, ready=True)
JOINING = ServiceHealth("billing", live=True, ready=False, reason="has not joined its group")


class FakeProcess:
    """A worker process that ends when the test says so, and 1 s after an order by default."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.health: ServiceHealth | None = READY
        self.was_ready = True
        self.obeys = {"drain": 0, "stop": 1}
        self.orders: list[str] = []
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self, returncode: int) -> None:
        if not self._ended.done():
            self._ended.set_result(returncode)

    async def wait(self) -> int:
        return await self._ended

    async def ask(self, question: str) -> Any:
        if self.health is None:
            await asyncio.sleep(3)
            return None
        return {"services": [asdict(self.health)]} if question == "health" else []

    def order(self, word: str) -> None:
        self.orders.append(word)
        if word in self.obeys:
            asyncio.get_running_loop().call_later(1, self.end, self.obeys[word])

    def kill(self) -> None:
        self.orders.append("kill")
        self.end(-9)


@dataclass
class FakeLauncher:
    """Starts processes that `prepare` changes."""

    prepare: Callable[[FakeProcess], None] = lambda process: None
    started: list[tuple[float, int, FakeProcess]] = field(default_factory=list)

    async def start(self, number: int) -> FakeProcess:
        process = FakeProcess(100 + len(self.started))
        self.started.append((asyncio.get_running_loop().time(), number, process))
        self.prepare(process)
        return process

    @property
    def processes(self) -> list[FakeProcess]:
        return [process for _, _, process in self.started]


@asynccontextmanager
async def running(launcher: FakeLauncher, number: int = 2) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    supervisor = Supervisor(
        launcher,
        number,
        ["billing"],
        WITHOUT_ENDPOINTS,
        grace_seconds=GRACE,
        restarts=lambda: Restarts(pause=float),
    )
    task = asyncio.create_task(supervisor.run())
    await asyncio.sleep(2)
    try:
        yield supervisor, task
    finally:
        task.cancel()
        await asyncio.wait({task})


def now() -> float:
    return asyncio.get_running_loop().time()


def ends_at_start(status: int) -> Callable[[FakeProcess], None]:
    def prepare(process: FakeProcess) -> None:
        process.health, process.was_ready = JOINING, False
        asyncio.get_running_loop().call_soon(process.end, status)

    return prepare


@virtual_time
async def test_a_signal_drains_all_processes_and_the_exit_status_is_0() -> None:
    launcher = FakeLauncher()
    async with running(launcher, 3) as (supervisor, task):
        supervisor.stop()

        assert await task == 0
    assert [process.orders for process in launcher.processes] == [["drain"]] * 3


@virtual_time
async def test_a_second_signal_stops_at_once_and_the_exit_status_is_the_highest() -> None:
    def slow(process: FakeProcess) -> None:
        process.obeys = {"stop": 1} if process.pid == 100 else {"drain": 0}

    launcher = FakeLauncher(slow)
    async with running(launcher) as (supervisor, task):
        supervisor.stop()
        await asyncio.sleep(5)
        supervisor.stop()

        assert await task == 1
    assert [process.orders for process in launcher.processes] == [["drain", "stop"], ["drain"]]


@virtual_time
async def test_a_third_signal_kills() -> None:
    launcher = FakeLauncher(lambda process: process.obeys.clear())
    async with running(launcher) as (supervisor, task):
        before = now()
        for _ in range(3):
            supervisor.stop()

        assert await task == 137
        assert now() == before


@virtual_time
async def test_processes_that_do_not_drain_are_killed_after_the_grace_period() -> None:
    launcher = FakeLauncher(lambda process: process.obeys.clear())
    async with running(launcher) as (supervisor, task):
        before = now()
        supervisor.stop()

        assert await task == 137
        assert now() - before == pytest.approx(GRACE)


@virtual_time
async def test_a_process_that_dies_is_started_again_and_the_log_says_why_and_when(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher = FakeLauncher()
    async with running(launcher) as (supervisor, task):
        with caplog.at_level(logging.INFO):
            launcher.processes[1].end(-9)
            await asyncio.sleep(0.9)
            assert len(launcher.started) == 2
            await asyncio.sleep(0.2)
        supervisor.stop()
        await task

    assert [number for _, number, _ in launcher.started] == [1, 2, 2]
    assert "worker process 2 ended: killed by SIGKILL; the next start is in 1.00 s" in caplog.text
    assert launcher.processes[0].orders == ["drain"]


@virtual_time
async def test_a_process_that_exits_unasked_is_started_again() -> None:
    launcher = FakeLauncher()
    async with running(launcher):
        launcher.processes[0].end(0)
        await asyncio.sleep(2)

        assert len(launcher.started) == 3


@virtual_time
async def test_a_death_before_the_signal_does_not_change_the_exit_status() -> None:
    launcher = FakeLauncher()
    async with running(launcher) as (supervisor, task):
        launcher.processes[0].end(-9)
        await asyncio.sleep(0.1)
        launcher.processes[1].end(0)
        supervisor.stop()
        before = now()

        assert await task == 0
        assert now() == before, "the pause ends with the signal"
    assert len(launcher.started) == 2, "no process is started while draining"


@virtual_time
async def test_a_process_that_starts_while_the_others_drain_drains_as_well() -> None:
    gate = asyncio.Event()

    class Slow(FakeLauncher):
        async def start(self, number: int) -> FakeProcess:
            if number == 2:
                await gate.wait()
            return await super().start(number)

    launcher = Slow()
    async with running(launcher) as (supervisor, task):
        supervisor.stop()
        gate.set()

        assert await task == 0
    assert [process.orders for process in launcher.processes] == [["drain"], ["drain"]]


@virtual_time
async def test_invalid_settings_of_a_worker_end_the_supervisor_with_its_status() -> None:
    launcher = FakeLauncher(ends_at_start(2))
    async with running(launcher) as (_, task):
        assert await task == 2
    assert len(launcher.started) == 2, "none was started again"


@virtual_time
async def test_invalid_settings_of_one_worker_drain_the_others() -> None:
    def second_is_wrong(process: FakeProcess) -> None:
        if process.pid == 101:
            ends_at_start(2)(process)

    launcher = FakeLauncher(second_is_wrong)
    async with running(launcher) as (_, task):
        assert await task == 2
    assert launcher.processes[0].orders == ["drain"]


@virtual_time
async def test_workers_that_always_fail_at_start_end_the_supervisor_after_a_few_attempts() -> None:
    launcher = FakeLauncher(ends_at_start(1))
    async with running(launcher, 1) as (_, task):
        assert await task == 1
    assert [at for at, _, _ in launcher.started] == [0, 1, 3]


@virtual_time
async def test_a_worker_that_always_fails_at_start_does_not_end_those_that_work() -> None:
    def second_is_wrong(process: FakeProcess) -> None:
        if process.pid != 100:
            asyncio.get_running_loop().call_later(1, ends_at_start(1), process)
            process.health, process.was_ready = JOINING, False

    launcher = FakeLauncher(second_is_wrong)
    async with running(launcher) as (_, task):
        await asyncio.sleep(100)

        assert not task.done()
        assert len(launcher.started) > 5


@virtual_time
async def test_workers_that_die_as_soon_as_they_are_ready_are_always_started_again() -> None:
    """An event that kills its worker is given up after several restarts, and there can be many such events."""
    launcher = FakeLauncher(lambda process: process.end(-9))
    async with running(launcher) as (_, task):
        await asyncio.sleep(100)

        assert not task.done()
        assert len(launcher.started) > 10


@virtual_time
async def test_a_process_that_has_not_answered_yet_is_starting() -> None:
    """The start of Python alone takes seconds if many processes start at the same time."""

    def slow(process: FakeProcess) -> None:
        process.health = None

    launcher = FakeLauncher(slow)
    async with running(launcher, 1) as (supervisor, _):
        await supervisor.refresh("/healthz")
        starting = supervisor.health()
        launcher.processes[0].health = READY
        await supervisor.refresh("/healthz")
        launcher.processes[0].health = None
        await supervisor.refresh("/healthz")
        stalled = supervisor.health()

    assert (starting.live, starting.ready, starting.services[0].reason) == (True, False, "worker process 1: starting")
    assert (stalled.live, stalled.services[0].reason) == (False, "worker process 1: does not answer")


@virtual_time
async def test_a_process_that_cannot_be_created_is_tried_again() -> None:
    class Full(FakeLauncher):
        refused = False

        async def start(self, number: int) -> FakeProcess:
            if number == 2 and not self.refused:
                self.refused = True
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            return await super().start(number)

    launcher = Full()
    async with running(launcher):
        assert [(at, number) for at, number, _ in launcher.started] == [(0, 1), (1, 2)]


@virtual_time
async def test_processes_that_cannot_be_created_do_not_end_those_that_are_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def starting(process: FakeProcess) -> None:
        process.was_ready = False

    class Full(FakeLauncher):
        refused = 0

        async def start(self, number: int) -> FakeProcess:
            if number > 1:
                self.refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return await super().start(number)

    launcher = Full(starting)
    async with running(launcher) as (supervisor, task):
        await asyncio.sleep(100)
        assert launcher.refused > 5
        assert not task.done()
        assert supervisor.health().processes[1].reason == "cannot be started: Too many open files"

        launcher.processes[0].end(1)
        assert await task == 1
    assert "worker process 2 cannot be started: Too many open files; the next start is in 1.00 s" in caplog.text


@virtual_time
async def test_health_is_good_only_if_that_of_all_processes_is() -> None:
    launcher = FakeLauncher()
    async with running(launcher) as (supervisor, _):
        await supervisor.refresh("/readyz")
        good = supervisor.health()
        launcher.processes[1].health = JOINING
        await supervisor.refresh("/readyz")
        joining = supervisor.health()
        launcher.processes[1].health = None
        await supervisor.refresh("/healthz")
        stalled = supervisor.health()
        launcher.processes[1].end(-11)
        await asyncio.sleep(0.1)
        dead = supervisor.health()

    assert (good.live, good.ready) == (True, True)
    assert (joining.live, joining.ready) == (True, False)
    assert joining.services[0].reason == "worker process 2: has not joined its group"
    assert [each.reason for each in joining.processes] == ["", "billing: has not joined its group"]
    assert (stalled.live, stalled.processes[1].reason) == (False, "does not answer")
    assert (dead.live, dead.services[0].reason) == (False, "worker process 2: ended: killed by SIGSEGV")
    assert [(each.worker_process, each.pid, each.ready) for each in dead.processes] == [
        (1, 100, True),
        (2, None, False),
    ]


@virtual_time
async def test_a_reason_that_all_processes_share_is_given_once() -> None:
    def joining(process: FakeProcess) -> None:
        process.health = JOINING

    async with running(FakeLauncher(joining)) as (supervisor, _):
        await supervisor.refresh("/readyz")

        assert supervisor.health().services[0].reason == "worker processes 1, 2: has not joined its group"
