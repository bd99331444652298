"""Replay simulated runs: `python -m tests.simulation --seed 1234 --trace`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext

from tests.simulation.bugs import BUGS
from tests.simulation.campaign import command
from tests.simulation.world import Verdict, simulate


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="simulate one run")
    which.add_argument("--seeds", type=_span, metavar="FIRST:END", help="simulate the runs FIRST to END - 1")
    parser.add_argument("--bug", choices=sorted(BUGS), help="inject this bug into the library")
    parser.add_argument("--trace", action="store_true", help="print each step")
    parser.add_argument("--json", action="store_true", help="output JSON, one line per run")
    return parser.parse_args()


def _span(text: str) -> range:
    first, _, end = text.partition(":")
    seeds = range(int(first), int(end))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range; use FIRST:END, such as 0:1000")
    return seeds


def _print(verdict: Verdict, bug: str | None, *, as_json: bool, trace: bool) -> None:
    if as_json:
        outcome = {"seed": verdict.seed, "digest": verdict.digest, "violations": verdict.violations}
        print(json.dumps(outcome | {"counts": dict(sorted(verdict.counts.items()))}), flush=True)
        return
    if trace:
        for at, who, what, *details in verdict.trace:
            print(f"{at:9.4f}  {who:4} {what:15}", *details)
    if verdict.violations:
        print(f"seed {verdict.seed}  {verdict.digest}  failed: {command(verdict.seed, bug or '')}")
        for violation in verdict.violations:
            print(f"    {violation}")
    else:
        print(f"seed {verdict.seed}  {verdict.digest}  ok")


def main() -> int:
    """Run the simulations, and return 1 if a run violated a guarantee, otherwise 0."""
    arguments = _arguments()
    seeds = arguments.seeds if arguments.seed is None else [arguments.seed]
    broken = 0
    for seed in seeds:
        with BUGS[arguments.bug]() if arguments.bug else nullcontext():
            verdict = simulate(seed, digest=True)
        broken += bool(verdict.violations)
        _print(verdict, arguments.bug, as_json=arguments.json, trace=arguments.trace)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
