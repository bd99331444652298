"""What log lines look like: JSON for machines, one short line for people."""

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
"""What every record has, and a copy of the message that uvicorn adds; the rest came by `extra`."""
REPEAT_SECONDS: Final = 30.0
"""How long the same line of aiokafka is not shown again."""
_COLOURS: Final = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given by `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, extra fields, exception."""

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
    """`12:00:01 INFO    integr8s_idem.worker  message  name=value`, in local time.

    One line, and an indented one for each of a traceback.  Events and their ids come from elsewhere:
    what they hold can neither steer the terminal nor look like a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        extra = "".join(f"  {name}={value}" for name, value in extra_fields(record).items())
        line = f"{time} {record.levelname:<7} {record.name}  {redacted(record.getMessage().rstrip())}{extra}"
        below = [redacted(self.formatException(record.exc_info))] if record.exc_info else []
        below += [self.formatStack(record.stack_info)] if record.stack_info else []
        return "\n".join([printable(line), *(f"    {printable(each)}" for text in below for each in text.split("\n"))])


class NotTheSameAgain(logging.Filter):
    """Lets a line of aiokafka pass once in `REPEAT_SECONDS`, by this machine's clock.

    It says each failed connection anew, several times a second.  Its lines are not left out altogether:
    at start they alone name the cause, and later on they alone say that brokers are gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it."""
        if record.name.partition(".")[0] != "aiokafka":
            return True
        line, now = record.getMessage(), record.created
        # A clock that was set back must not silence anything.
        self._last = {said: when for said, when in self._last.items() if 0 <= now - when < REPEAT_SECONDS}
        is_new = line not in self._last
        self._last.setdefault(line, now)
        return is_new


class ConsoleHandler(logging.Handler):
    """Writes above the live table instead of through it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = Text(self.format(record), style=_COLOURS.get(record.levelname, ""))
            self._console.print(line, soft_wrap=True)
        except Exception:  # noqa: BLE001 -- as every handler of logging does: a line that cannot be shown stops nothing
            self.handleError(record)


def log_as_json(stream: TextIO, level: str) -> None:
    """Send everything that is logged to `stream`, as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    _install(handler, level)


def log_as_text(console: Console, level: str) -> None:
    """Send everything that is logged to the terminal."""
    handler = ConsoleHandler(console)
    handler.setFormatter(TextFormatter())
    _install(handler, level)


def _install(handler: logging.Handler, level: str) -> None:
    if level != "DEBUG":
        handler.addFilter(NotTheSameAgain())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their INFO is about every metadata look-up and every server start: ours says what matters.
    for chatty in ("aiokafka", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.DEBUG if level == "DEBUG" else logging.WARNING)
    logging.captureWarnings(capture=True)


def _plain(value: Any) -> Any:
    """`value` with keys and numbers that JSON can hold."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
