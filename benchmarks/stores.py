"""Measure the stores beside their drivers: `make bench`, or `python -m benchmarks.stores --kind redis --rounds 2`.

Progress goes to stderr.  `--json FILE` writes the numbers, in one level; kinds that were not measured this time keep
theirs.  `python -m benchmarks.tables` then writes them into the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from benchmarks.machine import DRIVERS, machine
from benchmarks.measuring import Flat, compared
from benchmarks.purging import purged
from benchmarks.rounds import at_least_one
from benchmarks.servers import KINDS
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.stores.sql import SqlIdempotencyRepository


async def measured(kind: str, rounds: int, seconds: float, rows: int) -> Flat:
    """Everything about one kind of store, by keys that begin with it."""
    start = time.perf_counter()

    def tell(line: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {kind}: {line}", file=sys.stderr, flush=True)

    tell("starting")
    load = os.getloadavg()[0]
    collect_rarely()  # as a worker does, and for everybody who takes part
    async with KINDS[kind]() as contest:
        told = await compared(contest.contestants, rounds, seconds, tell)
        if isinstance(contest.repository, SqlIdempotencyRepository) and rows:
            told |= await purged(contest.repository, rows, seconds, tell)
        told["server"] = contest.server
    told |= {"rounds": rounds, "seconds": seconds, "load_before": round(load, 1)}
    told["measured_at"] = datetime.now(UTC).isoformat(timespec="minutes")
    return {f"{kind}.{name}": value for name, value in told.items()}


def _saved(file: Path, found: Flat) -> None:
    before: Flat = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    # Of a kind that was measured now nothing old stays, nor of anything that is no kind any more.
    kept = {name: value for name, value in before.items() if name.partition(".")[0] in KINDS}
    fresh = {name.partition(".")[0] for name in found}
    told = {name: value for name, value in kept.items() if name.partition(".")[0] not in fresh} | found
    file.write_text(json.dumps(dict(sorted(told.items())), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this one; can be given again")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="that are counted (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="to purge; 0 for none (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    told = parser.parse_args()
    found = machine(DRIVERS)
    for kind in told.kind or KINDS:
        found |= uvloop.run(measured(kind, told.rounds, told.seconds, told.rows))
        if told.json is not None:
            _saved(told.json, found)
    if told.json is None:
        print(json.dumps(dict(sorted(found.items())), indent=1))


if __name__ == "__main__":
    main()
