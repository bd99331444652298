"""How much CPU time does the native code save, in a guarded service on a real Kafka and a real Redis?

    python -m benchmarks.speedups

The native code must be installed: `make speedups`. Turns with and without it alternate, in one process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final
from unittest.mock import patch

import uvloop

from benchmarks.kafka import EVENTS, filled_topic
from benchmarks.measuring import rotated
from benchmarks.rounds import at_least_one
from integr8s_idem._util import speedups
from integr8s_idem.cli.garbage_collection import collect_rarely

VARIANTS: Final = {"python": None, "native": speedups.native}


async def measure(rounds: int, events: int) -> list[Mapping[str, float]]:
    """Return the microseconds of CPU time of this process per event, for each variant in each round."""
    collect_rarely()
    results: list[Mapping[str, float]] = []
    async with filled_topic(events, _print) as (topic, _):
        for number in range(rounds + 1):
            found: dict[str, float] = {}
            for variant in rotated(list(VARIANTS), number):
                gc.collect()
                with patch.object(speedups, "native", VARIANTS[variant]):
                    found[variant] = (await topic.idempotent(1.0)).cpu_us
            _print(f"round {number}: " + ", ".join(f"{name} {found[name]:.1f} µs" for name in VARIANTS))
            if number:  # the first round warms up
                results.append(found)
    return results


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(results: Sequence[Mapping[str, float]]) -> None:
    columns = {name: [each[name] for each in results] for name in VARIANTS}
    for name, values in columns.items():
        print(f"{name}: median {median(values):.1f} µs per event, minimum {min(values):.1f}")
    savings = [1 - each["native"] / each["python"] for each in results]
    of_minima = 1 - min(columns["native"]) / min(columns["python"])
    print(
        f"saved in a round: median {median(savings):.1%} ({min(savings):.1%} to {max(savings):.1%}); "
        f"of the minima: {of_minima:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speedups", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=15, help="counted rounds (default: %(default)s)")
    parser.add_argument("--events", type=at_least_one, default=EVENTS, help="events in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    if speedups.native is None:
        raise SystemExit(
            f"the worker uses {speedups.LOADED.description} {speedups.LOADED.problem}: run `make speedups`"
        )
    _show(uvloop.run(measure(arguments.rounds, arguments.events)))


if __name__ == "__main__":
    main()
