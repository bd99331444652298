"""Write docs/reference/fault-matrix.md from the marks, the rows and the record: `python -m tests.campaigns.matrix`."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.campaigns.figures import Campaign
from tests.campaigns.marks import marked
from tests.campaigns.record import Record, load, load_tests
from tests.campaigns.recorder import belongs
from tests.campaigns.registry import campaigns

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "fault-matrix.md"
ROWS: Final = Path(__file__).parent / "scenarios.toml"

HEAD: Final = """\
# The fault matrix

Each row is a fault, the required outcome, and the tests that show it. `make matrix` generates this page from the rows
in `tests/campaigns/scenarios.toml`, the marks on the tests, and the recorded results; a test checks that it is up to
date.

Processes are killed and stalled with signals. Redis and Kafka are real servers, except in `tests/unit`, where the
broker and the store are in memory, and in files whose docstring says so; a test checks that it does. *Cases* come from
the last recorded run of the tests; tests that were marked after it are shown as not recorded.
"""

FIGURES: Final = """\
## Figures

`make test` runs a small number of each campaign. `make faults` continues each campaign up to its target, and resumes
where it was stopped. Zero occurrences in N runs means, with 95 % confidence, at most 3 in N; `-` means that the
campaign does not count it. *Lost*: requested, but neither completed nor dead-lettered. *Repeated in the sink*: repeated
in a sink that checks key and fence. *Repeated outside*: the handler could tell from its attempt and fence that it was a
repeat, or the store's loss was counted. *Commits*: the commits of the first and the last run, with `+` if the library
had uncommitted changes. To see what has changed since, run `git diff COMMIT -- integr8s_idem`.

"""

COLUMNS: Final = (
    "campaign",
    "unit",
    "`make test`",
    "target",
    "done",
    "lost",
    "repeated in the sink",
    "repeated outside",
    "minutes",
    "commits",
)

NOTHING: Final = "-"


@dataclass(frozen=True)
class Row:
    """A row of the matrix: a fault and its required outcome."""

    number: int
    fault: str
    outcome: str
    note: str = ""


def groups() -> Iterator[tuple[str, list[Row]]]:
    """Return all groups of rows, in the order of the file."""
    for group in tomllib.loads(ROWS.read_text())["group"]:
        rows = group["rows"]
        yield group["name"], [Row(row["n"], row["fault"], row["outcome"], row.get("note", "")) for row in rows]


def page() -> str:
    """Return the contents of the page."""
    marks, outcomes, known = marked(), load_tests(), campaigns()
    parts = [HEAD, FIGURES + _table(known)]
    shown = set(marks).union(*(campaign.scenarios for campaign in known.values()))
    missing = [row.number for _, rows in groups() for row in rows if row.number not in shown]
    parts.append(f"Rows without a test: {', '.join(map(str, missing)) or 'none'}.\n")
    for name, rows in groups():
        lines = [
            f"## {name}\n",
            "| | fault | required outcome | shown by | cases |",
            "| ---: | --- | --- | --- | --- |",
        ]
        lines += [_line(row, marks.get(row.number, []), outcomes, known) for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _table(known: Mapping[str, Campaign]) -> str:
    head = f"| {' | '.join(COLUMNS)} |\n| --- | --- |{' ---: |' * 7} --- |\n"
    return head + "".join(_figures(campaign, load(campaign.name)) for campaign in known.values())


def _figures(campaign: Campaign, record: Record) -> str:
    counts = Counter(record.figures)
    broken = f" **{len(record.violations)} broken**" if record.violations else ""
    commits = f"{record.since} … {record.until}" if record.since else NOTHING
    names = ("lost", "fenced_repeats", "repeats")
    zeros = " | ".join(f"{counts[name]:,}" if name in counts else NOTHING for name in names)
    in_test, target = campaign.stated
    return (
        f"| {campaign.name} | {campaign.says} | {in_test:,} | {target:,} {campaign.counts} "
        f"| {counts[campaign.counts]:,}{broken} | {zeros} | {record.seconds / 60:,.0f} | {commits} |\n"
    )


def _line(row: Row, places: list[str], outcomes: Mapping[str, Mapping[str, int]], known: Mapping[str, Campaign]) -> str:
    shown = [_link(place) for place in places]
    shown += [f"campaign {campaign.name}" for campaign in known.values() if row.number in campaign.scenarios]
    if not shown:
        shown = ["**no test**"]
    if row.note:
        shown.append(row.note)
    return f"| {row.number} | {row.fault} | {row.outcome} | {'<br>'.join(shown)} | {cases(places, outcomes)} |"


def cases(places: list[str], outcomes: Mapping[str, Mapping[str, int]]) -> str:
    """Return the recorded outcomes of `places`, and how many of them have not been recorded."""
    total: Counter[str] = Counter()
    missing = 0
    for place in places:
        found = [counts for test, counts in outcomes.items() if belongs(test, place)]
        missing += not found
        for counts in found:
            total.update(counts)
    parts = [f"{count} {outcome}" for outcome, count in sorted(total.items(), key=_passed_first)]
    if missing:
        parts.append(f"{missing} of {len(places)} tests not recorded")
    return ", ".join(parts) or NOTHING


def _passed_first(outcome: tuple[str, int]) -> tuple[bool, str]:
    return outcome[0] != "passed", outcome[0]


def _link(place: str) -> str:
    path, _, name = place.partition("::")
    return f"[{name.replace('::', '.') or Path(path).stem}](../../{path})"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}", file=sys.stderr)
