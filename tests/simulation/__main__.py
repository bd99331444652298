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
    which.add_argument("--seed", type=int, help="one run")
    which.add_argument("--seeds", type=_span, metavar="FIRST:END", help="the runs from FIRST to END - 1")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this bug put into the library")
    parser.add_argument("--trace", action="store_true", help="print what happened, step by step")
    parser.add_argument("--json", action="store_true", help="one line of JSON a run")
    return parser.parse_args()


def _span(text: str) -> range:
    first, _, end = text.partition(":")
    seeds = range(int(first), int(end))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed; write FIRST:END, such as 0:1000")
    return seeds


def _print(verdict: Verdict, bug: str | None, *, as_json: bool, trace: bool) -> None:
    if as_json:
        told = {"seed": verdict.seed, "digest": verdict.digest, "violations": verdict.violations}
        print(json.dumps(told | {"counts": dict(sorted(verdict.counts.items()))}), flush=True)
        return
    if trace:
        for at, who, what, *details in verdict.trace:
            print(f"{at:9.4f}  {who:4} {what:15}", *details)
    if verdict.violations:
        print(f"seed {verdict.seed}  {verdict.digest}  broken: {command(verdict.seed, bug or '')}")
        for violation in verdict.violations:
            print(f"    {violation}")
    else:
        print(f"seed {verdict.seed}  {verdict.digest}  good")


def main() -> int:
    """The exit status: 0 if every run kept all promises, 1 if not."""
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
