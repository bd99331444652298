"""Setup of telemetry from settings: exporters of spans, and closing them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once
from prometheus_client import REGISTRY
from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.config import TelemetrySettings
from integr8s_idem.errors import SettingsError
from integr8s_idem.telemetry import Phase, Signal, setup
from integr8s_idem.telemetry.collector import endpoint_url, signals_url
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.setup import check_exporter, configure_telemetry, observer_for
from tests.support.collectors import Collector


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset OpenTelemetry's global state and environment variables."""
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(otel, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(setup, "_configured", None)
    for name in ("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def sent_to(endpoint: str) -> TelemetrySettings:
    """Return settings that were not validated, as a program may create them."""
    return TelemetrySettings.model_construct(otlp_endpoint=endpoint)


def one_span() -> None:
    with OpenTelemetryObserver("billing").phase(Phase.HANDLE):
        pass


async def test_spans_reach_a_collector_over_http(http_collector: Collector) -> None:
    settings = TelemetrySettings(otlp_endpoint=http_collector.endpoint)

    async with configure_telemetry(settings, service_name="platform") as handle:
        assert handle.sends_spans
        one_span()

    assert http_collector.paths == ["/v1/traces"]
    assert http_collector.spans() == [("platform", "idempotency.handle")]


async def test_spans_reach_a_collector_over_grpc(grpc_collector: Collector) -> None:
    settings = sent_to(grpc_collector.endpoint)

    async with configure_telemetry(settings, service_name="platform"):
        one_span()

    assert grpc_collector.spans() == [("platform", "idempotency.handle")]


async def test_console_spans_are_json_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with configure_telemetry(TelemetrySettings(spans="console"), service_name="platform"):
        one_span()
        one_span()

    printed = capsys.readouterr()
    assert [json.loads(line)["name"] for line in printed.err.splitlines()] == ["idempotency.handle"] * 2
    assert not printed.out


async def test_a_sample_ratio_of_zero_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    settings = TelemetrySettings(spans="console", sample_ratio=0)

    async with configure_telemetry(settings, service_name="platform"):
        one_span()

    assert not capsys.readouterr().err


async def test_without_settings_for_spans_no_sdk_is_set_up() -> None:
    handle = configure_telemetry(TelemetrySettings(), service_name="platform")

    assert not handle.sends_spans
    assert isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)
    await handle.close()


async def test_an_sdk_of_the_application_is_kept() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    otel.set_tracer_provider(provider)

    handle = configure_telemetry(TelemetrySettings(spans="console"), service_name="platform")

    assert not handle.sends_spans
    assert otel.get_tracer_provider() is provider
    await handle.close()


async def test_a_process_is_set_up_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = TelemetrySettings(spans="console")

    async with configure_telemetry(settings, service_name="platform") as first:
        again = configure_telemetry(settings, service_name="platform")
        assert not caplog.records
        other = configure_telemetry(settings, service_name="elsewhere")

    assert again is first
    assert other is first
    assert "the new settings are ignored" in caplog.text


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("backlog", [None, 5], ids=["refuses connections", "does not respond"])
async def test_an_unavailable_collector_delays_neither_closing_nor_the_event_loop(
    scheme: str, backlog: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) if backlog else socket.socket() as server:
        if not backlog:
            server.bind(("127.0.0.1", 0))
        settings = sent_to(f"{scheme}://127.0.0.1:{server.getsockname()[1]}")
        handle = configure_telemetry(settings, service_name="platform")
        one_span()
        watch = asyncio.create_task(_watch_the_loop())

        before = monotonic()
        await handle.close(timedelta(seconds=0.3))
        took = monotonic() - before

        watch.cancel()
        assert took < 5
        assert await watch < 1
        # Before opentelemetry-sdk 1.40 the exporter does not retry refused connections over HTTP.
        is_lost_at_once = "Exception while exporting" in caplog.text
        assert is_lost_at_once or took >= 0.3
        assert is_lost_at_once or "the last spans were not exported within 0.3 s and are lost" in caplog.text
    assert not _threads_left("spans-", after_seconds=10)


def _threads_left(prefix: str, *, after_seconds: float) -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    for thread in threads:
        thread.join(after_seconds)
    return [thread for thread in threads if thread.is_alive()]


async def _watch_the_loop() -> float:
    """Return the longest delay of the event loop in seconds, when cancelled."""
    longest = 0.0
    last = monotonic()
    while True:
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            return longest
        now = monotonic()
        longest, last = max(longest, now - last), now


async def test_closing_twice_exports_once(http_collector: Collector) -> None:
    settings = TelemetrySettings(otlp_endpoint=http_collector.endpoint)
    handle = configure_telemetry(settings, service_name="platform")
    one_span()

    await handle.close()
    await handle.close()

    assert len(http_collector.traces) == 1
    assert not handle.sends_spans


@pytest.mark.parametrize(
    ("settings", "exporter"),
    [
        (TelemetrySettings(), "off"),
        (sent_to("http://host:4318"), "http"),
        (sent_to("http://host:4317"), "grpc"),
        (sent_to("https://host:4317"), "grpc"),
        (sent_to("grpc://host:9000"), "grpc"),
        (sent_to("https://host/otlp/traces"), "http"),
        (TelemetrySettings(spans="otlp"), "http"),
        (TelemetrySettings(spans="console", otlp_endpoint="http://host:4318"), "console"),
        (TelemetrySettings(spans="off", otlp_endpoint="http://host:4318"), "off"),
    ],
)
def test_settings_select_the_exporter(settings: TelemetrySettings, exporter: str) -> None:
    assert setup._exporter_for(settings) == exporter


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/otlp/traces", "https://host/otlp/traces"),
    ],
)
def test_the_default_path_is_added_only_to_an_endpoint_without_a_path(endpoint: str, url: str) -> None:
    assert signals_url(endpoint_url(endpoint), "traces") == url


@pytest.mark.parametrize("endpoint", ["collector:4317", "localhost", "http://", "ftp://host", "http://host:x", ""])
def test_an_invalid_endpoint_is_a_mistake_in_the_settings(endpoint: str) -> None:
    settings = sent_to(endpoint)

    with pytest.raises(SettingsError, match=r"telemetry\.otlp_endpoint .* write http://host:4318"):
        configure_telemetry(settings, service_name="platform")


def test_an_invalid_endpoint_with_a_password_is_not_shown() -> None:
    settings = sent_to("ftp://user:secret@host")

    with pytest.raises(SettingsError) as raised:
        configure_telemetry(settings, service_name="platform")

    assert "secret" not in str(raised.value)


EXTRAS = pytest.mark.parametrize(("protocol", "port"), [("http", 4318), ("grpc", 4317)])


def remove_exporter(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter", None)


@EXTRAS
def test_a_missing_exporter_is_a_mistake_in_the_settings(
    protocol: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_exporter(protocol, monkeypatch)
    settings = sent_to(f"http://user:secret@host:{port}")

    for refused in (lambda: configure_telemetry(settings, service_name="platform"), lambda: check_exporter(settings)):
        with pytest.raises(SettingsError) as raised:
            refused()

        assert "telemetry.otlp_endpoint needs the exporter for OTLP" in " ".join(str(raised.value).split())
        assert f'pip install "integr8s-idem[otlp-{protocol}]"' in str(raised.value)
        assert "secret" not in str(raised.value)


@EXTRAS
def test_settings_check_and_run_report_a_missing_exporter(
    protocol: str, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[telemetry]\notlp_endpoint = "http://localhost:{port}"\n')
    check = ["settings", "check", "--settings", str(file)]
    complete = CliRunner().invoke(app, check)
    remove_exporter(protocol, monkeypatch)

    checked = CliRunner().invoke(app, check)
    started = CliRunner().invoke(app, ["run", "examples.billing.workers:platform", "--settings", str(file)])

    assert (complete.exit_code, complete.stderr) == (0, "")
    for refused in (checked, started):
        assert refused.exit_code == 2
        assert f'pip install "integr8s-idem[otlp-{protocol}]"' in refused.stderr


@EXTRAS
def test_no_exporter_is_needed_if_spans_are_off_or_the_application_has_an_sdk(
    protocol: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_exporter(protocol, monkeypatch)

    check_exporter(TelemetrySettings(spans="off", otlp_endpoint=f"http://host:{port}"))
    otel.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    check_exporter(sent_to(f"http://host:{port}"))


def test_the_same_settings_and_service_return_the_same_observer() -> None:
    first = observer_for(TelemetrySettings(), "same-observer")

    assert observer_for(TelemetrySettings(), "same-observer") is first
    assert observer_for(TelemetrySettings(), "another") is not first


def test_an_observer_counts_unless_metrics_are_disabled() -> None:
    observer_for(TelemetrySettings(), "counting").count(Signal.RETRY, "order")
    observer_for(TelemetrySettings(metrics_enabled=False), "silent").count(Signal.RETRY, "order")

    name = "idempotency_retries_total"
    assert REGISTRY.get_sample_value(name, {"service": "counting", "event_type": "order"}) == 1
    assert REGISTRY.get_sample_value(name, {"service": "silent", "event_type": "order"}) is None


@pytest.mark.parametrize("module", ["integr8s_idem", "integr8s_idem.telemetry", "integr8s_idem.telemetry.setup"])
def test_telemetry_libraries_are_imported_on_demand(module: str) -> None:
    program = f"import sys, {module}; print(*(sys.modules.keys() & {{'prometheus_client', 'opentelemetry', 'grpc'}}))"

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == ""
