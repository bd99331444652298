"""Rates, measured in rounds: every contestant has a turn in each round, so other load affects all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Final, Literal, TypeAlias, TypeVar

from benchmarks.contestants import Contestant

T = TypeVar("T")
Mode: TypeAlias = Literal["one", "many", "batch"]
MODES: Final[tuple[Mode, ...]] = ("one", "many", "batch")
CONCURRENCY: Final = 64
BATCH: Final = 100

Flat: TypeAlias = dict[str, str | float]
"""Results as `--json` writes them: one flat object, whose keys contain dots."""


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of the rounds."""

    median: float
    minimum: float
    maximum: float

    def flat(self, name: str) -> Flat:
        return {f"{name}.median": self.median, f"{name}.min": self.minimum, f"{name}.max": self.maximum}


def spread(values: list[float]) -> Spread:
    """Compute the spread of `values`, rounded to four digits."""
    return Spread(*(float(f"{value:.4g}") for value in (median(values), min(values), max(values))))


def running_for(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True until `seconds` have passed."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


async def rate(contestant: Contestant, mode: Mode, keys: Iterator[str], running: Callable[[], bool]) -> float:
    """Measure pairs of reserve and complete per second, until `running` returns False."""
    start = time.perf_counter()
    done = 0

    async def lane() -> None:
        nonlocal done
        while running():
            if mode == "batch":
                await contestant.batch([next(keys) for _ in range(BATCH)])
                done += BATCH
            else:
                await contestant.pair(next(keys))
                done += 1

    async with asyncio.TaskGroup() as lanes:
        for _ in range(CONCURRENCY if mode == "many" else 1):
            lanes.create_task(lane())
    return done / (time.perf_counter() - start)


def new_keys(name: str) -> Iterator[str]:
    """Yield new keys, as long as those of events."""
    return (f"bench:{name}:{number:032x}" for number in count())


async def compare(
    contestants: Mapping[str, Contestant], rounds: int, seconds: float, progress: Callable[[str], None]
) -> Flat:
    """Measure the rates of all contestants, and their ratios to `bare` in the same round."""
    keys = {name: new_keys(name) for name in contestants}
    rates: defaultdict[tuple[str, Mode], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for mode in MODES:
            # Rotated, so that no contestant is always the first after the pause, or has the larger table.
            for name in rotated(list(contestants), number):
                if (name, mode) == ("manager", "batch"):
                    continue
                gc.collect()
                running = running_for(seconds if number else seconds / 4)
                found = await rate(contestants[name], mode, keys[name], running)
                if number:  # the first round warms up
                    rates[name, mode].append(found)
                    progress(f"round {number}: {mode} {name} {found:.0f}/s")
    results: Flat = {}
    for (name, mode), found_rates in rates.items():
        results |= spread(found_rates).flat(f"{name}.{mode}.rate")
        if name != "bare" and "bare" in contestants:
            ratios = [value / bare for value, bare in zip(found_rates, rates["bare", mode], strict=True)]
            results |= spread(ratios).flat(f"{name}.{mode}.ratio")
    return results


def rotated(names: list[T], steps: int) -> list[T]:
    """Rotate the order of contestants, so that none is always the first."""
    steps %= len(names)
    return names[steps:] + names[:steps]
