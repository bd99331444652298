"""Set up telemetry from settings: the observer of a service, and the SDK that exports the process's spans."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit, urlunsplit

from integr8s_idem.config import TelemetrySettings
from integr8s_idem.config.message_text import installing
from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.composite import combined

# Libraries are imported where they are used, so that a process loads only what its settings need: importing the gRPC
# exporter takes a third of a second.
if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Exporter: TypeAlias = Literal["off", "console", "http", "grpc"]

CLOSE_TIMEOUT: Final = timedelta(seconds=3)
EXPORT_TIMEOUT_SECONDS: Final = 5
"""Timeout for exporting a batch of spans, including retries."""
GRPC_PORT: Final = 4317
_EXTRAS: Final = {"http": ("HTTP", "otlp-http"), "grpc": ("gRPC", "otlp-grpc")}
"""Name of each protocol, and the extra that installs its exporter."""

_log = logging.getLogger(__name__)


class TelemetryHandle:
    """Exports spans until it is closed; an async context manager."""

    def __init__(self, provider: TracerProvider | None = None, exporter: SpanExporter | None = None) -> None:
        self._provider = provider
        self._exporter = exporter

    @property
    def sends_spans(self) -> bool:
        """Whether this handle exports spans; `False` if the application has its own SDK."""
        return self._provider is not None

    async def close(self, timeout: timedelta = CLOSE_TIMEOUT) -> None:
        """Export the remaining spans without blocking the event loop, for at most `timeout`, and stop.

        Spans that the collector does not accept in time are lost, and a warning is logged.
        """
        provider, self._provider = self._provider, None
        if provider is None:
            return
        sent = asyncio.Event()
        # A daemon thread, since the interpreter waits for threads of the loop's executor at exit.
        Thread(
            target=_shut_down, args=(provider, asyncio.get_running_loop(), sent), name="spans-close", daemon=True
        ).start()
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await sent.wait()
        except TimeoutError:
            _log.warning("the last spans were not exported within %g s and are lost", timeout.total_seconds())
            # Ends the retries and the thread, since a process may outlive its services.
            assert self._exporter is not None
            Thread(target=self._exporter.shutdown, name="spans-abort", daemon=True).start()

    async def __aenter__(self) -> TelemetryHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _shut_down(provider: TracerProvider, loop: asyncio.AbstractEventLoop, sent: asyncio.Event) -> None:
    try:
        provider.shutdown()
    finally:
        # The loop is closed if nobody waits any longer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(sent.set)


_configuring = Lock()
_configured: tuple[TelemetryHandle, TelemetrySettings, str] | None = None


def configure_telemetry(settings: TelemetrySettings, *, service_name: str) -> TelemetryHandle:
    """Export the spans of this process according to `settings`.

    If the application has set a TracerProvider, that is used instead.  A second call returns the handle of the first,
    closed or not, since OpenTelemetry does not allow a process to replace its TracerProvider.

    Args:
        settings: Section `[telemetry]`.
        service_name: `service.name` of the process in every span.

    Raises:
        SettingsError: `telemetry.otlp_endpoint` is not a valid address of a collector, or the extra for its protocol
            is not installed.
    """
    global _configured
    exporter = _exporter_for(settings)
    if exporter == "off":
        return TelemetryHandle()
    with _configuring:
        if _configured is None:
            _configured = (_install(settings, exporter, service_name), settings, service_name)
        elif _configured[1:] != (settings, service_name):
            _log.warning("the export of spans is already set up in this process; the new settings are ignored")
        return _configured[0]


def check_exporter(settings: TelemetrySettings) -> None:
    """Check that the exporter that `settings` require is installed.

    If the application has set a TracerProvider, no exporter is required.

    Raises:
        SettingsError: The exporter belongs to an extra that is not installed.
    """
    exporter = _exporter_for(settings)
    if exporter in _EXTRAS and not _has_provider():
        _exporter_class(exporter)


def observer_for(settings: TelemetrySettings, service: str, *, group: str | None = None) -> Observer:
    """Return the observer of `service`: metrics if they are enabled, and spans when the process has an SDK.

    The same arguments return the same observer.
    """
    return _observer(settings.metrics_enabled, settings.messaging_metrics, settings.span_keys, service, group)


@cache
def _observer(metrics: bool, messaging: bool, span_keys: bool, service: str, group: str | None) -> Observer:
    from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

    spans = OpenTelemetryObserver(service, span_keys=span_keys, group=group)
    if not metrics:
        return spans
    from integr8s_idem.telemetry.prometheus import PrometheusObserver

    if not messaging:
        return combined(spans, PrometheusObserver(service))
    from integr8s_idem.telemetry.messaging_metrics import MessagingMetricsObserver

    return combined(spans, PrometheusObserver(service), MessagingMetricsObserver(service, group=group))


def _has_provider() -> bool:
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _install(settings: TelemetrySettings, exporter: Exporter, service_name: str) -> TelemetryHandle:
    from opentelemetry import trace

    if _has_provider():
        _log.info("using the application's TracerProvider for spans instead of the settings in [telemetry]")
        return TelemetryHandle()
    span_exporter = _make_exporter(exporter, settings.otlp_endpoint)
    provider = _make_provider(settings, span_exporter, service_name)
    trace.set_tracer_provider(provider)
    return TelemetryHandle(provider, span_exporter)


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
    make = _exporter_class(exporter)
    # Without an endpoint in the settings, the exporter uses OTEL_EXPORTER_OTLP_ENDPOINT and other variables.
    url = None if endpoint is None else _endpoint_url(endpoint)
    if exporter == "grpc":
        assert url is not None
        insecure = url.scheme in {"http", "grpc"}
        return make(endpoint=_host_and_port(url), insecure=insecure, timeout=EXPORT_TIMEOUT_SECONDS)
    return make(endpoint=None if url is None else _traces_url(url), timeout=EXPORT_TIMEOUT_SECONDS)


def _exporter_class(exporter: Exporter) -> Callable[..., SpanExporter]:
    """Import the exporter of a protocol, which an extra installs."""
    try:
        if exporter == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

            return GrpcSpanExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
    except ModuleNotFoundError as error:
        protocol, extra = _EXTRAS[exporter]
        mistake = f"needs the exporter for OTLP over {protocol}, which is not installed; {installing(extra)}"
        raise SettingsError("settings", [SettingsMistake("telemetry.otlp_endpoint", mistake)]) from error
    return HttpSpanExporter


def _exporter_for(settings: TelemetrySettings) -> Exporter:
    if settings.spans == "console":
        return "console"
    # An endpoint enables spans, unless `spans = "off"` is set explicitly.
    is_enabled_by_endpoint = "spans" not in settings.model_fields_set and settings.otlp_endpoint is not None
    if settings.spans == "off" and not is_enabled_by_endpoint:
        return "off"
    if settings.otlp_endpoint is None:
        return "http"
    url = _endpoint_url(settings.otlp_endpoint)
    return "grpc" if url.scheme in {"grpc", "grpcs"} or url.port == GRPC_PORT else "http"


def _endpoint_url(endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        if url.scheme in {"http", "https", "grpc", "grpcs"} and url.hostname and url.port != 0:
            return url
    except ValueError:
        # For example, the port is not a number, or an IPv6 address lacks its closing bracket.
        pass
    shown = "the value" if "@" in endpoint else f'"{endpoint}"'
    mistake = (
        f"{shown} is not a valid address of a collector; write http://host:4318 for HTTP, http://host:4317 for gRPC"
    )
    raise SettingsError("settings", [SettingsMistake("telemetry.otlp_endpoint", mistake)])


def _traces_url(url: SplitResult) -> str:
    return urlunsplit(url._replace(path="/v1/traces") if url.path in {"", "/"} else url)


def _host_and_port(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{host}:{url.port or GRPC_PORT}"
