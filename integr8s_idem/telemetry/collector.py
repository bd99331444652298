"""The collector for OTLP: its address, its protocol, and the exporters that extras install."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit, urlunsplit

from integr8s_idem.config.message_text import installing
from integr8s_idem.errors import SettingsError, SettingsMistake

Protocol: TypeAlias = Literal["http", "grpc"]
Signals: TypeAlias = Literal["traces", "logs"]
"""What is exported."""

EXPORT_TIMEOUT_SECONDS: Final = 5
"""Timeout for exporting a batch, including retries."""
GRPC_PORT: Final = 4317
_EXTRAS: Final = {"http": ("HTTP", "otlp-http"), "grpc": ("gRPC", "otlp-grpc")}
"""Name of each protocol, and the extra that installs its exporters."""
_EXPORTERS: Final = {"traces": ("trace_exporter", "OTLPSpanExporter"), "logs": ("_log_exporter", "OTLPLogExporter")}
"""Module and class of each exporter."""
_SETTINGS: Final = {"traces": "telemetry.otlp_endpoint", "logs": "telemetry.otlp_logs"}
"""The setting that requires each exporter."""


def protocol_of(endpoint: str | None) -> Protocol:
    """Return the protocol of a collector.

    Raises:
        SettingsError: `endpoint` is not a valid address.
    """
    if endpoint is None:
        return "http"
    url = endpoint_url(endpoint)
    return "grpc" if url.scheme in {"grpc", "grpcs"} or url.port == GRPC_PORT else "http"


def make_exporter(signals: Signals, protocol: Protocol, endpoint: str | None) -> Any:
    """Return the exporter of `signals`.

    Raises:
        SettingsError: Its extra is not installed, or the path of `endpoint` is for other signals.
    """
    make = exporter_class(signals, protocol)
    # Without an endpoint in the settings, the exporter uses OTEL_EXPORTER_OTLP_ENDPOINT and other variables.
    url = None if endpoint is None else endpoint_url(endpoint)
    if protocol == "grpc":
        assert url is not None
        insecure = url.scheme in {"http", "grpc"}
        return make(endpoint=_host_and_port(url), insecure=insecure, timeout=EXPORT_TIMEOUT_SECONDS)
    return make(endpoint=None if url is None else signals_url(url, signals), timeout=EXPORT_TIMEOUT_SECONDS)


def exporter_class(signals: Signals, protocol: Protocol) -> Any:
    """Import the exporter of a protocol, which an extra installs.

    Raises:
        SettingsError: The extra is not installed.
    """
    module, name = _EXPORTERS[signals]
    try:
        return getattr(import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}"), name)
    except ModuleNotFoundError as error:
        shown, extra = _EXTRAS[protocol]
        mistake = f"needs the exporter for OTLP over {shown}, which is not installed; {installing(extra)}"
        raise SettingsError("settings", [SettingsMistake(_SETTINGS[signals], mistake)]) from error


def endpoint_url(endpoint: str) -> SplitResult:
    """Return the parts of the address of a collector.

    Raises:
        SettingsError: It is not a valid address.
    """
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


def signals_url(url: SplitResult, signals: Signals) -> str:
    """Return the URL for `signals` over HTTP.  The path of an endpoint is that for spans: `/otlp/v1/traces`.

    Raises:
        SettingsError: The path for logs cannot be derived from it.
    """
    if url.path in {"", "/"}:
        return urlunsplit(url._replace(path=f"/v1/{signals}"))
    if signals == "traces":
        return urlunsplit(url)
    folder, _, last = url.path.rstrip("/").rpartition("/")
    if last != "traces":
        mistake = f"needs an otlp_endpoint without a path, or with a path that ends in /traces, not {url.path}"
        raise SettingsError("settings", [SettingsMistake("telemetry.otlp_logs", mistake)])
    return urlunsplit(url._replace(path=f"{folder}/logs"))


def _host_and_port(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{host}:{url.port or GRPC_PORT}"
