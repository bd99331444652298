"""`integr8s-idem run`: settings, log, table, embedded servers and exit status."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from dishka import AsyncContainer, make_async_container
from rich.console import Console

from integr8s_idem.cli import run_command
from integr8s_idem.cli.garbage_collection import RARE_THRESHOLD
from integr8s_idem.cli.run_command import LogFormat, Run, run
from integr8s_idem.cli.run_table import report_table
from integr8s_idem.config import RedisStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.embedded.settings_overlay import merged
from integr8s_idem.errors import SettingsError, StoreConfigurationError
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker import ServiceReport
from integr8s_idem.worker.tally import Tally

REPORT = ServiceReport(
    "billing", "running", 3, 12, 90, Tally(handled=1_234, duplicates=56, retries=7, dead_letters=8), "[odd]"
)


FOUND = "other commands in this folder can use these servers with --embedded"


def no_container(_: Any) -> AsyncContainer:
    """Return an empty container; nothing is consumed."""
    return make_async_container()


SHOP = Platform(Service("billing", container=no_container), Service("audit", container=no_container))


@dataclass
class FakeGroup:
    """Records its arguments, and calls `then` instead of consuming."""

    status: int = 0
    then: Callable[[], None] = lambda: None
    options: int = 0
    settings: Settings = field(default_factory=Settings)
    services: Sequence[str] | None = None
    stuck: bool = False
    drawn: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, services: Sequence[Service], settings: Settings, on_metrics: object = None) -> FakeGroup:
        self.services, self.settings = [service.name for service in services], settings
        return self

    def reports(self) -> Sequence[ServiceReport]:
        self.options += 1
        return [REPORT]

    async def run(self) -> int:
        self.then()
        await asyncio.sleep(0)
        return self.status


class Terminal(StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Remove settings of this machine, use an empty working directory, and restore logging and garbage collection."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    root = logging.getLogger()
    handlers, level, thresholds = root.handlers.copy(), root.level, gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def options(*services: str, embedded: bool = False, log: LogFormat | None = None) -> Run:
    """Return the options for a run of the shop."""
    return Run(SHOP, SHOP.choose(services), None, embedded, log)


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_that_of_the_group(status: int) -> None:
    assert run(options(), FakeGroup(status=status)) == status


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_the_exit_status_is_not_0_if_the_thread_of_a_handler_is_cut_off(
    status: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def hang() -> None:
        asyncio.get_running_loop().run_in_executor(None, is_over.wait)

    def exit_at_once(status: int) -> None:
        is_over.set()  # the thread ends, so that this process can continue
        raise SystemExit(status)

    monkeypatch.setattr(run_command, "_THREADS_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", exit_at_once)

    with pytest.raises(SystemExit) as ended:
        run(options(), FakeGroup(status, then=hang))

    assert ended.value.code == expected


@pytest.mark.parametrize(("installed", "module"), [(True, "uvloop"), (False, "asyncio.unix_events")])
def test_uvloop_is_used_if_it_is_installed(installed: bool, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loops: list[str] = []

    status = run(options(), FakeGroup(then=lambda: loops.append(type(asyncio.get_running_loop()).__module__)))

    assert (status, loops) == (0, [module])


def test_the_garbage_collector_is_tuned_before_the_services_run() -> None:
    seen: list[tuple[int, int]] = []
    gc.unfreeze()

    run(options(), FakeGroup(then=lambda: seen.append((gc.get_threshold()[0], gc.get_freeze_count()))))

    [(threshold, frozen)] = seen
    assert threshold == RARE_THRESHOLD
    assert frozen > 10_000


def test_the_group_gets_the_settings_and_the_selected_services() -> None:
    Path("settings.toml").write_text('[kafka]\ntopic_prefix = "shop."')
    group = FakeGroup()

    run(options("audit"), group)

    assert group.settings.kafka.topic_prefix == "shop."
    assert group.services == ["audit"]


@pytest.mark.scenario(96)
def test_mistakes_in_the_settings_are_reported_before_anything_starts() -> None:
    Path("settings.toml").write_text("[kafka]\ntopic_prefx = 1")
    group = FakeGroup()

    with pytest.raises(SettingsError):
        run(options(), group)

    assert group.services is None


def test_an_unexpected_error_is_logged_and_exits_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("out of order")

    status = run(options(), FakeGroup(then=fail))

    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 1
    assert last["exception.type"] == "RuntimeError"
    assert last["exception.stacktrace"].endswith("RuntimeError: out of order")


def test_errors_of_the_library_are_raised() -> None:
    def fail() -> None:
        raise StoreConfigurationError("ping", "WRONGPASS")

    with pytest.raises(StoreConfigurationError):
        run(options(), FakeGroup(then=fail))


def test_without_a_terminal_json_lines_are_logged_without_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    group = FakeGroup(then=lambda: logging.getLogger("shop").info("hello", extra={"service": "billing"}))

    run(options(), group)

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["message"] == "hello"
    assert lines[-1]["service"] == "billing"
    assert group.options == 0


def test_the_log_level_is_that_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("settings.toml").write_text('[telemetry]\nlog_level = "ERROR"')

    run(options(), FakeGroup(then=lambda: logging.getLogger("shop").warning("hello")))

    assert capsys.readouterr().out == ""


def test_warnings_about_settings_are_logged_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    Path("settings.toml").write_text("[services.shipping]")

    run(options(), FakeGroup())

    assert "services.shipping is not a service of this application: it is ignored" in capsys.readouterr().out


def test_on_a_terminal_text_lines_are_logged_above_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    run(options(), FakeGroup(then=lambda: logging.getLogger("shop").info("hello")))

    shown = terminal.getvalue()
    for text in ("hello", "billing", "running", "1,234", "56", "dead letters", "[odd]", "Ctrl-C drains"):
        assert text in shown
    assert '"message"' not in shown


def test_json_lines_are_logged_on_a_terminal_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    group = FakeGroup(then=lambda: logging.getLogger("shop").info("hello"))

    run(options(log=LogFormat.JSON), group)

    assert json.loads(terminal.getvalue().splitlines()[-1])["message"] == "hello"
    assert group.options == 0


def test_text_lines_are_logged_without_a_terminal_with_console(capsys: pytest.CaptureFixture[str]) -> None:
    group = FakeGroup(then=lambda: logging.getLogger("shop").info("hello", extra={"order": "7"}))

    run(options(log=LogFormat.CONSOLE), group)

    assert capsys.readouterr().out.splitlines()[-1].endswith("INFO    shop  hello  order=7")
    assert group.options == 0


@pytest.mark.parametrize("are_allowed", [False, True])
def test_lines_contain_keys_if_a_setting_allows_it(are_allowed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Path("settings.toml").write_text(f"[telemetry]\nspan_keys = {str(are_allowed).lower()}")

    def log() -> None:
        with logging_with(service="billing", record_key="orders:7", message_key="customer-1"):
            logging.getLogger("shop").info("hello")

    run(options(), FakeGroup(then=log))

    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["service"] == "billing"
    assert ("record_key" in line, "message_key" in line) == (are_allowed, are_allowed)


def test_the_table_is_redrawn_while_services_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class UntilDrawnThrice(FakeGroup):
        def reports(self) -> Sequence[ServiceReport]:
            if self.options == 2:
                self.drawn.set()
            return super().reports()

        async def run(self) -> int:
            await asyncio.wait_for(self.drawn.wait(), 10)
            return 0

    monkeypatch.setattr(sys, "stdout", Terminal())

    assert run(options(), UntilDrawnThrice()) == 0


@dataclass
class FakeServers:
    """Records whether it was stopped."""

    stopped: bool = False
    during_start: Callable[[], None] = lambda: None
    redis: bool = True

    def settings(self) -> Mapping[str, Any]:
        store = {"store": {"url": "unix:///embedded.sock"}} if self.redis else {}
        return {"kafka": {"bootstrap_servers": "localhost:7"}, **store}

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[FakeServers]:
        try:
            self.during_start()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            yield self
        finally:
            self.stopped = True


def test_embedded_servers_replace_only_addresses_and_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("settings.toml").write_text(
        '[kafka]\nsecurity_protocol = "SASL_SSL"\nsasl_username = "u"\ntopic_prefix = "shop."\n'
        '[store]\nurl = "rediss://prod/0"\ntls_ca_file = "ca.pem"\ntimeout_seconds = 1'
    )
    monkeypatch.setenv("INTEGR8S_IDEM_STORE__PASSWORD", "hunter2")
    group, servers = FakeGroup(), FakeServers()

    run(options(embedded=True), group, servers)

    kafka, store = group.settings.kafka, group.settings.store
    assert (kafka.bootstrap_servers, kafka.security_protocol, kafka.topic_prefix) == (
        "localhost:7",
        "PLAINTEXT",
        "shop.",
    )
    assert isinstance(store, RedisStoreSettings)
    assert (store.url, store.password, store.tls_ca_file) == ("unix:///embedded.sock", None, None)
    assert store.timeout_seconds == 1
    assert servers.stopped


def test_a_misspelled_service_stops_the_run() -> None:
    Path("settings.toml").write_text("[services.biling]")
    group = FakeGroup()

    with pytest.raises(SettingsError, match=r"did you mean services\.billing\?"):
        run(options(), group)

    assert group.services is None


def test_the_addresses_of_embedded_servers_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run(options(embedded=True), FakeGroup(), FakeServers())

    lines = [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["embedded Kafka (emulator) on localhost:7, embedded Redis on unix:///embedded.sock", FOUND]


def messages(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]


def test_a_sqlite_store_is_kept_with_an_embedded_kafka(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("settings.toml").write_text('[store]\nkind = "sqlite"\npath = "shop.db"\nlock_timeout_seconds = 1')
    requested: list[bool] = []

    def start(*, redis: bool, durable: bool) -> AbstractAsyncContextManager[FakeServers]:
        requested.append(redis)
        return FakeServers(redis=redis)()

    monkeypatch.setattr("integr8s_idem.embedded.embedded", start)
    group = FakeGroup()

    run(options(embedded=True), group)

    assert requested == [False]
    assert group.settings.store == SqliteStoreSettings(kind="sqlite", path="shop.db", lock_timeout_seconds=1)
    assert messages(capsys) == ["embedded Kafka (emulator) on localhost:7, records in shop.db ([store] path)", FOUND]


@pytest.mark.parametrize(
    "text",
    [
        'kind = "postgresql"\nurl = "postgresql://db/shop"\nlock_timeout_seconds = 1',
        'kind = "redis-cluster"\nurls = ["redis://one", "redis://two"]',
        'kind = "dynamodb"\ntable = "shop"',
    ],
)
def test_other_stores_are_replaced_by_the_embedded_redis_with_a_warning(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("settings.toml").write_text(f"[store]\n{text}")
    group = FakeGroup()

    run(options(embedded=True), group, FakeServers())

    assert isinstance(group.settings.store, RedisStoreSettings)
    assert group.settings.store.url == "unix:///embedded.sock"
    assert "--embedded ignores [store] (kind = " in messages(capsys)[1]


def test_embedded_servers_ignore_static_membership_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    store = '[store]\nkind = "sqlite"\npath = "shop.db"'
    Path("settings.toml").write_text(f'[kafka]\ngroup_instance_id = "billing-a"\n{store}')
    group = FakeGroup()

    run(options(embedded=True), group, FakeServers())

    assert group.settings.kafka.group_instance_id is None
    assert "--embedded ignores [kafka] group_instance_id" in messages(capsys)[1]


def test_warnings_about_settings_are_logged_with_embedded_servers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("settings.toml").write_text('[kafka]\nauto_offset_reset = "latest"\n[services.audit]\nmax_in_flight = 2')

    run(options(embedded=True), FakeGroup(), FakeServers())

    shown = capsys.readouterr().out
    assert "kafka.auto_offset_reset" in shown
    assert "services.audit.max_in_flight" in shown


@pytest.mark.parametrize(("text", "port"), [("", 0), ("[telemetry]\nmetrics_port = 9464", 9464)])
def test_embedded_servers_use_a_free_metrics_port_unless_one_is_set(text: str, port: int) -> None:
    Path("settings.toml").write_text(text)
    group = FakeGroup()

    run(options(embedded=True), group, FakeServers())

    assert group.settings.telemetry.metrics_port == port


def test_the_embedded_redis_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker warns about records that a restart would lose."""
    requested: list[bool] = []

    def start(*, redis: bool, durable: bool = False) -> FakeServers:
        requested.append(redis and durable)
        return FakeServers()

    monkeypatch.setattr("integr8s_idem.embedded.embedded", lambda **options: start(**options)())

    run(options(embedded=True), FakeGroup())

    assert requested == [True]


def drawn(width: int, *reports: ServiceReport) -> list[str]:
    """Return the lines of the table on a terminal of this width."""
    stream = StringIO()
    Console(file=stream, width=width).print(report_table(reports, width))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_does_not_truncate_names_states_and_numbers(width: int) -> None:
    report = replace(REPORT, name="k8s-worker", state="draining", reason="", lag=190_000)

    shown = "\n".join(drawn(width, report))

    for text in ("service", "state", "handled", "retries", "lag", "k8s-worker", "draining", "1,234", "190,000"):
        assert text in shown
    assert "…" not in shown


def test_reasons_are_printed_below_the_table_and_escaped() -> None:
    lines = drawn(80, replace(REPORT, reason="cannot reach Kafka\x1b[2J"))

    assert "billing running: cannot reach Kafka\\x1b[2J" in lines
    assert "[2J" not in lines[3]


def test_a_sigterm_during_startup_stops_the_embedded_servers() -> None:
    group, servers = FakeGroup(), FakeServers(during_start=lambda: os.kill(os.getpid(), signal.SIGTERM))

    status = run(options(embedded=True), group, servers)

    assert status == 128 + signal.SIGTERM
    assert servers.stopped
    assert group.services is None


def test_merged_tables_keep_values_that_are_not_overridden() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 9}, "c": 4}) == {"a": {"x": 9, "y": 2}, "b": 3, "c": 4}
