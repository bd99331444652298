"""Dead letters as people read them: one a line, one a screen, counted, and as they are put back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from integr8s_idem._util.escaping import printable, shown
from integr8s_idem.operations.dead_letter_counts import Group
from integr8s_idem.operations.dead_letter_reader import OffsetRange
from integr8s_idem.operations.dead_letter_replay import KNOWN_ALREADY, TOLD, Decision, Report
from integr8s_idem.operations.dead_letters import Letter, encoded, written
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.worker.dead_letters import REPLAY_SIGNATURE

PAYLOAD: Final = 2_000
"""Characters of a payload that are shown if nobody asks for all."""

_LONGEST: Final = 1_000
_INDENT: Final = 14


class Columns:
    """The lines of a list, which are printed as they come: how wide the places are is known before."""

    def __init__(self, stretches: Iterable[OffsetRange]) -> None:
        places = (f"{one.partition.topic}:{one.partition.partition}:{one.end}" for one in stretches)
        self._place = max(map(len, places), default=5)

    def heading(self) -> str:
        return self._line("place", "dead-lettered (UTC)", "service", "reason", "error", "gen", "key")

    def line(self, letter: Letter) -> str:
        at = f"{letter.at:%Y-%m-%d %H:%M:%S}"
        generation = str(letter.generation)
        reason, error = letter.reason or "(none of ours)", letter.error_class
        return self._line(str(letter.place), at, letter.service, reason, error, generation, letter.key)

    def _line(self, place: str, at: str, service: str, reason: str, error: str, generation: str, key: str) -> str:
        line = f"{place:<{self._place}}  {at:<19}  {service:<14}  {reason:<17}  {error:<20}  {generation:>3}  {key}"
        # Never cut: what tells letters apart is at the end.
        return printable(line).rstrip()


def tally_lines(rows: Sequence[tuple[Group, int]]) -> Iterator[str]:
    """One line for each group, the largest first."""
    width = max((len(f"{count:,}") for _, count in rows), default=0)
    for group, count in rows:
        told = (group.topic, group.service, group.reason or "(none of ours)", group.error_class)
        yield printable(f"  {count:>{width},}  " + "  ".join(part for part in told if part))


def counted(number: int, what: str = "letter") -> str:
    """`1 letter`, `2 letters`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Story(NamedTuple):
    """A letter, and what became of it."""

    letter: Letter
    history: Mapping[int, IdempotencyRecord | Corrupt]
    """The records of its work by generation."""
    decision: Decision
    problem: str
    """Why the store tells nothing."""

    def as_json(self) -> dict[str, Any]:
        replay = self.decision.replay
        return {
            **self.letter.whole(),
            "records": {str(generation): _record_json(known) for generation, known in self.history.items()},
            "store_problem": self.problem,
            "replay": {
                "fate": self.decision.fate.value,
                "topic": replay.topic if replay else "",
                # Not the signature: the publisher of a replay makes it, and whoever has it can publish that replay.
                "headers": [[name, encoded(value)] for name, value in replay.headers if name != REPLAY_SIGNATURE]
                if replay
                else [],
            },
        }


def story_text(story: Story, *, payload: bool) -> str:
    """One screen; with `payload` as long as it takes."""
    letter = story.letter
    parts = [
        f"{letter.place}  {'dead-lettered' if letter.reason else 'published'} {written(letter.at)}",
        "\n".join(_row(name, text) for name, text in _facts(letter) if text),
        "headers\n" + "\n".join(f"  {line}" for line in _headers(letter)),
        "\n".join(_payload(letter, whole=payload)),
        "records\n" + "\n".join(f"  {line}" for line in _history(story)),
        "replay\n" + textwrap.fill(printable(_foretold(story)), 110, initial_indent="  ", subsequent_indent="  "),
    ]
    return "\n\n".join(parts)


def _facts(letter: Letter) -> Iterator[tuple[str, str]]:
    attempts = "" if letter.attempts is None else f", {counted(letter.attempts, 'attempt')}"
    yield "reason", letter.reason or "none: no service of this library gave it up"
    yield "error", letter.error
    yield "given up by", letter.service and f"{letter.service} (group {letter.group}){attempts}"
    yield "handler", letter.handler
    yield "event", letter.event_type
    yield "key", letter.key
    yield "record", letter.record_key
    yield "generation", str(letter.generation)
    published = f", published {written(letter.published_at)}" if letter.published_at else ""
    yield "came from", f"{letter.origin}{published}" if letter.origin else ""


def _row(name: str, text: str) -> str:
    return textwrap.fill(
        shown(text, _LONGEST), 110, initial_indent=f"  {name:<{_INDENT - 2}}", subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )  # fmt: skip


def _headers(letter: Letter) -> Iterator[str]:
    for name, value in letter.record.headers:
        told = encoded(value)
        text = "(null)" if told is None else told.get("text") or f"{value!r}"
        yield f"{printable(name)}: {shown(text, _LONGEST)}"


def _payload(letter: Letter, *, whole: bool) -> Iterator[str]:
    record = letter.record
    key = "no key" if record.key is None else f"key {shown(record.key.decode('utf-8', 'backslashreplace'), 200)}"
    if record.value is None:
        yield f"message: {key}, no payload"
        return
    text, how = _readable(record.value)
    cut = text if whole else text[:PAYLOAD]
    part = "" if len(cut) == len(text) else f", the first {PAYLOAD:,} characters; --payload shows all"
    yield f"message: {key}, {counted(letter.size, 'byte')}{how}{part}"
    yield from (f"  {printable(line)}" for line in cut.split("\n"))


def _readable(value: bytes) -> tuple[str, str]:
    told = encoded(value)
    assert told is not None
    return (told["text"], "") if "text" in told else (told["base64"], " in base64")


def _history(story: Story) -> Iterator[str]:
    if story.problem:
        yield f"the store tells nothing: {shown(story.problem, _LONGEST)}"
    elif not story.letter.record_key:
        yield "it names none: no guarded handler gave it up"
    elif not story.history:
        yield "the store has none, or none any more"
    for generation, known in story.history.items():
        yield f"generation {generation}  {_record_text(known)}"


def _record_text(known: IdempotencyRecord | Corrupt) -> str:
    if isinstance(known, Corrupt):
        return f"cannot be read: {shown(known.reason, _LONGEST)}"
    settled = f", {written(known.settled_at)}" if known.settled_at else ""
    expires = f", forgotten {written(known.expires_at)}" if known.expires_at else ""
    error = f": {shown(known.error, _LONGEST)}" if known.error else ""
    return f"{known.status.value} at attempt {known.attempt}{settled}{expires}{error}"


def _record_json(known: IdempotencyRecord | Corrupt) -> dict[str, Any]:
    if isinstance(known, Corrupt):
        return {"key": known.key, "status": "corrupt", "error": known.reason}
    return {
        "key": known.key,
        "status": known.status.value,
        "attempt": known.attempt,
        "error": known.error,
        "settled_at": written(known.settled_at) if known.settled_at else "",
        "expires_at": written(known.expires_at) if known.expires_at else "",
    }


def _foretold(story: Story) -> str:
    letter, replay = story.letter, story.decision.replay
    if replay is None:
        return f"leaves it out: {TOLD[story.decision.fate]}"
    whom = " and ".join(
        text
        for text in (letter.group and f"group {letter.group}", letter.handler and f"handler {letter.handler}")
        if text
    )
    return f"publishes it to {replay.topic} as generation {letter.generation + 1}{f', for {whom}' if whom else ''}"


def report_text(report: Report, done: str) -> str:
    """What a replay comes to.  `done`: `replayed`, or `to be replayed`."""
    lines = [f"{counted(report.published)} {done}", *tally_lines(report.groups.rows())]
    lines += [printable(f"  to topic {topic}: {count:,}") for topic, count in report.destinations.most_common()]
    if report.unguarded:
        lines.append(
            f"  {report.unguarded:,} of them name no record: nothing tells whether they were replayed before, and each "
            "replay runs their handler where that is not guarded"
        )
    for fate, count in report.left_out.most_common():
        places = ", ".join(report.examples[fate]) + (", …" if count > len(report.examples[fate]) else "")
        lines += [f"{counted(count)} left out: {TOLD[fate]}", f"  {places}"]
    if any(fate in KNOWN_ALREADY for fate in report.left_out):
        lines.append("  (--again publishes also what the store says was replayed)")
    lines += [printable(f"topic {topic}: {error}") for topic, error in report.errors.items()]
    return "\n".join(lines)


def as_line(told: Mapping[str, Any]) -> str:
    """One object in one line, nothing of which a terminal would obey."""
    return json.dumps(told)
