"""`integr8s-idem top` with real endpoints, real processes, and a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from typer.testing import CliRunner, Result

from examples.billing.handlers import OrderPlaced
from integr8s_idem import EventPublisher
from integr8s_idem.cli.app import app
from integr8s_idem.cli.top_table import fleet_table
from integr8s_idem.config import KafkaSettings
from integr8s_idem.embedded.discovery import announced_servers
from integr8s_idem.operations.fleet import Figures, Fleet, ServiceRow, WorkerSnapshot
from integr8s_idem.operations.worker_addresses import address_of, endpoints_of
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.worker.health import Health, ServiceHealth
from tests.support.accepting import Acceptor
from tests.support.http_server import serving
from tests.support.ports import reserve_port
from tests.support.processes import ServiceProcess

Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@dataclass
class Process:
    """The endpoints of a worker process, without a worker."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.health = Health((ServiceHealth("billing", live=True, ready=True),))
        self.observer = PrometheusObserver("billing", self.registry)

    def served(self, port: int = 0, host: str = "127.0.0.1") -> Endpoints:
        return Endpoints(host, port, health=lambda: self.health, registry=self.registry)


@asynccontextmanager
async def responding(respond: Respond) -> AsyncIterator[int]:
    """Yield the port of a server that handles each connection with `respond`."""
    async with Acceptor(respond) as server:
        yield server.port


def watched(*ports: int, timeout: float = 3.0) -> Fleet:
    return Fleet([address_of(str(port)) for port in ports], timeout=timeout)


async def only(fleet: Fleet) -> WorkerSnapshot:
    (worker,) = (await fleet.poll()).workers
    return worker


def figures_of(worker: WorkerSnapshot) -> Figures:
    (row,) = worker.rows
    assert row.figures is not None
    return row.figures


async def test_polls_return_counts_and_rates() -> None:
    process = Process()
    async with process.served() as endpoints:
        fleet = watched(endpoints.port)
        before = await only(fleet)
        process.observer.count(Signal.HANDLED, "order_placed", 30)
        process.observer.count(Signal.DUPLICATE_BLOCKED, "order_placed", 2)
        process.observer.measure(Gauge.CONSUMER_LAG, 7, "orders")
        process.observer.measure(Gauge.IN_FLIGHT, 3)
        process.observer.measure(Gauge.STORE_UP, 1)

        figures = figures_of(await only(fleet))

    assert before.rows[0].state == "ready"
    assert figures_of(before).rates is None
    assert (figures.count(Signal.HANDLED), figures.count(Signal.DUPLICATE_BLOCKED)) == (30, 2)
    assert (figures.lag, figures.in_flight, figures.lag_is_growing) == (7, 3, True)
    assert figures.rate(Signal.HANDLED) == pytest.approx(15 * (figures.rate(Signal.DUPLICATE_BLOCKED) or 0))
    assert (figures.rate(Signal.HANDLED) or 0) > 1


@pytest.mark.parametrize("age", [2, 90])
async def test_the_outbox_and_its_failures_are_shown(age: int) -> None:
    process = Process()
    async with process.served() as endpoints:
        process.observer.measure(Gauge.OUTBOX_WAITING, 1_200)
        process.observer.measure(Gauge.OUTBOX_AGE, age)
        process.observer.count(Signal.OUTBOX_FAILURE, "order_placed", 3)

        snapshot = await watched(endpoints.port).poll()

    page = StringIO()
    Console(file=page, width=120).print(fleet_table(snapshot, 120))
    [service] = snapshot.as_json()["services"].values()
    assert (service["outbox_waiting"], service["outbox_age_seconds"]) == (1_200, age)
    assert service["errors_by_kind"] == {"outbox_failures": 3}
    assert f"1,200 events wait in the outbox, the oldest for {age} s" in page.getvalue()


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
async def test_columns_that_do_not_fit_are_omitted(terminal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", terminal), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    async with Process().served() as endpoints:
        snapshot = await watched(endpoints.port).poll()

    page = StringIO()
    Console(file=page, width=80, height=24, color_system=None).print(fleet_table(snapshot, 80))
    headings = "service state handled/s dups in flight retries dead errors lag"
    assert page.getvalue().splitlines()[1].split() == headings.split()


async def test_the_reason_why_a_service_is_not_ready_is_shown() -> None:
    process = Process()
    process.health = Health((ServiceHealth("billing", live=True, ready=False, reason="has no partitions yet"),))
    process.observer.measure(Gauge.STORE_UP, 0)

    async with process.served() as endpoints:
        (row,) = (await only(watched(endpoints.port))).rows

    assert (row.state, row.reason) == ("store down", "has no partitions yet")


async def test_a_stopped_worker_is_down_until_it_answers_again() -> None:
    process = Process()
    async with process.served() as endpoints:
        port = endpoints.port
        fleet = watched(port)
        await fleet.poll()
    gone = await only(fleet)
    again = Process()
    again.observer.count(Signal.HANDLED, "order_placed", 2)
    async with again.served(port):
        back = await only(fleet)

    assert gone.rows == [ServiceRow("billing", f"127.0.0.1:{port}", "down", "connection refused")]
    assert back.is_up
    assert figures_of(back).count(Signal.HANDLED) == 2


@pytest.fixture
async def machines(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Map the addresses of `workers.shop` to their families; the name does not resolve while there are none."""
    known: dict[str, int] = {}
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def resolved(name: str, port: int, **options: Any) -> list[Any]:
        if name != "workers.shop":
            return await real(name, port, **options)
        if not known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(family, socket.SOCK_STREAM, 6, "", (ip, port)) for ip, family in known.items()]

    monkeypatch.setattr(loop, "getaddrinfo", resolved, raising=False)
    return known


async def test_a_host_name_with_several_addresses_is_one_row_for_each(machines: dict[str, int]) -> None:
    # The IPv6 address belongs to one of the same machines.
    machines.update({"::1": socket.AF_INET6, "127.0.0.2": socket.AF_INET, "127.0.0.1": socket.AF_INET})
    async with Process().served() as one, Process().served(one.port, host="127.0.0.2"):
        fleet = Fleet([address_of(f"workers.shop:{one.port}")])
        seen = [(worker.worker, worker.is_up) for worker in (await fleet.poll()).workers]
        del machines["127.0.0.2"]
        after = [worker.worker for worker in (await fleet.poll()).workers]

    assert seen == [(f"127.0.0.1:{one.port}", True), (f"127.0.0.2:{one.port}", True)]
    assert after == [f"127.0.0.1:{one.port}"]


async def test_ipv6_addresses_are_used_if_there_are_no_others(machines: dict[str, int]) -> None:
    machines["fd00::7"] = socket.AF_INET6

    assert [endpoint.text for endpoint in await endpoints_of(address_of("workers.shop"))] == ["[fd00::7]:9464"]


async def test_a_name_that_temporarily_does_not_resolve_keeps_its_endpoints(machines: dict[str, int]) -> None:
    machines["127.0.0.1"] = socket.AF_INET
    async with Process().served() as endpoints:
        fleet = Fleet([address_of(f"workers.shop:{endpoints.port}")])
        await fleet.poll()
        machines.clear()

        assert (await only(fleet)).is_up


async def test_an_unknown_host_name_is_a_row() -> None:
    worker = await only(Fleet([address_of("nobody.invalid:1")]))

    assert (worker.worker, worker.is_up) == ("nobody.invalid:1", False)
    assert "cannot resolve the host name" in worker.reason


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    try:
        while True:
            writer.write(b"#")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        writer.close()


def answer_of(text: bytes) -> Respond:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()
        writer.close()

    return respond


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (silent, "no answer within 2 s"),
        (slowly, "no answer within 2 s"),
        (answer_of(b"+PONG\r\n"), "does not speak HTTP"),
        (answer_of(b""), "does not speak HTTP"),
        (answer_of(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n#"), "does not speak HTTP"),
        (answer_of(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"), "HTTP status 500 for /metrics"),
        (answer_of(b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"), "HTTP status 302 for /metrics"),
        (answer_of(b"HTTP/1.0 200 OK\r\n\r\n<html>"), "has no metrics of integr8s-idem"),
        (answer_of(b"HTTP/1.0 200 OK\r\n\r\nidempotency_in_flight{\n"), "cannot parse the metrics"),
    ],
    ids=["silent", "slow", "redis", "empty", "cut off", "error", "redirect", "another site", "garbage"],
)
async def test_an_endpoint_that_is_not_a_worker_is_down_with_a_reason(respond: Respond, reason: str) -> None:
    process = Process()
    async with responding(respond) as port, process.served() as endpoints:
        other, good = (await watched(port, endpoints.port, timeout=2.0).poll()).workers

    assert reason in other.reason
    assert good.is_up


async def test_pages_are_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.operations.metrics_scraper.MAX_BYTES", 1_000)

    async with responding(answer_of(b"HTTP/1.0 200 OK\r\n\r\n" + b"#" * 2_000)) as port:
        assert "more than 1,000 bytes" in (await only(watched(port))).reason


async def test_workers_are_polled_concurrently() -> None:
    async with responding(silent) as port:
        fleet = Fleet([address_of(f"http://127.0.0.1:{port}/{number}") for number in range(30)], timeout=0.3)
        started_at = time.monotonic()
        snapshot = await fleet.poll()

    assert len(snapshot.workers) == 30
    assert time.monotonic() - started_at < 30 * 0.3 / 2


async def test_a_worker_behind_a_proxy_is_polled_below_its_path() -> None:
    requests: list[tuple[str, str]] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        requests.append((scope["path"], dict(scope["headers"])[b"host"].decode()))
        found = scope["path"] == "/workers/1/metrics"
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": []})
        await send({"type": "http.response.body", "body": b'idempotency_in_flight{service="a"} 4\n'})

    async with serving(application, lifespan="off") as port:
        (row,) = (await only(Fleet([address_of(f"http://127.0.0.1:{port}/workers/1/metrics")]))).rows

    assert requests == [("/workers/1/metrics", f"127.0.0.1:{port}"), ("/workers/1/readyz", f"127.0.0.1:{port}")]
    assert (row.service, row.state, row.figures and row.figures.in_flight) == ("a", "running", 4)


# The command.


@dataclass
class Worker:
    """A process with the billing example on embedded servers, to which one order was delivered twice."""

    address: str
    process: ServiceProcess


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    port = reserve_port()
    (folder / "settings.toml").write_text(f"[telemetry]\nmetrics_port = {port}\n")
    arguments = (
        "examples.billing.workers:platform",
        "--embedded",
        "--settings",
        str(folder / "settings.toml"),
        "--json",
    )
    with ServiceProcess(*arguments, log=folder / "log") as process:
        answer = process.wait_for_line("embedded Kafka (emulator) on ")
        servers = re.search(r"on (\S+:\d+),", answer)
        assert servers is not None
        process.wait_for_line("billing: assigned partitions")
        asyncio.run(ordered_twice(servers[1]))
        yield Worker(f"127.0.0.1:{port}", process)


async def ordered_twice(bootstrap: str) -> None:
    publisher = EventPublisher(KafkaSettings(bootstrap_servers=bootstrap))
    order = OrderPlaced(order_id="7", amount=Decimal(30))
    try:
        await publisher.publish(order)
        await publisher.publish(order)
    finally:
        await publisher.close()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "integr8s_idem", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_json_output_is_one_object_with_every_number(worker: Worker) -> None:
    deadline = time.monotonic() + 60
    while True:
        ended = top("--once", "--json", "--interval", "0.2", worker.address, "127.0.0.1:1")
        assert (ended.returncode, ended.stderr) == (0, "")
        answer = json.loads(ended.stdout)
        seen = answer["services"]["billing"]
        if seen["handled"] == seen["duplicates_blocked"] == 1 or time.monotonic() > deadline:
            break

    assert (seen["handled"], seen["duplicates_blocked"], seen["errors"]) == (1, 1, 0)
    assert seen["handled_per_second"] is not None
    up, down = answer["workers"]
    assert [(service["service"], service["state"]) for service in up["services"]] == [
        ("audit", "ready"),
        ("billing", "ready"),
    ]
    assert (down["is_up"], down["reason"]) == (False, "connection refused")
    assert ended.stdout.count("\n") == 1


def invoke_top(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", *arguments])


def test_the_default_address_is_that_of_the_settings(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("settings.toml").write_text(f"[telemetry]\nmetrics_port = {worker.address.partition(':')[2]}\n")

    ended = invoke_top()

    assert ended.exit_code == 0, ended.output
    assert re.search(rf"billing +{re.escape(worker.address)} +ready", ended.stdout)
    assert "\x1b" not in ended.stdout


def test_the_address_is_read_from_the_settings_of_a_platform(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"[telemetry]\nmetrics_port = {worker.address.partition(':')[2]}\n[platform]\n")

    assert invoke_top("--settings", str(file)).exit_code == 0
    assert invoke_top("--settings", str(file), "--app", "providers:platform").exit_code == 0


def test_the_metrics_of_an_embedded_worker_are_found_in_its_folder(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port = int(worker.address.partition(":")[2])
    servers = {"kafka": {"bootstrap_servers": "127.0.0.1:1"}, "telemetry": {"metrics_host": "127.0.0.1"}}
    with announced_servers(servers) as file:
        file.add({"telemetry": {"metrics_port": port}})

        monkeypatch.setenv("COLUMNS", "120")
        ended = invoke_top("--embedded")

    assert ended.exit_code == 0, ended.output
    assert worker.address in ended.stdout


def test_a_named_worker_needs_no_settings(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.toml").write_text("what = is this")

    assert invoke_top(worker.address).exit_code == 0


def test_the_exit_status_is_1_if_no_worker_answers() -> None:
    ended = invoke_top("127.0.0.1:1")

    assert ended.exit_code == 1
    assert "127.0.0.1:1 down: connection refused" in ended.stdout


def test_json_output_is_one_object_per_poll_until_a_signal(worker: Worker) -> None:
    command = [sys.executable, "-m", "integr8s_idem", "top", "--json", "--interval", "0.1", worker.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        status = process.wait(20)

    assert first["total"]["handled_per_second"] is None
    assert second["total"]["handled_per_second"] == 0
    assert status == 0


@pytest.mark.parametrize("arguments", [["redis://x"], ["--interval", "0", "x"], ["--interval", "nan", "x"]])
def test_invalid_arguments_are_reported(arguments: list[str]) -> None:
    ended = CliRunner().invoke(app, ["top", *arguments])

    assert ended.exit_code == 2
    assert "ApplicationError" in ended.stderr


class Screen:
    """A program on a terminal with 100 columns."""

    def __init__(self, *command: str) -> None:
        self.output = ""
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 100))
        self._before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integr8s_idem", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )

    def wait_for(self, condition: Callable[[str], object]) -> None:
        """Read until the output satisfies `condition`."""
        deadline = time.monotonic() + 60
        while not condition(self.output):
            assert time.monotonic() < deadline, self.output
            self._read(0.1)

    def end(self) -> int:
        """Read the rest of the output, and return the exit status."""
        status = self.process.wait(30)
        while self._read(0.2):
            pass
        return status

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal's mode is restored and its cursor is visible."""
        return termios.tcgetattr(self._slave) == self._before and self.output.rfind("\x1b[?25h") > self.output.rfind(
            "\x1b[?25l"
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            self.output += os.read(self._master, 65_536).decode(errors="replace")
        return bool(ready)


async def _keep_failing(process: Process) -> None:
    """Count errors continuously: a single one may fall between two refreshes of the screen."""
    while True:
        process.observer.count(Signal.HANDLER_FAILED, "order_placed")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_live_table_is_updated_until_ctrl_c_and_stays_on_the_screen(number: int) -> None:
    process = Process()
    async with process.served() as endpoints:
        screen = Screen("top", "--interval", "0.2", f"127.0.0.1:{endpoints.port}", "127.0.0.1:1")
        try:
            await asyncio.to_thread(
                screen.wait_for, lambda output: "ready" in output and "connection refused" in output
            )
            process.observer.count(Signal.HANDLED, "order_placed", 54_321)
            failing = asyncio.create_task(_keep_failing(process))
            await asyncio.to_thread(screen.wait_for, lambda output: "54,321" in output and "▲ " in output)
            failing.cancel()
            os.kill(screen.process.pid, number)
            status = await asyncio.to_thread(screen.end)
            is_as_before = screen.is_as_before
        finally:
            screen.close()

    last = screen.output[screen.output.rfind("handled/s") :]
    assert status == 0
    assert is_as_before
    assert "\x1b[?25l" in screen.output
    assert "\x1b[?1049h" not in screen.output
    assert "54,321" in last
    assert "connection refused" in last
    assert "\x1b[2K" not in last  # the last table is not erased
    assert "Traceback" not in screen.output
