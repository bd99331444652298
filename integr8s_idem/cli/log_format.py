"""Format log records as JSON, or as one short line on a terminal."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from rich.console import Console
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.config.urls import redacted

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes of every record, and uvicorn's copy of the message; all others were passed as `extra`."""
REPEAT_SECONDS: Final = 30.0
"""Interval within which a repeated line of aiokafka is dropped."""
_COLOURS: Final = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the attributes that were passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time (UTC, ISO 8601), level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            **extra_fields(record),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        order = ("time", "level", "logger", "message")
        ordered = {name: fields.pop(name) for name in order} | fields
        return json.dumps(_plain(ordered), default=str)


class TextFormatter(logging.Formatter):
    """Formats `12:00:01 INFO    integr8s_idem.worker  message  name=value`, in local time.

    The lines of a traceback follow, indented.  Control characters are escaped, since events are untrusted: they can
    neither control the terminal nor forge a log line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        extra = "".join(f"  {name}={value}" for name, value in extra_fields(record).items())
        line = f"{time} {record.levelname:<7} {record.name}  {redacted(record.getMessage().rstrip())}{extra}"
        below = [redacted(self.formatException(record.exc_info))] if record.exc_info else []
        below += [self.formatStack(record.stack_info)] if record.stack_info else []
        return "\n".join([printable(line), *(f"    {printable(each)}" for text in below for each in text.split("\n"))])


class RepeatFilter(logging.Filter):
    """Drops lines of aiokafka that were logged less than `REPEAT_SECONDS` ago.

    aiokafka logs every failed connection, several times a second.  The first of these lines is needed: it names the
    cause when a worker cannot start, and reports brokers that are lost later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        if record.name.partition(".")[0] != "aiokafka":
            return True
        line, now = record.getMessage(), record.created
        # A clock that is set back must not suppress lines.
        self._last = {text: when for text, when in self._last.items() if 0 <= now - when < REPEAT_SECONDS}
        is_new = line not in self._last
        self._last.setdefault(line, now)
        return is_new


class WorkerProcessFilter(logging.Filter):
    """Adds the number of this worker process to all records."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the number."""
        record.worker_process = self._number
        return True


class ConsoleHandler(logging.Handler):
    """Writes above the live table."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = Text(self.format(record), style=_COLOURS.get(record.levelname, ""))
            self._console.print(line, soft_wrap=True)
        except Exception:  # noqa: BLE001 -- like the handlers of logging: a failure to log must not stop the process
            self.handleError(record)


def log_as_json(stream: TextIO, level: str) -> None:
    """Write all log records to `stream` as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    _install(handler, level)


def log_as_text(console: Console, level: str) -> None:
    """Write all log records to the terminal."""
    handler = ConsoleHandler(console)
    handler.setFormatter(TextFormatter())
    _install(handler, level)


def _install(handler: logging.Handler, level: str) -> None:
    if level != "DEBUG":
        handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their INFO lines cover every metadata request and server start, which this library's own lines summarize.
    for chatty in ("aiokafka", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)
    logging.captureWarnings(capture=True)


def _plain(value: Any) -> Any:
    """Convert keys and numbers that JSON does not support."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
