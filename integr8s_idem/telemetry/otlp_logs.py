"""Export log records with the OpenTelemetry SDK.

The SDK's own `LoggingHandler` is deprecated, and would pass the fields of the context on under their short names.  The
handler in this module uses only the API, so that it works with the SDK that an application has set up, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from opentelemetry._logs import LoggerProvider, SeverityNumber, get_logger_provider, set_logger_provider
from opentelemetry._logs._internal import ProxyLoggerProvider
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value

from integr8s_idem.config import TelemetrySettings
from integr8s_idem.config.urls import redacted
from integr8s_idem.telemetry.collector import endpoint_url, exporter_class, make_exporter, protocol_of, signals_url
from integr8s_idem.telemetry.log_fields import ContextFilter
from integr8s_idem.telemetry.log_records import exception_fields, extra_fields
from integr8s_idem.telemetry.shutdown import Stoppable, shut_down

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider as SdkLoggerProvider

MAX_TEXT: Final = 32_768
"""Maximum characters of a message or an attribute; a collector rejects a batch that is too large as a whole."""

ATTRIBUTES: Final[Mapping[str, str]] = {
    "service": "idempotency.service",
    "topic": "messaging.destination.name",
    "partition": "messaging.destination.partition.id",
    "offset": "messaging.kafka.offset",
    "event_id": "messaging.message.id",
    "event_type": "idempotency.event_type",
    "handler": "idempotency.handler",
    "attempt": "idempotency.attempt",
    "record_key": "idempotency.record_key",
    "message_key": "messaging.kafka.message.key",
}
"""Attributes by field: semantic conventions for messaging where they exist."""
_IN_RECORD: Final = frozenset({"trace_id", "span_id"})
"""Fields that a log record of OpenTelemetry has itself."""
_EXPORTERS: Final = ("opentelemetry", "grpc")
"""Loggers of the exporters: exporting their records would produce more of them."""
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
    (logging.DEBUG, SeverityNumber.DEBUG),
)
_INT64: Final = 2**63

_log: Final = logging.getLogger(__name__)


class OpenTelemetryHandler(logging.Handler):
    """Passes log records on to `provider`, with the fields of their context as attributes."""

    def __init__(self, provider: LoggerProvider, *, keys: bool = False) -> None:
        """`keys`: whether records may contain keys, which may be personal data."""
        super().__init__()
        self._provider = provider
        self.addFilter(ContextFilter(keys=keys))

    def emit(self, record: logging.LogRecord) -> None:
        # In the thread of an exporter, records of any library are about the export.
        if record.name.partition(".")[0] in _EXPORTERS or get_value(_SUPPRESS_INSTRUMENTATION_KEY):
            return
        try:
            self._provider.get_logger(record.name).emit(
                timestamp=int(record.created * 1e9),
                severity_number=_severity(record.levelno),
                severity_text=record.levelname,
                body=_text(redacted(record.getMessage())),
                attributes=_attributes(record),
            )
        except Exception:  # noqa: BLE001 -- like the handlers of logging: a failure to log must not stop the process
            self.handleError(record)


class LogExport:
    """Exports the log records of this process until it is closed."""

    def __init__(self, handler: OpenTelemetryHandler, own: tuple[Stoppable, Stoppable] | None) -> None:
        """`own`: provider and exporter; `None` if the application closes its provider itself."""
        self._handler = handler
        self._own = own
        logging.getLogger().addHandler(handler)

    async def close(self, timeout: timedelta) -> None:
        """Export the remaining records, for at most `timeout`, and stop."""
        own, self._own = self._own, None
        logging.getLogger().removeHandler(self._handler)
        if own is not None:
            await shut_down(*own, timeout, name="logs", what="log records")


def export_logs(settings: TelemetrySettings, service_name: str) -> LogExport | None:
    """Export the records of all loggers; `None` if the application does that already.

    If the application has set a LoggerProvider, that is used.

    Raises:
        SettingsError: See `check_log_exporter`.
    """
    if any(type(handler).__module__.startswith("opentelemetry.") for handler in logging.getLogger().handlers):
        _log.info("the application already exports its log records: telemetry.otlp_logs is ignored")
        return None
    if has_provider():
        return LogExport(OpenTelemetryHandler(get_logger_provider(), keys=settings.span_keys), None)
    exporter = make_exporter("logs", protocol_of(settings.otlp_endpoint), settings.otlp_endpoint)
    provider = _make_provider(exporter, service_name)
    set_logger_provider(provider)
    return LogExport(OpenTelemetryHandler(provider, keys=settings.span_keys), (provider, exporter))


def check_log_exporter(settings: TelemetrySettings) -> None:
    """Check that log records can be exported as `settings` require.

    Raises:
        SettingsError: The exporter belongs to an extra that is not installed, or the endpoint is not valid.
    """
    if has_provider():
        return
    protocol = protocol_of(settings.otlp_endpoint)
    exporter_class("logs", protocol)
    if protocol == "http" and settings.otlp_endpoint is not None:
        signals_url(endpoint_url(settings.otlp_endpoint), "logs")


def has_provider() -> bool:
    """Whether the application has set a LoggerProvider."""
    return not isinstance(get_logger_provider(), ProxyLoggerProvider)


def _make_provider(exporter: Any, service_name: str) -> SdkLoggerProvider:
    from opentelemetry.sdk._logs import LoggerProvider as SdkLoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    # Not at exit: the SDK would wait half a minute for an unavailable collector.
    provider = SdkLoggerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def _severity(level: int) -> SeverityNumber:
    return next((number for least, number in _SEVERITIES if level >= least), SeverityNumber.TRACE)


def _attributes(record: logging.LogRecord) -> dict[str, Any]:
    extra = extra_fields(record)
    found: dict[str, Any] = {
        ATTRIBUTES.get(name, str(name)): _value(value) for name, value in extra.items() if name not in _IN_RECORD
    }
    if "topic" in extra:
        found["messaging.system"] = "kafka"
    if "partition" in extra:
        found[ATTRIBUTES["partition"]] = str(extra["partition"])
    return found | {name: _text(value) for name, value in exception_fields(record).items()}


def _value(value: object) -> Any:
    """Return `value` if it is a plain value that fits, otherwise its text."""
    if isinstance(value, bool | float) or (isinstance(value, int) and -_INT64 <= value < _INT64):
        return value
    return _text(value if isinstance(value, str) else str(value))


def _text(value: str) -> str:
    """Truncate `value` and replace lone surrogates, which would make an exporter drop the whole batch."""
    value = value[:MAX_TEXT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
