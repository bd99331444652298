"""Format log records as JSON, or as one short line on a terminal."""

from __future__ import annotations

import json
import logging
import math
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from rich.console import Console
from rich.text import Text

from integr8s_idem._util.escaping import printable
from integr8s_idem.cli.output import write_error
from integr8s_idem.config.urls import redacted
from integr8s_idem.telemetry.log_fields import FIELDS, ContextFilter
from integr8s_idem.telemetry.log_records import exception_fields, extra_fields

_SHOWN: Final = ("service", "handler", "attempt", "event_id", "record_key", "message_key", "trace_id", "span_id")
"""Fields of the context that are shown by name on a terminal."""
REPEAT_SECONDS: Final = 30.0
"""Interval within which a repeated line of aiokafka is dropped."""
_COLOURS: Final = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: timestamp, level, logger, message, the fields of the context, exception.

    The timestamp is in UTC, as in RFC 3339.  See docs/how-to/read-logs.md.
    """

    def format(self, record: logging.LogRecord) -> str:
        extra = extra_fields(record)
        standard: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        fields: dict[str, Any] = {
            **standard,
            **{name: extra.pop(name) for name in FIELDS if name in extra},
            **extra,
            **standard,
        }
        fields.update(exception_fields(record))
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(_plain(fields), default=str)
        except Exception:  # noqa: BLE001 -- a log call must not fail because of a value that was passed as `extra`
            return json.dumps({name: _writable(value) for name, value in fields.items()}, default=str)


class TextFormatter(logging.Formatter):
    """Formats `12:00:01 INFO    shop  message  name=value  orders[2]@17 service=billing handler=charge`, in local time.

    Of the fields of the context, it shows those that help a reader most.  The lines of a traceback follow, indented.
    Control characters are escaped, since events are untrusted: they can neither control the terminal nor forge a line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        fields = extra_fields(record)
        context = _context_of(fields)
        extra = "".join(f"  {name}={_text_of(value)}" for name, value in fields.items()) + context
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


class QuietHandler(logging.Handler):
    """Reports only once that log lines cannot be written, because the disk is full or the reader has ended.

    The handlers of `logging` print a traceback for each line.  The services go on in both cases.
    """

    _is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name of the base class
        """Report an error of the output once; report others, such as those of a wrong log call, as `logging` does."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if self._is_reported:
            return
        self._is_reported = True
        with suppress(OSError, ValueError):  # standard error is often the same file
            write_error(f"log lines cannot be written, the process continues without them: {error.strerror}")


class _StreamHandler(QuietHandler, logging.StreamHandler[TextIO]):
    """Writes lines to a stream."""


class ConsoleHandler(QuietHandler):
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


def log_as_json(stream: TextIO, level: str, *, keys: bool = False) -> None:
    """Write all log records to `stream` as JSON lines.  `keys`: whether they may contain keys."""
    handler = _StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    _install(handler, level, keys)


def log_as_text(console: Console, level: str, *, keys: bool = False) -> None:
    """Write all log records to the terminal.  `keys`: whether they may contain keys."""
    handler = ConsoleHandler(console)
    handler.setFormatter(TextFormatter())
    _install(handler, level, keys)


def _install(handler: logging.Handler, level: str, keys: bool) -> None:
    handler.addFilter(ContextFilter(keys=keys))
    if level != "DEBUG":
        handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their INFO lines cover every metadata request and server start, which this library's own lines summarize.
    for chatty in ("aiokafka", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)
    logging.captureWarnings(capture=True)


def _context_of(fields: dict[str, Any]) -> str:
    """Remove the fields of the context from `fields`, and return the most useful ones as text."""
    known = {name: fields.pop(name) for name in FIELDS if name in fields}
    shown = [f"{name}={known[name]}" for name in _SHOWN if name in known]
    if "topic" in known and "partition" in known:
        offset = f"@{known['offset']}" if "offset" in known else ""
        shown.insert(0, f"{known['topic']}[{known['partition']}]{offset}")
    return "  " + " ".join(shown) if shown else ""


def _writable(value: Any) -> Any:
    """Return `value`, or a text that replaces one that JSON cannot contain."""
    try:
        return json.loads(json.dumps(_plain(value), default=str))
    except Exception:  # noqa: BLE001 -- of `__str__`, or because the value contains itself
        return _text_of(value)


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 -- any error of `__str__`
        return f"<{type(value).__name__}: {type(error).__name__} in its text>"


def _plain(value: Any) -> Any:
    """Convert keys and numbers that JSON does not support."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
