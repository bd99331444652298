"""Log lines as JSON and as text."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from integr8s_idem.cli.log_format import (
    REPEAT_SECONDS,
    ConsoleHandler,
    JsonFormatter,
    RepeatFilter,
    TextFormatter,
    log_as_json,
    log_as_text,
)
from integr8s_idem.cli.output import safe_console
from integr8s_idem.telemetry.log_fields import ContextFilter, logging_with


def record(message: str = "handled %s", *args: Any, extra: dict[str, Any] | None = None) -> logging.LogRecord:
    """Return a log record."""
    return logging.getLogger("shop").makeRecord("shop", logging.INFO, "f.py", 1, message, args, None, extra=extra)


def as_json(given: logging.LogRecord) -> dict[str, Any]:
    """Parse a JSON line."""
    line = JsonFormatter().format(given)
    assert "\n" not in line
    return json.loads(line, parse_constant=pytest.fail)  # type: ignore[no-any-return]


def test_a_json_line_contains_timestamp_level_logger_message_and_extra_fields() -> None:
    given = record("handled %s", "a\nb", extra={"service": "billing", "attempt": 2})
    given.created = 1_700_000_000.5

    assert as_json(given) == {
        "timestamp": "2023-11-14T22:13:20.500Z",
        "level": "INFO",
        "logger": "shop",
        "message": "handled a\nb",
        "service": "billing",
        "attempt": 2,
    }


def test_extra_fields_do_not_replace_standard_fields() -> None:
    line = as_json(record("m", extra={"level": "x", "timestamp": "x", "logger": "x"}))

    assert (line["level"], line["logger"]) == ("INFO", "shop")
    assert line["timestamp"] != "x"


def test_values_that_json_does_not_support_are_converted() -> None:
    odd = {("a", 1): object, "deep": [{b"k": float("nan")}], "inf": float("inf"), "text": "\ud800"}

    line = as_json(record("m", extra={"odd": odd}))

    assert line["odd"]["inf"] == "inf"
    assert line["odd"]["deep"] == [{"b'k'": "nan"}]


class Mute:
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_values_that_cannot_be_written_are_replaced() -> None:
    endless: dict[str, object] = {}
    endless["self"] = endless
    given = record("m", extra={"endless": endless, "mute": Mute(), "amount": 7})

    line = as_json(given)

    assert (line["message"], line["amount"]) == ("m", 7)
    assert line["endless"].startswith("{'self'")
    assert line["mute"] == "<Mute: ZeroDivisionError in its text>"
    assert "mute=<Mute: ZeroDivisionError in its text>" in TextFormatter().format(given)


def test_a_json_line_contains_the_exception() -> None:
    given = record("m")
    try:
        raise TimeoutError("no response from redis://:secret@host")
    except TimeoutError:
        given.exc_info = sys.exc_info()

    line = as_json(given)

    assert line["exception.type"] == "TimeoutError"
    assert line["exception.message"] == "no response from redis://***@host"
    assert line["exception.stacktrace"].startswith("Traceback (most recent call last):")
    assert "secret" not in line["exception.stacktrace"]


def test_an_exception_without_a_text_is_formatted() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    given = record("m")
    given.exc_info = (UnprintableError, UnprintableError(), None)

    line = as_json(given)

    assert line["exception.type"].endswith("UnprintableError")
    assert line["exception.message"] == "(its text is not available: RuntimeError)"


def test_the_fields_of_the_context_follow_the_message_in_a_fixed_order() -> None:
    with logging_with(attempt=2, handler="charge", trace_id="ab", topic="orders"):
        given = record("m", extra={"order": "7"})
        assert ContextFilter().filter(given)

    assert list(as_json(given))[3:] == ["message", "trace_id", "topic", "handler", "attempt", "order"]


def test_a_text_line_ends_with_the_most_useful_fields_of_the_context() -> None:
    given = record("m", extra={"order": "7"})
    known: dict[str, object] = {"service": "billing", "topic": "orders", "partition": 2, "offset": 17}
    vars(given).update(
        known, event_id="e-1", event_type="order", handler="charge", attempt=2, trace_id="ab", span_id="c"
    )

    line = TextFormatter().format(given)

    assert line.endswith(
        "m  order=7  orders[2]@17 service=billing handler=charge attempt=2 event_id=e-1 trace_id=ab span_id=c"
    )


def test_a_text_line_ends_with_the_extra_fields() -> None:
    line = TextFormatter().format(record("handled %s", "one", extra={"service": "billing"}))

    assert line[8:] == " INFO    shop  handled one  service=billing"


def test_markup_in_a_text_line_is_not_interpreted() -> None:
    stream = StringIO()
    handler = ConsoleHandler(Console(file=stream, width=20))

    handler.emit(record("[red]a long message that must not be broken[/red]"))

    assert stream.getvalue() == "[red]a long message that must not be broken[/red]\n"


def test_control_characters_are_escaped() -> None:
    stream = StringIO()
    handler = ConsoleHandler(Console(file=stream, width=20))
    handler.setFormatter(TextFormatter())

    handler.emit(record("%s", "a\n12:00 INFO faked", extra={"event": "\x1b]0;title\x07\x1b[2J\x9b1m\u202e\ud800"}))

    assert stream.getvalue()[8:] == (
        " INFO    shop  a\\n12:00 INFO faked  event=\\x1b]0;title\\x07\\x1b[2J\\x9b1m\\u202e\\ud800\n"
    )


def test_a_traceback_is_indented_and_escaped() -> None:
    given = record("m")
    try:
        raise ValueError("first\nsecond\x1b[2J")
    except ValueError:
        given.exc_info = sys.exc_info()

    first, *below = TextFormatter().format(given).split("\n")

    assert first.endswith("shop  m")
    assert below[0] == "    Traceback (most recent call last):"
    assert below[-2:] == ["    ValueError: first", "    second\\x1b[2J"]


def from_aiokafka(message: str, when: float) -> logging.LogRecord:
    """Return a record of aiokafka at this time."""
    line = logging.makeLogRecord({"name": "aiokafka.conn", "msg": message})
    line.created = when
    return line


def test_repeated_lines_of_aiokafka_are_dropped() -> None:
    again = RepeatFilter()

    shown = [again.filter(from_aiokafka("gone", when)) for when in (100, 101, 100 + REPEAT_SECONDS, 99)]

    assert shown == [True, False, True, True]


def test_repeated_lines_of_other_loggers_are_kept() -> None:
    again = RepeatFilter()
    lines = [record("same"), record("same"), from_aiokafka("one", 1), from_aiokafka("two", 1)]

    assert all(again.filter(line) for line in lines)


class BrokenStream(StringIO):
    """Standard output on a full disk, or a pipe without a reader."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.mark.usefixtures("_root_logger")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
@pytest.mark.parametrize("form", ["json", "text"])
def test_log_lines_that_cannot_be_written_are_reported_once(
    number: int, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = BrokenStream(OSError(number, os.strerror(number)))
    if form == "json":
        log_as_json(stream, "INFO")
    else:
        log_as_text(safe_console(file=stream), "INFO")

    for _ in range(3):
        logging.getLogger("shop").info("handled")

    reason = os.strerror(number)
    assert capsys.readouterr().err == f"log lines cannot be written, the process continues without them: {reason}\n"


@pytest.mark.usefixtures("_root_logger")
def test_a_wrong_log_call_is_reported_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json(StringIO(), "INFO")

    logging.getLogger("shop").info("handled %d", "one")

    assert "--- Logging error ---" in capsys.readouterr().err
