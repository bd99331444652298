"""The link of a worker process to its supervisor, in one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from integr8s_idem.runtime import supervisor_link
from integr8s_idem.runtime.supervisor_link import SupervisorLink
from integr8s_idem.worker.health import Health, ServiceHealth
from tests.support.conditions import eventually

READY = ServiceHealth("billing", live=True, ready=True)


@dataclass
class FakeServices:
    calls: list[str] = field(default_factory=list)

    def health(self) -> Health:
        return Health((READY,))

    def drain(self) -> None:
        self.calls.append("drain")

    def stop_now(self) -> None:
        self.calls.append("stop")


class Yielding(Collector):
    """A collector of an application."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class FakeSupervisor:
    """The other end of the socket pair."""

    def __init__(self) -> None:
        self.own, inherited = socket.socketpair()
        self.own.settimeout(30)
        self.exits: list[int] = []
        self.link = SupervisorLink(3, inherited.detach(), grace_seconds=0, end_process=self.exits.append)
        self._answers = self.own.makefile("rb")

    async def read(self) -> Any:
        return json.loads(await asyncio.to_thread(self._answers.readline))

    def send(self, line: str) -> None:
        self.own.sendall(f"{line}\n".encode())

    async def ask(self, question: str) -> Any:
        self.send(question)
        return await self.read()

    def die(self) -> None:
        self._answers.close()  # also a reference to the socket
        self.own.close()


@asynccontextmanager
async def linked(services: FakeServices) -> AsyncIterator[FakeSupervisor]:
    supervisor = FakeSupervisor()
    supervisor.link.start()
    with supervisor.link.attached(services):
        yield supervisor
    supervisor.die()


@pytest.fixture(autouse=True)
async def _threads_end() -> AsyncIterator[None]:
    yield
    await eventually(lambda: not [each for each in threading.enumerate() if "supervisor link" in each.name])


async def test_the_supervisor_reads_health_and_metrics() -> None:
    async with linked(FakeServices()) as supervisor:
        health = await supervisor.ask("health")
        metrics = await supervisor.ask("metrics")

    assert health["answer"]["services"][0]["ready"] is True
    assert "python_info" in [name for name, *_ in metrics["answer"]]


async def test_the_supervisor_drains_and_stops_the_services() -> None:
    services = FakeServices()
    async with linked(services) as supervisor:
        supervisor.send("drain")
        supervisor.send("stop")
        await eventually(lambda: services.calls == ["drain", "stop"])


async def test_services_drain_when_the_supervisor_dies_and_are_ended_after_the_grace_period() -> None:
    services = FakeServices()
    async with linked(services) as supervisor:
        supervisor.die()
        await eventually(lambda: services.calls == ["drain"])
        await eventually(lambda: supervisor.exits == [1])


async def test_signals_drain_and_never_stop_at_once() -> None:
    """A service manager sends SIGTERM to the workers and to the supervisor, which asks them to drain as well."""
    services = FakeServices()
    async with linked(services):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await eventually(lambda: services.calls == ["drain", "drain"])


async def test_a_worker_that_has_not_started_its_services_exits_at_once() -> None:
    supervisor = FakeSupervisor()
    supervisor.link.start()
    health = await supervisor.ask("health")
    supervisor.send("drain")
    await eventually(lambda: supervisor.exits == [0])
    supervisor.die()

    assert health["answer"] == {"services": []}


async def test_a_worker_does_not_outlive_its_supervisor_while_it_starts() -> None:
    supervisor = FakeSupervisor()
    supervisor.link.start()
    supervisor.die()

    await eventually(lambda: supervisor.exits == [1])


async def test_a_worker_does_not_outlive_its_supervisor_if_it_cannot_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_link._log, "error", _fail)
    services = FakeServices()
    async with linked(services) as supervisor:
        supervisor.die()
        await eventually(lambda: supervisor.exits == [1])
        await eventually(lambda: services.calls == ["drain"])
    assert "ZeroDivisionError: cannot log" in capsys.readouterr().err


def _fail(*_: Any) -> None:
    raise ZeroDivisionError("cannot log")


async def test_a_blocked_event_loop_has_no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_link, "HEALTH_SECONDS", 0.01)
    async with linked(FakeServices()) as supervisor:
        supervisor.send("health")
        answer = supervisor._answers.readline()  # blocks the loop

    assert json.loads(answer) == {"question": "health", "answer": None}


async def test_a_collector_that_fails_does_not_break_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(supervisor_link, "plain_families", broken)
    async with linked(FakeServices()) as supervisor:
        metrics = await supervisor.ask("metrics")
        health = await supervisor.ask("health")

    assert metrics["answer"] is None
    assert health["answer"] is not None


async def test_numbers_of_any_kind_reach_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus accepts all that `float` does, such as decimals and the numbers of NumPy."""
    registry = CollectorRegistry()
    registry.register(Yielding(GaugeMetricFamily("balance", "Balance.", value=Decimal("1.5"))))  # type: ignore[arg-type]
    monkeypatch.setattr(supervisor_link, "REGISTRY", registry)
    async with linked(FakeServices()) as supervisor:
        metrics = await supervisor.ask("metrics")

    assert metrics["answer"] == [["balance", "Balance.", "gauge", "", [["balance", {}, 1.5]]]]


async def test_metrics_that_cannot_be_sent_do_not_break_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_link, "plain_families", lambda _: [object()])
    services = FakeServices()
    async with linked(services) as supervisor:
        metrics = await supervisor.ask("metrics")
        supervisor.send("drain")
        await eventually(lambda: services.calls == ["drain"])

    assert metrics["answer"] is None


async def test_a_worker_announces_once_that_it_is_ready() -> None:
    async with linked(FakeServices()) as supervisor:
        for _ in range(2):
            supervisor.link.announce_ready()
        lines = [await supervisor.read(), await supervisor.ask("health")]

    assert lines[0] == {"ready": True}
    assert lines[1]["question"] == "health"


async def test_an_announcement_does_not_fail_if_the_supervisor_is_dead() -> None:
    services = FakeServices()
    async with linked(services) as supervisor:
        supervisor.die()
        await eventually(lambda: supervisor.exits == [1])
        supervisor.link.announce_ready()


@pytest.mark.parametrize(("order", "exits"), [("stop", [1]), ("drain", [])])
def test_an_order_to_stop_ends_a_process_that_waits_for_threads_without_an_event_loop(
    order: str, exits: list[int]
) -> None:
    supervisor = FakeSupervisor()

    async def ends() -> None:
        with supervisor.link.attached(FakeServices()):
            pass

    asyncio.run(ends())
    supervisor.link.start()
    supervisor.send(order)
    health, found = asyncio.run(supervisor.ask("health")), list(supervisor.exits)
    supervisor.die()

    assert (found, health["answer"]) == (exits, None)


def test_children_of_handlers_do_not_inherit_the_link() -> None:
    supervisor = FakeSupervisor()

    assert not os.get_inheritable(supervisor.link._socket.fileno())
    supervisor.link.start()
    supervisor.die()
