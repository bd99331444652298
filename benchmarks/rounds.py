"""Comparisons in interleaved rounds: each contestant has a short turn in every round, in a different order each time.

Figures are ratios to the partner in the same round, so that other load on the machine affects both.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeAlias

from benchmarks.measuring import Flat, rotated, running_for, spread
from benchmarks.targets import GUARANTEES

WARM_UP: Final = 0.25
"""Duration of the warm-up before the first round, as a fraction of a turn. It is not counted."""

Progress: TypeAlias = Callable[[str], None]


def at_least_one(argument: str) -> int:
    """Parse a number of rounds from the command line."""
    if (rounds := int(argument)) < 1:
        raise ArgumentTypeError(f"{argument} is not a valid number of rounds: it must be at least 1")
    return rounds


@dataclass(frozen=True)
class Options:
    """What to measure, and for how long."""

    rounds: int = 7
    seconds: float = 1.0
    only: frozenset[str] = frozenset()
    """Keys of figures and names of benchmarks; empty for all."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Earlier results of this machine, from this run or from the file that it updates."""

    def wants(self, *keys: str) -> bool:
        return not self.only or not self.only.isdisjoint(keys)

    def for_benchmark(self, benchmark: str) -> Self:
        """Return the options for one benchmark: if it is selected by name, all its figures and contestants run."""
        return replace(self, only=frozenset()) if benchmark in self.only else self


@dataclass(frozen=True)
class Measured:
    """The measurements of one turn."""

    events: int
    seconds: float
    cpu: float
    """CPU seconds of this process, which other load affects less than wall-clock time."""

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    @property
    def us(self) -> float:
        return self.seconds / self.events * 1e6

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.events * 1e6


Turn: TypeAlias = Callable[[float], Awaitable[Measured]]
"""Runs for the given number of seconds; fails if the work was not done, or not done correctly."""


@dataclass
class Stopwatch:
    """Measures wall-clock and CPU time since its creation."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self, events: int) -> Measured:
        return Measured(events, time.perf_counter() - self.wall, time.process_time() - self.cpu)


@dataclass(frozen=True)
class Comparison:
    """Contestants that do the same work on the same server."""

    name: str
    turns: Mapping[str, Turn]
    figures: Mapping[str, tuple[str, str]]
    """By the key of a figure: the contestant, and the partner whose rate its rate is divided by."""
    by_cpu: bool = False
    """Whether the figures compare events per second of this process's CPU time, not of wall-clock time."""

    def __post_init__(self) -> None:
        if unknown := self.turns.keys() - GUARANTEES:
            raise ValueError(f"{self.name}: GUARANTEES has no entry for {', '.join(sorted(unknown))}")

    def chosen(self, options: Options) -> tuple[dict[str, Turn], dict[str, tuple[str, str]]]:
        """Return the selected turns and figures; if all are selected, also the contestants without a figure."""
        figures = {key: pair for key, pair in self.figures.items() if options.wants(key)}
        needed = {name for pair in figures.values() for name in pair}
        return {name: turn for name, turn in self.turns.items() if not options.only or name in needed}, figures


async def compare(comparison: Comparison, options: Options, progress: Progress) -> Flat:
    """Measure the figures of a comparison, and the time that each contestant takes per event."""
    turns, figures = comparison.chosen(options)
    if not figures:
        return {}
    turns_of: defaultdict[str, list[Measured]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for name in rotated(list(turns), number):
            gc.collect()
            measured = await turns[name](options.seconds * (1 if number else WARM_UP))
            if number:
                turns_of[name].append(measured)
                progress(f"round {number}: {comparison.name} {name} {measured.us:.1f} µs, CPU {measured.cpu_us:.1f} µs")
    results: Flat = {}
    for name, measured_turns in turns_of.items():
        results |= _medians(f"contest.{comparison.name}.{name}", measured_turns)
    for key, (contestant, partner) in figures.items():
        results |= ratio_of(key, turns_of[contestant], turns_of[partner], by_cpu=comparison.by_cpu)
        spread_text = f"{results[f'{key}.min']}..{results[f'{key}.max']}"
        progress(f"{key} = {results[key]} ({spread_text}), by CPU {results[f'{key}.cpu_ratio']}")
    return results


def ratio_of(key: str, contestant: list[Measured], partner: list[Measured], *, by_cpu: bool = False) -> Flat:
    """Compute the ratio of the contestant's rate to its partner's, round by round."""
    pairs = list(zip(contestant, partner, strict=True))
    cpu_ratios = [other.cpu_us / turn.cpu_us for turn, other in pairs]
    results = spread_of(key, cpu_ratios if by_cpu else [turn.rate / other.rate for turn, other in pairs])
    results[f"{key}.cpu_ratio"] = spread(cpu_ratios).median
    for name in ("rate", "us", "cpu_us"):
        results[f"{key}.{name}"] = spread([getattr(turn, name) for turn in contestant]).median
        results[f"{key}.partner_{name}"] = spread([getattr(turn, name) for turn in partner]).median
    return results


def spread_of(key: str, values: list[float]) -> Flat:
    """Return the median under `key` itself, and its spread under keys that begin with it."""
    found = spread(values)
    return {key: found.median, f"{key}.min": found.minimum, f"{key}.max": found.maximum, f"{key}.rounds": len(values)}


def _medians(name: str, turns: list[Measured]) -> Flat:
    return {f"{name}.{what}": spread([getattr(turn, what) for turn in turns]).median for what in ("us", "cpu_us")}


async def run_concurrently(
    work: Callable[[str], Awaitable[object]], keys: Iterator[str], concurrency: int, seconds: float
) -> Measured:
    """Call `work` for one key after the other, `concurrency` at a time, for `seconds`."""
    running, done = running_for(seconds), 0
    watch = Stopwatch()

    async def lane() -> None:
        nonlocal done
        while running():
            await work(next(keys))
            done += 1

    async with asyncio.TaskGroup() as lanes:
        for _ in range(concurrency):
            lanes.create_task(lane())
    return watch.read(done)


def fresh_keys(name: str) -> Iterator[str]:
    """Yield new keys, as long as a name with a UUID. They contain no colon, which some contestants do not accept."""
    return (f"{name}-{number:032x}" for number in itertools.count())
