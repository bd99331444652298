"""Show or continue the fault campaigns: `python -m tests.campaigns`.

    python -m tests.campaigns                       show the progress of all campaigns
    python -m tests.campaigns --all                 continue all campaigns up to their targets
    python -m tests.campaigns simulation zombies    continue these campaigns
    python -m tests.campaigns simulation --only 7   repeat run 7 without recording it
    python -m tests.campaigns soak --only 0:30      repeat 30 runs starting at 0, which share their servers

A campaign that was stopped resumes after its last saved batch.  A broken promise ends it with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from typing import Final

from tests.campaigns.figures import Campaign, ViolationError
from tests.campaigns.record import Record, load, save
from tests.campaigns.registry import campaigns

MINUTE: Final = 60.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    known = campaigns()
    unknown = set(options.names) - set(known)
    if unknown:
        print(f"unknown campaign: {', '.join(sorted(unknown))}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    # Exit normally, so that the servers of a batch are stopped; a shell's background jobs would even ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    chosen = [known[name] for name in (known if options.all else options.names)]
    if not chosen:
        _show(known, as_json=options.json)
        return 0
    if options.only is not None:
        return max(_repeat(campaign, *options.only) for campaign in chosen)
    until = time.monotonic() + options.minutes * MINUTE
    return max(_continue(campaign, options.target, until) for campaign in chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="campaigns to continue")
    parser.add_argument("--all", action="store_true", help="continue all campaigns, one after the other")
    parser.add_argument(
        "--only",
        type=_span,
        metavar="NUMBER[:COUNT]",
        help="repeat this run, or COUNT runs starting here, without recording them",
    )
    parser.add_argument("--target", type=_count, metavar="N", help="use this target instead of the campaign's own")
    parser.add_argument("--minutes", type=_minutes, default=24 * MINUTE, help="start no batch after this many minutes")
    parser.add_argument("--json", action="store_true", help="output JSON")
    return parser


def _span(text: str) -> tuple[int, int]:
    first, _, count = text.partition(":")
    if not first.isdecimal() or not (count or "1").isdecimal() or count == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid NUMBER or NUMBER:COUNT, such as 7 or 30:10")
    return int(first), int(count or 1)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of runs")
    return int(text)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 <= minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of minutes")
    return minutes


def _continue(campaign: Campaign, target: int | None, until: float) -> int:
    record = load(campaign.name)
    wanted = campaign.target if target is None else target
    if _size(campaign, record) >= wanted:
        print(f"{campaign.name}: has reached {wanted:,} {campaign.counts} already; use --target to set another target")
    while _size(campaign, record) < wanted and time.monotonic() < until:
        first, began = record.next, time.monotonic()
        try:
            figures = campaign.run(first, campaign.batch)
        except ViolationError as error:
            record.violations.append(f"batch from {first}: {error}"[:2000])
            save(campaign.name, record)
            print(f"{campaign.name}: BROKEN in the batch from {first}: {error}", file=sys.stderr)
            print(
                f"to repeat the batch: python -m tests.campaigns {campaign.name} --only {first}:{campaign.batch}",
                file=sys.stderr,
            )
            return 1
        took = time.monotonic() - began
        if not figures[campaign.counts]:
            print(f"{campaign.name}: stopped, because the batch from {first} counted no {campaign.counts}")
            return 1
        record.add(first, campaign.batch, figures, took)
        save(campaign.name, record)
        _print_progress(campaign, record, wanted, figures[campaign.counts] / took)
    return 0


def _repeat(campaign: Campaign, first: int, count: int) -> int:
    numbers = f"{first}" if count == 1 else f"{first} to {first + count - 1}"
    try:
        figures = dict(campaign.run(first, count))
    except ViolationError as error:
        print(f"{campaign.name} {numbers}: BROKEN: {error}", file=sys.stderr)
        return 1
    if not figures:
        print(f"{campaign.name}: run {numbers} does not exist", file=sys.stderr)
        return 2
    print(f"{campaign.name} {numbers}: {figures}")
    return 0


def _size(campaign: Campaign, record: Record) -> int:
    return record.figures.get(campaign.counts, 0)


def _print_progress(campaign: Campaign, record: Record, wanted: int, rate: float) -> None:
    size = _size(campaign, record)
    left = max(0, wanted - size) / rate / MINUTE
    print(
        f"{campaign.name}: {size:,} of {wanted:,} {campaign.counts}, {rate * MINUTE:,.0f} per minute, "
        f"{left:,.0f} min left, lost {record.figures.get('lost', '-')}, "
        f"repeated in a fenced sink {record.figures.get('fenced_repeats', '-')}",
        flush=True,
    )


def _show(known: dict[str, Campaign], *, as_json: bool) -> None:
    records = {name: load(name) for name in known}
    if as_json:
        print(json.dumps({name: {"target": known[name].target, **vars(record)} for name, record in records.items()}))
        return
    width = max(map(len, records))
    for name, record in records.items():
        campaign = known[name]
        print(
            f"{name:<{width}} {_size(campaign, record):>12,} of {campaign.target:>12,} {campaign.counts:<10} "
            f"{record.seconds / MINUTE:>6,.0f} min  violations {len(record.violations)}"
        )


if __name__ == "__main__":
    sys.exit(main())
