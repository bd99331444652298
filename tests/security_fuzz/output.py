"""Control characters in dead letters, records, keys, settings and names are escaped by commands and logs."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr, redirect_stdout
from random import Random
from typing import Any, Final

from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.cli.dlq_output import DeadLetterDetails, ListFormat, details_text, tally_lines
from integr8s_idem.cli.keys_output import Listing
from integr8s_idem.cli.log_format import TextFormatter
from integr8s_idem.cli.output import echo, safe_console, write_error
from integr8s_idem.operations.dead_letter_counts import Group
from integr8s_idem.operations.dead_letter_reader import OffsetRange
from integr8s_idem.operations.dead_letter_replay import ReplayDecision, ReplayStatus
from integr8s_idem.operations.dead_letters import StoredDeadLetter
from integr8s_idem.operations.keys.key_parser import ParsedKey
from integr8s_idem.records import Corrupt
from integr8s_idem.worker.dead_letters import GENERATION, PREFIX
from integr8s_idem.worker.kafka_protocols import Partition
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import text
from tests.support.fake_consumer import FakeRecord

EVIL: Final = (
    "\x1b[2J",
    "\x1b]0;mine\x07",
    "\x9b31m",
    "\r",
    "\x08",
    "\u202e",
    "\u2028",
    "\x85",
    "\u200b",
    "\udc9b",
    "\0",
)
_LIST_FORMAT: Final = ListFormat([OffsetRange(Partition("orders.dlq", 0), 0, 10)])
_DLQ_FIELDS: Final = (
    "topic",
    "reason",
    "error",
    "group",
    "handler",
    "key",
    "record-key",
    "attempts",
    "service",
    "event-type",
)
_STATUSES: Final = [status for status in ReplayStatus if status is not ReplayStatus.PUBLISHED]
"""Expected statuses of a dead letter without a replay."""
_ONE_IN: Final = 40
"""A whole command takes a hundred times as long as one line, so only one input in this many is for commands."""


def shown(random: Random) -> Figures:
    """Show a hostile text in one of the outputs."""
    if random.random() < 1 / _ONE_IN:
        return _typed(random)
    return random.choice((_dead_letter, _record, _line, _logged))(random)


def evil(random: Random) -> str:
    """Return text with control characters."""
    return "".join(random.choice((random.choice(EVIL), text(random, 2)[:200])) for _ in range(random.randint(1, 4)))


def must_be_harmless(printed: str, allowed: str = "\n\t") -> None:
    """Assert that all characters are printable or in `allowed`."""
    bad = {each for each in printed if not each.isprintable() and each not in allowed}
    assert not bad, f"{bad!a} in {printed!a:.500}"


def _dead_letter(random: Random) -> Figures:
    def value() -> bytes:
        return evil(random).encode("utf-8", random.choice(("surrogatepass", "replace")))

    names = [*(PREFIX + each for each in _DLQ_FIELDS), GENERATION, evil(random).encode("utf-8", "replace").decode()]
    headers = [(random.choice(names), value()) for _ in range(random.randint(0, 8))]
    record = FakeRecord("orders.dlq", 0, random.randrange(10), random.choice((None, value())), value(), headers)
    dead_letter = StoredDeadLetter(record)
    details = DeadLetterDetails(
        dead_letter,
        {0: Corrupt(key="k", reason=evil(random))},
        ReplayDecision(dead_letter, random.choice(_STATUSES)),
        "",
    )
    must_be_harmless(_LIST_FORMAT.line(dead_letter))
    must_be_harmless(details_text(details, payload=random.random() < 0.5))
    must_be_harmless("\n".join(tally_lines([(Group.of(dead_letter), 1)])))
    return Figures(dead_letters_shown=1)


def _record(random: Random) -> Figures:
    output = io.StringIO()
    key = f"idempotency:{evil(random)}"
    with redirect_stdout(output):
        Listing(as_json=random.random() < 0.3).show(Corrupt(key=key, reason=evil(random)), ParsedKey(key, evil(random)))
    must_be_harmless(output.getvalue())
    return Figures(records_shown=1)


def _line(random: Random) -> Figures:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        echo(evil(random))
        write_error(ValueError(evil(random)))
        safe_console(file=output, width=80, color_system=None).print(evil(random))
    must_be_harmless(output.getvalue())
    return Figures(lines_shown=1)


def _logged(random: Random) -> Figures:
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "%s", (evil(random),), None)
    record.__dict__["event_id"] = evil(random)
    printed = TextFormatter().format(record)
    must_be_harmless(printed, allowed="")
    return Figures(lines_logged=1)


def _typed(random: Random) -> Figures:
    words = evil(random).replace("\0", "") or "x"
    commands: tuple[list[str], ...] = (
        ["errors", words],
        ["settings", "check", "--settings", f"/nowhere/{words}"],
        ["run", f"nowhere:{words}"],
        ["graph", f"nowhere{words}:app"],
        ["keys", "list", "--status", words],
        ["keys", "show", words, "--settings", f"/nowhere/{words}"],
        ["dlq", "show", words, "--settings", f"/nowhere/{words}"],
        [words],
        ["keys", words],
    )
    answer: Any = CliRunner().invoke(app, random.choice(commands))
    assert answer.exit_code != 0
    must_be_harmless(answer.stdout + answer.stderr)
    return Figures(commands_typed=1)
