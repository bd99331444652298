"""Run all benchmarks except those of the stores: `python -m benchmarks`, see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from unittest.mock import patch

import uvloop

from benchmarks.machine import commit, machine
from benchmarks.measuring import Flat
from benchmarks.questions import BENCHMARKS, KEYS, Benchmark
from benchmarks.rounds import Options, Progress, at_least_one
from integr8s_idem._util import speedups
from integr8s_idem.cli.garbage_collection import collect_rarely


def run_benchmarks(options: Options, file: Path | None) -> Flat:
    """Run the selected benchmarks. Results are saved after each one, so that an interrupted run keeps them."""
    start = time.perf_counter()
    measured_commit = commit()  # now, since the results may be files of the checkout
    results = machine()
    # A partial run keeps the other numbers in the file; a complete run replaces them all.
    previous = previous_results(file, results) if file and file.exists() and options.only else {}
    for name, benchmark in BENCHMARKS.items():
        if not options.wants(name, *benchmark.keys):
            continue

        def progress(line: str, name: str = name) -> None:
            print(f"{time.perf_counter() - start:6.1f} s  {name}: {line}", file=sys.stderr, flush=True)

        progress("starting")
        results |= {f"{name}.rounds": options.rounds, f"{name}.turn_seconds": options.seconds}
        results |= uvloop.run(
            _run(benchmark, replace(options.for_benchmark(name), known={**previous, **results}), progress)
        )
        results |= {
            f"{name}.commit": measured_commit,
            f"{name}.measured_at": datetime.now(UTC).isoformat(timespec="minutes"),
        }
        if file is not None:
            file.write_text(_sorted({**previous, **results}), encoding="utf-8")
    return results


def previous_results(file: Path, environment: Flat) -> Flat:
    """Read the numbers in `file`, which must come from the same machine and versions.

    Raises:
        SystemExit: `file` was written on another machine or with other versions, so its numbers are not comparable.
    """
    previous: Flat = json.loads(file.read_text(encoding="utf-8"))
    if differences := [f"{name} {previous.get(name)!r}, here {value!r}" for name, value in environment.items()
                 if previous.get(name) != value]:  # fmt: skip
        raise SystemExit(
            f"{file} was written on another machine or with other versions: {'; '.join(differences)}. "
            "Pass another file to --json, or run all benchmarks again, without --only."
        )
    return previous


async def _run(benchmark: Benchmark, options: Options, progress: Progress) -> Flat:
    collect_rarely()  # as in a worker, for all contestants
    # Without what only some users install, here and in child processes.
    with patch.object(speedups, "native", None), patch.dict(os.environ, {speedups.VARIABLE: "off"}):
        return await benchmark.measure(options, progress)


def _sorted(results: Flat) -> str:
    return json.dumps(dict(sorted(results.items())), indent=1) + "\n"


def known_key(argument: str) -> str:
    """Check a figure or benchmark of the command line."""
    known = (*BENCHMARKS, *KEYS)
    if argument in known:
        return argument
    similar = " or ".join(get_close_matches(argument, known))
    raise argparse.ArgumentTypeError(
        f"{argument} is neither a benchmark nor a figure{f'; did you mean {similar}?' if similar else ': see --help'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="KEY",
        type=known_key,
        help="run only this figure, or all figures and contestants of this benchmark; repeatable. "
        f"Benchmarks: {', '.join(BENCHMARKS)}. Figures: {', '.join(KEYS)}",
    )
    parser.add_argument("--rounds", type=at_least_one, default=7, help="counted rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = run_benchmarks(
        Options(arguments.rounds, arguments.seconds, frozenset(arguments.only or ())), arguments.json
    )
    if arguments.json is None:
        print(_sorted(results), end="")


if __name__ == "__main__":
    main()
