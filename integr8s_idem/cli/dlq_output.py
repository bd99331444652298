"""Format dead letters: one per line, one per screen, counted, and as the report of a replay."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from integr8s_idem._util.escaping import printable, shown
from integr8s_idem.operations.dead_letter_counts import Group
from integr8s_idem.operations.dead_letter_groups import ErrorGroup, GroupedDeadLetters, GroupSummary
from integr8s_idem.operations.dead_letter_reader import OffsetRange
from integr8s_idem.operations.dead_letter_replay import ALREADY_REPLAYED, SKIP_REASONS, ReplayDecision, Report
from integr8s_idem.operations.dead_letters import StoredDeadLetter, encode_bytes, format_time
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.worker.dead_letters import REPLAY_SIGNATURE

PAYLOAD_PREVIEW: Final = 2_000
"""Number of characters of a payload that are shown without `--payload`."""

_MAX_TEXT: Final = 1_000
_INDENT: Final = 14
_NO_REASON: Final = "(none)"


class ListFormat:
    """Formats the lines of a list.  The width of the first column is known before the first line is printed."""

    def __init__(self, offset_ranges: Iterable[OffsetRange]) -> None:
        places = (f"{each.partition.topic}:{each.partition.partition}:{each.end}" for each in offset_ranges)
        self._place_width = max(map(len, places), default=5)

    def heading(self) -> str:
        return self._line("place", "dead-lettered (UTC)", "service", "reason", "error", "gen", "key")

    def line(self, dead_letter: StoredDeadLetter) -> str:
        return self._line(
            str(dead_letter.place),
            f"{dead_letter.at:%Y-%m-%d %H:%M:%S}",
            dead_letter.service,
            dead_letter.reason or _NO_REASON,
            dead_letter.error_class,
            str(dead_letter.generation),
            dead_letter.key,
        )

    def _line(self, place: str, at: str, service: str, reason: str, error: str, generation: str, key: str) -> str:
        width = self._place_width
        # Never truncated: dead letters differ in the last column.
        line = f"{place:<{width}}  {at:<19}  {service:<14}  {reason:<17}  {error:<20}  {generation:>3}  {key}"
        return printable(line).rstrip()


def tally_lines(rows: Sequence[tuple[Group, int]]) -> Iterator[str]:
    """Yield one line for each group."""
    width = max((len(f"{count:,}") for _, count in rows), default=0)
    for group, count in rows:
        parts = (group.topic, group.service, group.reason or _NO_REASON, group.error_class)
        yield printable(f"  {count:>{width},}  " + "  ".join(part for part in parts if part))


def group_lines(groups: GroupedDeadLetters) -> Iterator[str]:
    """Yield the number of dead letters, and a paragraph for each group."""
    yield count_text(groups.total)
    for group, summary in groups.rows():
        yield ""
        yield from _group(group, summary)


def _group(group: ErrorGroup, summary: GroupSummary) -> Iterator[str]:
    if group.id:
        who = " ".join(part for part in (group.service, group.handler) if part)
        yield printable(f"{group.id}  {summary.count:,}  {who}  {group.reason or _NO_REASON}")
        yield _row("error", group.pattern)
    else:
        yield f"{'(others)':<12}  {summary.count:,}  of further groups"
    yield _row("time", f"{format_time(summary.first)} to {format_time(summary.last)}")
    yield _row("example", str(summary.example))


def count_text(number: int, noun: str = "dead letter") -> str:
    """Return `1 dead letter` or `2 dead letters`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class DeadLetterDetails(NamedTuple):
    """A dead letter with its records and what a replay would do."""

    dead_letter: StoredDeadLetter
    history: Mapping[int, IdempotencyRecord | Corrupt]
    """The records of its work by generation."""
    decision: ReplayDecision
    store_problem: str
    """Why the store could not be queried."""

    def as_json(self) -> dict[str, Any]:
        replay = self.decision.replay
        return {
            **self.dead_letter.as_json(),
            "records": {str(generation): _record_json(record) for generation, record in self.history.items()},
            "store_problem": self.store_problem,
            "replay": {
                "status": self.decision.status.value,
                "topic": replay.topic if replay else "",
                # The signature is omitted: anyone who has it could publish this replay.
                "headers": [[name, encode_bytes(value)] for name, value in replay.headers if name != REPLAY_SIGNATURE]
                if replay
                else [],
            },
        }


def details_text(details: DeadLetterDetails, *, payload: bool) -> str:
    """Format the details on one screen; `payload` includes the whole payload."""
    dead_letter = details.dead_letter
    parts = [
        f"{dead_letter.place}  {'dead-lettered' if dead_letter.reason else 'published'} {format_time(dead_letter.at)}",
        "\n".join(_row(name, text) for name, text in _properties(dead_letter) if text),
        "headers\n" + "\n".join(f"  {line}" for line in _headers(dead_letter)),
        "\n".join(_payload(dead_letter, whole=payload)),
        "records\n" + "\n".join(f"  {line}" for line in _history(details)),
        "replay\n" + textwrap.fill(printable(_preview(details)), 110, initial_indent="  ", subsequent_indent="  "),
    ]
    return "\n\n".join(parts)


def _properties(dead_letter: StoredDeadLetter) -> Iterator[tuple[str, str]]:
    attempts = "" if dead_letter.attempts is None else f", {count_text(dead_letter.attempts, 'attempt')}"
    yield "reason", dead_letter.reason or "none: not dead-lettered by this library"
    yield "error", dead_letter.error
    yield "service", dead_letter.service and f"{dead_letter.service} (group {dead_letter.group}){attempts}"
    yield "handler", dead_letter.handler
    yield "event", dead_letter.event_type
    yield "key", dead_letter.key
    yield "record", dead_letter.record_key
    yield "generation", str(dead_letter.generation)
    published = f", published {format_time(dead_letter.published_at)}" if dead_letter.published_at else ""
    yield "original", f"{dead_letter.origin}{published}" if dead_letter.origin else ""


def _row(name: str, text: str) -> str:
    return textwrap.fill(
        shown(text, _MAX_TEXT), 110, initial_indent=f"  {name:<{_INDENT - 2}}", subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )  # fmt: skip


def _headers(dead_letter: StoredDeadLetter) -> Iterator[str]:
    for name, value in dead_letter.record.headers:
        encoded = encode_bytes(value)
        text = "(null)" if encoded is None else encoded.get("text") or f"{value!r}"
        yield f"{printable(name)}: {shown(text, _MAX_TEXT)}"


def _payload(dead_letter: StoredDeadLetter, *, whole: bool) -> Iterator[str]:
    record = dead_letter.record
    key = "no key" if record.key is None else f"key {shown(record.key.decode('utf-8', 'backslashreplace'), 200)}"
    if record.value is None:
        yield f"message: {key}, no payload"
        return
    text, encoding = _readable(record.value)
    preview = text if whole else text[:PAYLOAD_PREVIEW]
    is_complete = len(preview) == len(text)
    note = "" if is_complete else f", the first {PAYLOAD_PREVIEW:,} characters; use --payload to show all"
    yield f"message: {key}, {count_text(dead_letter.size, 'byte')}{encoding}{note}"
    yield from (f"  {printable(line)}" for line in preview.split("\n"))


def _readable(value: bytes) -> tuple[str, str]:
    encoded = encode_bytes(value)
    assert encoded is not None
    return (encoded["text"], "") if "text" in encoded else (encoded["base64"], " in base64")


def _history(details: DeadLetterDetails) -> Iterator[str]:
    if details.store_problem:
        yield f"unknown, the store could not be queried: {shown(details.store_problem, _MAX_TEXT)}"
    elif not details.dead_letter.record_key:
        yield "none: no guarded handler dead-lettered this message"
    elif not details.history:
        yield "none in the store; records may have expired"
    for generation, record in details.history.items():
        yield f"generation {generation}  {_record_text(record)}"


def _record_text(record: IdempotencyRecord | Corrupt) -> str:
    if isinstance(record, Corrupt):
        return f"cannot be read: {shown(record.reason, _MAX_TEXT)}"
    settled = f", {format_time(record.settled_at)}" if record.settled_at else ""
    expires = f", expires {format_time(record.expires_at)}" if record.expires_at else ""
    error = f": {shown(record.error, _MAX_TEXT)}" if record.error else ""
    return f"{record.status.value} at attempt {record.attempt}{settled}{expires}{error}"


def _record_json(record: IdempotencyRecord | Corrupt) -> dict[str, Any]:
    if isinstance(record, Corrupt):
        return {"key": record.key, "status": "corrupt", "error": record.reason}
    return {
        "key": record.key,
        "status": record.status.value,
        "attempt": record.attempt,
        "error": record.error,
        "settled_at": format_time(record.settled_at) if record.settled_at else "",
        "expires_at": format_time(record.expires_at) if record.expires_at else "",
    }


def _preview(details: DeadLetterDetails) -> str:
    dead_letter, replay = details.dead_letter, details.decision.replay
    if replay is None:
        return f"would be skipped: {SKIP_REASONS[details.decision.status]}"
    recipients = [("group", dead_letter.group), ("handler", dead_letter.handler)]
    recipient = " and ".join(f"{kind} {name}" for kind, name in recipients if name)
    suffix = f", for {recipient}" if recipient else ""
    return f"would be published to {replay.topic} as generation {dead_letter.generation + 1}{suffix}"


def report_text(report: Report, done: str) -> str:
    """Format the report of a replay.  `done` is `replayed` or `to replay`."""
    lines = [f"{count_text(report.published)} {done}", *tally_lines(report.groups.rows())]
    lines += [printable(f"  to topic {topic}: {count:,}") for topic, count in report.destinations.most_common()]
    if report.unguarded:
        lines.append(
            f"  {report.unguarded:,} of them without a record: earlier replays are unknown, and every replay runs the "
            "handler again unless it is guarded"
        )
    for status, count in report.skipped.most_common():
        places = ", ".join(report.examples[status]) + (", …" if count > len(report.examples[status]) else "")
        lines += [f"{count_text(count)} skipped: {SKIP_REASONS[status]}", f"  {places}"]
    if any(status in ALREADY_REPLAYED for status in report.skipped):
        lines.append("  (use --again to publish these as well)")
    lines += [printable(f"topic {topic}: {error}") for topic, error in report.errors.items()]
    return "\n".join(lines)


def json_line(value: Mapping[str, Any]) -> str:
    """Encode an object on one line of ASCII, which cannot control a terminal."""
    return json.dumps(value)
