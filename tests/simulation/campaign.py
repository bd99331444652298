"""Run thousands of simulations on up to two cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.simulation.world import Verdict, simulate

WORTH_A_PROCESS: Final = 200
"""Number of seeds from which on a second process saves time."""

PORTION: Final = 50
"""Number of seeds that a process gets at a time."""

FIGURES: Final = (
    "events",
    "runs",
    "takeovers",
    "crashes",
    "stalls",
    "partitions",
    "rebalances",
    "lost",
    "repeats",
    "fenced_repeats",
    "asked",
    "found",
    "discarded_keys",
    "rule_stops",
)


def command(seed: int, bug: str = "") -> str:
    """Return the command that replays a run in the checkout."""
    return f"python -m tests.simulation --seed {seed}{' --bug ' + bug if bug else ''} --trace"


def complaint(verdict: Verdict, bug: str = "") -> str:
    """Describe the violations of a run and how to replay it."""
    return f"seed {verdict.seed}: {'; '.join(verdict.violations)}\nreplay it: {command(verdict.seed, bug)}"


def run(first: int, count: int) -> Figures:
    """Simulate `count` seeds from `first` on.

    Raises:
        ViolationError: A seed violated a guarantee; the message says how to replay it.
    """
    portions = [range(at, min(at + PORTION, first + count)) for at in range(first, first + count, PORTION)]
    processes = min(2, os.cpu_count() or 1)
    if count < WORTH_A_PROCESS or processes == 1:
        return _sum(map(_portion, portions))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return _sum(pool.map(_portion, portions))


def _portion(seeds: range) -> tuple[Figures, str]:
    figures = Figures(dict.fromkeys(("lost", "repeats", "fenced_repeats"), 0))
    for seed in seeds:
        verdict = simulate(seed)
        if verdict.violations:
            return figures, complaint(verdict)
        figures["seeds"] += 1
        for name in FIGURES:
            figures[name] += verdict.counts[name]
    return figures, ""


def _sum(portions: Iterable[tuple[Figures, str]]) -> Figures:
    total = Figures()
    for figures, broken in portions:
        if broken:
            raise ViolationError(broken)
        for name, number in figures.items():
            total[name] += number
    return total


CAMPAIGN: Final = Campaign(
    name="simulation",
    counts="seeds",
    says="a run of two or three workers on virtual time, with faults of the store, the broker and the processes",
    scenarios=(3, 8, 10, 11, 12, 13, 14, 18, 19, 20, 21, 22, 23, 26, 33, 34, 35, 36, 38, 63, 66, 78, 137, 138, 139),
    in_test=250,
    target=100_000,
    batch=2_000,
    run=run,
)
