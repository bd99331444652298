"""Rates in rounds: in each round every contestant has its turn, so that what slows the machine slows all of them."""

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
AT_ONCE: Final = 64
BATCH: Final = 100

Flat: TypeAlias = dict[str, str | float]
"""What `--json` writes: one level, keys with dots."""


@dataclass(frozen=True)
class Spread:
    """Of the rounds."""

    median: float
    least: float
    most: float

    def flat(self, name: str) -> Flat:
        return {f"{name}.median": self.median, f"{name}.min": self.least, f"{name}.max": self.most}


def spread(values: list[float]) -> Spread:
    """To four digits: more would be noise."""
    return Spread(*(float(f"{value:.4g}") for value in (median(values), min(values), max(values))))


def for_seconds(seconds: float) -> Callable[[], bool]:
    """True so long from now."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


async def rate(contestant: Contestant, mode: Mode, keys: Iterator[str], going: Callable[[], bool]) -> float:
    """Pairs of reserve and complete in a second, as long as `going` says so."""
    start = time.perf_counter()
    done = 0

    async def lane() -> None:
        nonlocal done
        while going():
            if mode == "batch":
                await contestant.batch([next(keys) for _ in range(BATCH)])
                done += BATCH
            else:
                await contestant.pair(next(keys))
                done += 1

    async with asyncio.TaskGroup() as lanes:
        for _ in range(AT_ONCE if mode == "many" else 1):
            lanes.create_task(lane())
    return done / (time.perf_counter() - start)


def new_keys(of: str) -> Iterator[str]:
    """As long as those of events."""
    return (f"bench:{of}:{number:032x}" for number in count())


async def compared(
    contestants: Mapping[str, Contestant], rounds: int, seconds: float, tell: Callable[[str], None]
) -> Flat:
    """Rates of all, and their ratios to `bare` of the same round."""
    keys = {name: new_keys(name) for name in contestants}
    rates: defaultdict[tuple[str, Mode], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for mode in MODES:
            # By turns: nobody is always the first after the pause, or the one with the larger table.
            for name in turned(list(contestants), number):
                if (name, mode) == ("manager", "batch"):
                    continue
                gc.collect()
                going = for_seconds(seconds if number else seconds / 4)
                found = await rate(contestants[name], mode, keys[name], going)
                if number:  # the first round connects, prepares and warms
                    rates[name, mode].append(found)
                    tell(f"round {number}: {mode} {name} {found:.0f}/s")
    told: Flat = {}
    for (name, mode), found_rates in rates.items():
        told |= spread(found_rates).flat(f"{name}.{mode}.rate")
        if name != "bare" and "bare" in contestants:
            ratios = [ours / bare for ours, bare in zip(found_rates, rates["bare", mode], strict=True)]
            told |= spread(ratios).flat(f"{name}.{mode}.ratio")
    return told


def turned(names: list[T], by: int) -> list[T]:
    """The order of a round: nobody is always the first."""
    by %= len(names)
    return names[by:] + names[:by]
