"""Log records that are exported to a collector over OTLP."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry._logs import _internal as otel_logs
from opentelemetry._logs import set_logger_provider
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once
from typer.testing import CliRunner

from integr8s_idem import IdempotencyManager
from integr8s_idem.cli.app import app
from integr8s_idem.config import TelemetrySettings
from integr8s_idem.errors import SettingsError
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import setup
from integr8s_idem.telemetry.collector import endpoint_url, signals_url
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.otlp_logs import MAX_TEXT, OpenTelemetryHandler
from integr8s_idem.telemetry.setup import check_exporter, configure_telemetry
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.collectors import Collector
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, plain_manager
from tests.support.pipelines import ParcelSent, all_committed, dispatcher_of

SHOP = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset OpenTelemetry's global state, its environment variables, and the handlers of the root logger."""
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(otel, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(otel_logs, "_LOGGER_PROVIDER", None)
    monkeypatch.setattr(otel_logs, "_LOGGER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(setup, "_configured", None)
    for name in ("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    root = logging.getLogger()
    handlers, level = root.handlers.copy(), root.level
    root.setLevel(logging.INFO)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class ProviderOfApplication:
    """A LoggerProvider, as the API defines it."""

    def __init__(self) -> None:
        self.emitted: dict[str, dict[str, Any]] = {}
        """Arguments of the last record of each logger."""
        self.is_shut_down = False

    def get_logger(self, name: str) -> Any:
        return SimpleNamespace(emit=lambda **arguments: self.emitted.update({name: arguments}))

    def shutdown(self) -> None:
        self.is_shut_down = True


def sent_to(endpoint: str | None, **changes: Any) -> TelemetrySettings:
    """Return settings that were not validated, as a program may create them."""
    return TelemetrySettings.model_construct(otlp_endpoint=endpoint, otlp_logs=True, **changes)


async def test_a_collector_receives_the_records_of_a_worker_with_trace_and_delivery(http_collector: Collector) -> None:
    broker, contexts = FakeBroker(), list[otel.SpanContext]()
    broker.publish(ParcelSent(event_id="e-0"), ParcelSent(event_id="e-1"), partition=3)

    async def fail_once(event: ParcelSent) -> None:
        if event.event_id == "e-1":
            contexts.append(otel.get_current_span().get_span_context())
            SHOP.info("sending")
            if len(contexts) == 1:
                raise ValueError("try again")

    async with configure_telemetry(sent_to(http_collector.endpoint), service_name="platform") as handle:
        assert (handle.sends_spans, handle.sends_logs) == (True, True)
        manager = IdempotencyManager(
            plain_manager().config, MemoryIdempotencyRepository(), OpenTelemetryObserver("billing"), scope="billing"
        )
        here: Any = Guarded(manager, FlakyStore(MemoryIdempotencyRepository()), None)  # type: ignore[arg-type]
        async with running(dispatcher_of(fail_once, here), broker, retry_initial_seconds=0.01) as worker:
            await worker.until(lambda: all_committed(worker), seconds=30)

    assert {"/v1/logs", "/v1/traces"} == set(http_collector.paths)
    first, second = http_collector.records("shop")
    assert [record.trace_id for record in (first, second)] == [each.trace_id.to_bytes(16) for each in contexts]
    assert [record.span_id for record in (first, second)] == [each.span_id.to_bytes(8) for each in contexts]
    assert (second.body.string_value, second.severity_text) == ("sending", "INFO")
    assert http_collector.attributes(second) == {
        "idempotency.service": "billing",
        "messaging.system": "kafka",
        "messaging.destination.name": "parcel_sent",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.offset": 1,
        "messaging.message.id": "e-1",
        "idempotency.event_type": "parcel_sent",
        "idempotency.handler": "handle",
        "idempotency.attempt": 2,
    }
    [services] = [
        [each.value.string_value for each in of.resource.attributes if each.key == "service.name"]
        for of in http_collector.logs[0].resource_logs
    ]
    assert services == ["platform"]


async def test_records_reach_a_collector_over_grpc_without_spans(grpc_collector: Collector) -> None:
    settings = TelemetrySettings.model_construct(
        {"spans", "otlp_endpoint", "otlp_logs"}, spans="off", otlp_endpoint=grpc_collector.endpoint, otlp_logs=True
    )

    async with configure_telemetry(settings, service_name="platform") as handle:
        SHOP.warning("hello")

    assert not handle.sends_spans
    [record] = grpc_collector.records("shop")
    assert (record.body.string_value, record.severity_number) == ("hello", 13)


async def test_records_are_not_exported_by_default(http_collector: Collector) -> None:
    async with configure_telemetry(
        TelemetrySettings(otlp_endpoint=http_collector.endpoint), service_name="platform"
    ) as handle:
        SHOP.warning("hello")

    assert not handle.sends_logs
    assert http_collector.logs == []


async def test_an_exception_is_exported_without_passwords(http_collector: Collector) -> None:
    async with configure_telemetry(sent_to(http_collector.endpoint), service_name="platform"):
        try:
            raise TimeoutError("no response from redis://:secret@host")
        except TimeoutError:
            SHOP.exception("failed: redis://:secret@host")

    [record] = http_collector.records("shop")
    attributes = http_collector.attributes(record)
    assert attributes["exception.type"] == "TimeoutError"
    assert attributes["exception.message"] == "no response from redis://***@host"
    assert attributes["exception.stacktrace"].startswith("Traceback")
    assert "secret" not in str(record)


async def test_one_odd_value_does_not_lose_the_batch(http_collector: Collector) -> None:
    async with configure_telemetry(sent_to(http_collector.endpoint), service_name="platform"):
        [handler] = [each for each in logging.getLogger().handlers if isinstance(each, OpenTelemetryHandler)]
        odd = SHOP.makeRecord("shop", logging.INFO, "f.py", 1, "\udfff", (), None, extra={"text": "\ud800"})
        vars(odd).update(number=2**70, list=[1], none=None, truth=True, long="x" * MAX_TEXT * 2)
        # Not through the logger: pytest would keep the record for its report, which must be valid Unicode.
        handler.handle(odd)
        SHOP.info("after")

    received, after = http_collector.records("shop")
    assert (received.body.string_value, after.body.string_value) == ("?", "after")
    attributes = http_collector.attributes(received)
    assert len(attributes.pop("long")) == MAX_TEXT
    assert attributes == {"text": "?", "number": str(2**70), "list": "[1]", "none": "None", "truth": True}


async def test_keys_are_exported_only_if_they_are_allowed(http_collector: Collector) -> None:
    for are_allowed in (False, True):
        setup._configured = None
        otel_logs._LOGGER_PROVIDER, otel_logs._LOGGER_PROVIDER_SET_ONCE = None, Once()
        async with configure_telemetry(sent_to(http_collector.endpoint, span_keys=are_allowed), service_name="p"):
            with logging_with(topic="orders", record_key="orders:7", message_key="customer-1"):
                SHOP.info("hello")

    without, with_keys = (http_collector.attributes(each) for each in http_collector.records("shop"))
    assert set(without) == {"messaging.system", "messaging.destination.name"}
    assert with_keys["idempotency.record_key"] == "orders:7"
    assert with_keys["messaging.kafka.message.key"] == "customer-1"


async def test_records_of_the_export_are_not_exported(http_collector: Collector) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    async with configure_telemetry(sent_to(http_collector.endpoint), service_name="platform"):
        SHOP.info("hello")
        logging.getLogger("opentelemetry.exporter").warning("failed")
        logging.getLogger("grpc._channel").warning("failed")
        # As in the thread of an exporter.
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        logging.getLogger("urllib3").warning("retrying")
        detach(token)

    assert "shop" in http_collector.loggers
    assert not [name for name in http_collector.loggers if name.startswith(("opentelemetry", "grpc", "urllib3"))]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_an_unavailable_collector_delays_closing_only_for_the_timeout(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # it does not respond
        settings = sent_to(f"{scheme}://127.0.0.1:{server.getsockname()[1]}")
        handle = configure_telemetry(settings, service_name="platform")
        SHOP.info("hello")

        before = monotonic()
        await handle.close(timedelta(seconds=0.3))
        took = monotonic() - before

    assert 0.3 <= took < 5
    assert "the last log records were not exported within 0.3 s and are lost" in caplog.text
    for thread in [each for each in threading.enumerate() if each.name.startswith(("logs-", "spans-"))]:
        thread.join(10)
        assert not thread.is_alive()


async def test_after_closing_nothing_is_exported(http_collector: Collector) -> None:
    handle = configure_telemetry(sent_to(http_collector.endpoint), service_name="platform")
    await handle.close()
    await handle.close()

    SHOP.info("hello")

    assert not handle.sends_logs
    assert "shop" not in http_collector.loggers
    assert not [each for each in logging.getLogger().handlers if isinstance(each, OpenTelemetryHandler)]


async def test_a_logger_provider_of_the_application_is_used_and_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)
    provider: Any = ProviderOfApplication()
    set_logger_provider(provider)
    otel.set_tracer_provider(TracerProvider(shutdown_on_exit=False))

    check_exporter(sent_to(None))
    async with configure_telemetry(sent_to(None), service_name="platform"):
        with logging_with(attempt=2):
            SHOP.info("hello")

    assert provider.emitted["shop"]["body"] == "hello"
    assert provider.emitted["shop"]["attributes"] == {"idempotency.attempt": 2}
    assert not provider.is_shut_down


async def test_records_that_the_application_exports_itself_are_not_exported_twice(http_collector: Collector) -> None:
    own = type("LoggingHandler", (logging.NullHandler,), {"__module__": "opentelemetry.instrumentation.logging"})
    logging.getLogger().addHandler(own())

    async with configure_telemetry(sent_to(http_collector.endpoint), service_name="platform") as handle:
        SHOP.info("hello")

    assert not handle.sends_logs
    assert "shop" not in http_collector.loggers


def test_settings_check_reports_a_missing_exporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[telemetry]\notlp_logs = true\notlp_endpoint = "http://localhost:4318"\n')
    check = ["settings", "check", "--settings", str(file), "--json"]
    complete = CliRunner().invoke(app, check)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http._log_exporter", None)

    refused = CliRunner().invoke(app, check)

    assert complete.exit_code == 0
    [mistake] = json.loads(refused.stdout)["mistakes"]
    assert mistake["path"] == "telemetry.otlp_logs"
    assert 'pip install "integr8s-idem[otlp-http]"' in mistake["message"]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/logs"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/logs"),
    ],
)
def test_the_path_for_log_records_follows_from_that_for_spans(endpoint: str, url: str) -> None:
    assert signals_url(endpoint_url(endpoint), "logs") == url


def test_an_endpoint_whose_path_is_not_that_of_spans_is_a_mistake() -> None:
    with pytest.raises(SettingsError, match=r"telemetry\.otlp_logs +needs an otlp_endpoint without a path"):
        configure_telemetry(sent_to("https://host/ingest"), service_name="platform")

    assert isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)
