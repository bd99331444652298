"""Set up telemetry from settings: the observer of a service, and the SDK that exports spans and log records."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import timedelta
from functools import cache
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from integr8s_idem.config import KafkaSettings, TelemetrySettings
from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.collector import Protocol, exporter_class, make_exporter, protocol_of
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.shutdown import shut_down

# Libraries are imported where they are used, so that a process loads only what its settings need: importing the gRPC
# exporter takes a third of a second.
if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from integr8s_idem.telemetry.otlp_logs import LogExport

Exporter: TypeAlias = Literal["off", "console"] | Protocol

CLOSE_TIMEOUT: Final = timedelta(seconds=3)
_log = logging.getLogger(__name__)


class TelemetryHandle:
    """Exports spans and log records until it is closed; an async context manager."""

    def __init__(
        self,
        provider: TracerProvider | None = None,
        exporter: SpanExporter | None = None,
        logs: LogExport | None = None,
    ) -> None:
        self._provider = provider
        self._exporter = exporter
        self._logs = logs

    @property
    def sends_spans(self) -> bool:
        """Whether this handle exports spans; `False` if the application has its own SDK."""
        return self._provider is not None

    @property
    def sends_logs(self) -> bool:
        """Whether this handle passes log records on to an SDK."""
        return self._logs is not None

    async def close(self, timeout: timedelta = CLOSE_TIMEOUT) -> None:
        """Export the remaining spans and log records without blocking the event loop, for at most `timeout`, and stop.

        What the collector does not accept in time is lost, and a warning is logged.
        """
        logs, self._logs = self._logs, None
        await asyncio.gather(self._close_spans(timeout), *([] if logs is None else [logs.close(timeout)]))

    async def _close_spans(self, timeout: timedelta) -> None:
        provider, self._provider = self._provider, None
        if provider is not None:
            assert self._exporter is not None
            await shut_down(provider, self._exporter, timeout, name="spans", what="spans")

    async def __aenter__(self) -> TelemetryHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


_configuring = Lock()
_configured: tuple[TelemetryHandle, TelemetrySettings, str] | None = None


def configure_telemetry(settings: TelemetrySettings, *, service_name: str) -> TelemetryHandle:
    """Export the spans of this process according to `settings`, and its log records if `otlp_logs` is set.

    If the application has set a TracerProvider or a LoggerProvider, that is used instead.  A second call returns the
    handle of the first, closed or not, since OpenTelemetry does not allow a process to replace its providers.

    Args:
        settings: Section `[telemetry]`.
        service_name: `service.name` of the process in every span and log record.

    Raises:
        SettingsError: `telemetry.otlp_endpoint` is not a valid address of a collector, or the extra for its protocol
            is not installed.
    """
    global _configured
    exporter = _exporter_for(settings)
    if exporter == "off" and not settings.otlp_logs:
        return TelemetryHandle()
    with _configuring:
        if _configured is None:
            _configured = (_install(settings, exporter, service_name), settings, service_name)
        elif _configured[1:] != (settings, service_name):
            _log.warning("the export of telemetry is already set up in this process; the new settings are ignored")
        return _configured[0]


def check_exporter(settings: TelemetrySettings) -> None:
    """Check that the exporters that `settings` require are installed.

    If the application has set a TracerProvider, no exporter of spans is required; the same is true of log records.

    Raises:
        SettingsError: An exporter belongs to an extra that is not installed.
    """
    exporter = _exporter_for(settings)
    if exporter != "off" and exporter != "console" and not _has_provider():  # narrows the type
        exporter_class("traces", exporter)
    if settings.otlp_logs:
        from integr8s_idem.telemetry.otlp_logs import check_log_exporter

        check_log_exporter(settings)


def observer_for(
    settings: TelemetrySettings, service: str, *, group: str | None = None, kafka: KafkaSettings | None = None
) -> Observer:
    """Return the observer of `service`: metrics if they are enabled, and spans when the process has an SDK.

    The same arguments return the same observer.  Spans name the Kafka client and the first broker of `kafka`, messaging
    metrics the broker.
    """
    client_id, servers = ("", "") if kafka is None else (kafka.client_id, kafka.bootstrap_servers)
    return _observer(
        settings.metrics_enabled,
        settings.messaging_metrics,
        settings.span_keys,
        service,
        group,
        client_id,
        servers,
    )


def publisher_observer(kafka: KafkaSettings) -> Observer:
    """Return the observer of a publisher outside of services: spans when the process has an SDK, and no metrics."""
    from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

    return OpenTelemetryObserver("", client_id=kafka.client_id, servers=kafka.bootstrap_servers)


@cache
def _observer(
    metrics: bool, messaging: bool, span_keys: bool, service: str, group: str | None, client_id: str, servers: str
) -> Observer:
    from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

    spans = OpenTelemetryObserver(service, span_keys=span_keys, group=group, client_id=client_id, servers=servers)
    if not metrics:
        return spans
    from integr8s_idem.telemetry.prometheus import PrometheusObserver

    if not messaging:
        return combined(spans, PrometheusObserver(service))
    from integr8s_idem.telemetry.messaging_metrics import MessagingMetricsObserver

    messaging_metrics = MessagingMetricsObserver(service, group=group, servers=servers)
    return combined(spans, PrometheusObserver(service), messaging_metrics)


def _has_provider() -> bool:
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _install(settings: TelemetrySettings, exporter: Exporter, service_name: str) -> TelemetryHandle:
    if not settings.otlp_logs:
        return TelemetryHandle(*_install_spans(settings, exporter, service_name))
    from integr8s_idem.telemetry.otlp_logs import check_log_exporter, export_logs

    check_log_exporter(settings)  # before anything is set up that would have to be closed
    provider, span_exporter = (None, None) if exporter == "off" else _install_spans(settings, exporter, service_name)
    return TelemetryHandle(provider, span_exporter, export_logs(settings, service_name))


def _install_spans(
    settings: TelemetrySettings, exporter: Exporter, service_name: str
) -> tuple[TracerProvider | None, SpanExporter | None]:
    from opentelemetry import trace

    if _has_provider():
        _log.info("using the application's TracerProvider for spans instead of the settings in [telemetry]")
        return None, None
    span_exporter = _make_exporter(exporter, settings.otlp_endpoint)
    provider = _make_provider(settings, span_exporter, service_name)
    trace.set_tracer_provider(provider)
    return provider, span_exporter


def _make_provider(settings: TelemetrySettings, exporter: SpanExporter, service_name: str) -> TracerProvider:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from integr8s_idem.telemetry.sampling import DrawnIds

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        id_generator=DrawnIds(),
        resource=Resource.create({SERVICE_NAME: service_name}),
        # The SDK would wait half a minute for an unavailable collector; the handle has a shorter timeout.
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _make_exporter(exporter: Exporter, endpoint: str | None) -> SpanExporter:
    if exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        # Standard output is reserved for the output of the program.
        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    assert exporter != "off", "no exporter is needed"
    made: SpanExporter = make_exporter("traces", exporter, endpoint)
    return made


def _exporter_for(settings: TelemetrySettings) -> Exporter:
    if settings.spans == "console":
        return "console"
    # An endpoint enables spans, unless `spans = "off"` is set explicitly.
    is_enabled_by_endpoint = "spans" not in settings.model_fields_set and settings.otlp_endpoint is not None
    if settings.spans == "off" and not is_enabled_by_endpoint:
        return "off"
    return protocol_of(settings.otlp_endpoint)
