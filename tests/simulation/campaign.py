"""Simulated runs by the thousand, on as many cores as there are, up to two."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.simulation.world import Verdict, simulate

WORTH_A_PROCESS: Final = 200
"""Seeds below which a second process costs more than it saves."""

PORTION: Final = 50
"""Seeds handed to a process at once."""

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
)


def command(seed: int, bug: str = "") -> str:
    """What replays a run, to be typed in the checkout."""
    return f"python -m tests.simulation --seed {seed}{' --bug ' + bug if bug else ''} --trace"


def complaint(verdict: Verdict, bug: str = "") -> str:
    """What was broken, and how to see it again."""
    return f"seed {verdict.seed}: {'; '.join(verdict.violations)}\nreplay it: {command(verdict.seed, bug)}"


def run(first: int, count: int) -> Figures:
    """The seeds from `first` on.

    Raises:
        ViolationError: Some seed broke a promise; the message says how to replay it.
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
    scenarios=(3, 8, 10, 11, 12, 13, 14, 18, 19, 20, 21, 22, 23, 26, 33, 34, 35, 36, 38, 63, 66, 78),
    in_test=1_000,
    target=100_000,
    batch=2_000,
    run=run,
)
