"""Compare the stores with their drivers: `make bench`, or `python -m benchmarks.stores --kind redis --rounds 2`.

Progress goes to stderr. `--json FILE` writes the results as one flat object; kinds that are not measured keep their
previous numbers. `python -m benchmarks.tables` writes the results into the pages.
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
from benchmarks.measuring import Flat, compare
from benchmarks.purging import measure_purge
from benchmarks.rounds import at_least_one
from benchmarks.servers import KINDS
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.stores.sql import SqlIdempotencyRepository


async def measure(kind: str, rounds: int, seconds: float, rows: int) -> Flat:
    """Measure one kind of store; the keys of the results begin with the kind."""
    start = time.perf_counter()

    def progress(line: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {kind}: {line}", file=sys.stderr, flush=True)

    progress("starting")
    load = os.getloadavg()[0]
    collect_rarely()  # as in a worker, for all contestants
    async with KINDS[kind]() as contest:
        results = await compare(contest.contestants, rounds, seconds, progress)
        if isinstance(contest.repository, SqlIdempotencyRepository) and rows:
            results |= await measure_purge(contest.repository, rows, seconds, progress)
        results["server"] = contest.server
    results |= {"rounds": rounds, "seconds": seconds, "load_before": round(load, 1)}
    results["measured_at"] = datetime.now(UTC).isoformat(timespec="minutes")
    return {f"{kind}.{name}": value for name, value in results.items()}


def _save(file: Path, results: Flat) -> None:
    previous: Flat = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    # Results of kinds that were measured now, or no longer exist, are dropped.
    kept = {name: value for name, value in previous.items() if name.partition(".")[0] in KINDS}
    measured = {name.partition(".")[0] for name in results}
    results = {name: value for name, value in kept.items() if name.partition(".")[0] not in measured} | results
    file.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, help="measure only this kind; repeatable")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each turn (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="rows to purge; 0 to skip the purge (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = machine(DRIVERS)
    for kind in arguments.kind or KINDS:
        results |= uvloop.run(measure(kind, arguments.rounds, arguments.seconds, arguments.rows))
        if arguments.json is not None:
            _save(arguments.json, results)
    if arguments.json is None:
        print(json.dumps(dict(sorted(results.items())), indent=1))


if __name__ == "__main__":
    main()
