"""`python -m tests.campaigns.matrix`: writes docs/reference/fault-matrix.md from the marks, the rows and the record."""

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

What can go wrong, what must come out of it, and which test shows it. `make matrix` writes this page from the rows in
`tests/campaigns/scenarios.toml`, the marks on the tests and what was recorded; a test compares it with them.

Processes are killed and stalled with signals. Redis and Kafka are real servers, but for the tests in `tests/unit`,
whose broker and store are in memory, and for files whose first lines say so; a test checks that they do. *Cases* are
those of the last recorded run of the tests; places that were marked since then are shown as not recorded.
"""

FIGURES: Final = """\
## Figures

`make test` runs the small number of each; `make faults` goes for the target, and goes on where it was stopped. A zero
in N runs says, at 95 %, no more than 3 in N; `-` says that the campaign does not count that. *Lost*: asked for, and
neither done nor given up with a dead letter. *Twice in the sink*: repeated in a sink that checks key and fence.
*Repeated outside*: each of these knew by its attempt and its fence that it was a repeat, or the store's loss was
counted. *Commits*: checked out at the first and the last run, `+` for changes beside it in the library; figures are of
that code, and `git diff COMMIT -- integr8s_idem` tells what has changed since.

"""

COLUMNS: Final = (
    "campaign",
    "one of them is",
    "`make test`",
    "target",
    "so far",
    "lost",
    "twice in the sink",
    "repeated outside",
    "minutes",
    "commits",
)

NOTHING: Final = "-"


@dataclass(frozen=True)
class Row:
    """One fault."""

    number: int
    fault: str
    outcome: str
    note: str = ""


def groups() -> Iterator[tuple[str, list[Row]]]:
    """All rows, as they are written."""
    for group in tomllib.loads(ROWS.read_text())["group"]:
        rows = group["rows"]
        yield group["name"], [Row(row["n"], row["fault"], row["outcome"], row.get("note", "")) for row in rows]


def page() -> str:
    """The whole page."""
    marks, outcomes, known = marked(), load_tests(), campaigns()
    parts = [HEAD, FIGURES + _table(known)]
    shown = set(marks).union(*(campaign.scenarios for campaign in known.values()))
    missing = [row.number for _, rows in groups() for row in rows if row.number not in shown]
    parts.append(f"Rows without a test: {', '.join(map(str, missing)) or 'none'}.\n")
    for name, rows in groups():
        lines = [f"## {name}\n", "| | fault | must come out | shown by | cases |", "| ---: | --- | --- | --- | --- |"]
        lines += [_line(row, marks.get(row.number, []), outcomes, known) for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _table(known: Mapping[str, Campaign]) -> str:
    head = f"| {' | '.join(COLUMNS)} |\n| --- | --- |{' ---: |' * 7} --- |\n"
    return head + "".join(_figures(campaign, load(campaign.name)) for campaign in known.values())


def _figures(campaign: Campaign, record: Record) -> str:
    told = Counter(record.figures)
    broken = f" **{len(record.violations)} broken**" if record.violations else ""
    commits = f"{record.since} … {record.until}" if record.since else NOTHING
    zeros = " | ".join(f"{told[name]:,}" if name in told else NOTHING for name in ("lost", "fenced_repeats", "repeats"))
    in_test, target = campaign.stated
    return (
        f"| {campaign.name} | {campaign.says} | {in_test:,} | {target:,} {campaign.counts} "
        f"| {told[campaign.counts]:,}{broken} | {zeros} | {record.seconds / 60:,.0f} | {commits} |\n"
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
    """What is recorded of these places, and how many of them are not."""
    total: Counter[str] = Counter()
    missing = 0
    for place in places:
        found = [told for test, told in outcomes.items() if belongs(test, place)]
        missing += not found
        for told in found:
            total.update(told)
    parts = [f"{count} {outcome}" for outcome, count in sorted(total.items(), key=_passed_first)]
    if missing:
        parts.append(f"{missing} of {len(places)} places not recorded")
    return ", ".join(parts) or NOTHING


def _passed_first(told: tuple[str, int]) -> tuple[bool, str]:
    return told[0] != "passed", told[0]


def _link(place: str) -> str:
    path, _, name = place.partition("::")
    return f"[{name.replace('::', '.') or Path(path).stem}](../../{path})"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}", file=sys.stderr)
