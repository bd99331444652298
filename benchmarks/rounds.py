"""Comparisons in interleaved rounds: each contestant has a short turn in every round, in another order each time.

What is told is the ratio to the partner of the same round, so that whatever slows the machine slows both.
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

from benchmarks.measuring import Flat, for_seconds, spread, turned
from benchmarks.targets import GUARANTEES

WARM_UP: Final = 0.25
"""Part of a turn that each has before the first round: it connects, prepares and is not counted."""

Tell: TypeAlias = Callable[[str], None]


def at_least_one(told: str) -> int:
    """A number of rounds, from the command line."""
    if (rounds := int(told)) < 1:
        raise ArgumentTypeError("at least 1")
    return rounds


@dataclass(frozen=True)
class Options:
    """How long to look, and at what."""

    rounds: int = 7
    seconds: float = 1.0
    only: frozenset[str] = frozenset()
    """Keys of figures and names of questions; empty: all."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """What this machine has answered already, in this run or in the file that it adds to."""

    def wants(self, *keys: str) -> bool:
        return not self.only or not self.only.isdisjoint(keys)

    def of(self, question: str) -> Self:
        """As this question hears it: whoever says its name wants all of it, with whoever takes part in it."""
        return replace(self, only=frozenset()) if question in self.only else self


@dataclass(frozen=True)
class Measured:
    """What one turn came to."""

    events: int
    seconds: float
    cpu: float
    """Seconds of this process: less at the mercy of the machine than the clock on the wall."""

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
"""Takes the seconds it should last; fails if what was done is not what was to be done."""


@dataclass
class Stopwatch:
    """Wall and CPU from its making on."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self, events: int) -> Measured:
        return Measured(events, time.perf_counter() - self.wall, time.process_time() - self.cpu)


@dataclass(frozen=True)
class Comparison:
    """Contestants who do the same work on the same server."""

    name: str
    turns: Mapping[str, Turn]
    figures: Mapping[str, tuple[str, str]]
    """The key of a figure: whose rate, divided by whose."""

    def __post_init__(self) -> None:
        if unknown := self.turns.keys() - GUARANTEES:
            raise ValueError(f"{self.name}: GUARANTEES does not say what {', '.join(sorted(unknown))} promise")

    def chosen(self, options: Options) -> tuple[dict[str, Turn], dict[str, tuple[str, str]]]:
        """The turns and figures that are wanted; with all figures, also who takes part for information."""
        figures = {key: pair for key, pair in self.figures.items() if options.wants(key)}
        needed = {name for pair in figures.values() for name in pair}
        return {name: turn for name, turn in self.turns.items() if not options.only or name in needed}, figures


async def compared(comparison: Comparison, options: Options, tell: Tell) -> Flat:
    """Its figures, and what each contestant took for an event."""
    turns, figures = comparison.chosen(options)
    if not figures:
        return {}
    found: defaultdict[str, list[Measured]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for name in turned(list(turns), number):
            gc.collect()
            measured = await turns[name](options.seconds * (1 if number else WARM_UP))
            if number:
                found[name].append(measured)
                tell(f"round {number}: {comparison.name} {name} {measured.us:.1f} µs, CPU {measured.cpu_us:.1f} µs")
    told: Flat = {}
    for name, turns_had in found.items():
        told |= _each(f"contest.{comparison.name}.{name}", turns_had)
    for key, (ours, theirs) in figures.items():
        told |= figure(key, found[ours], found[theirs])
        tell(f"{key} = {told[key]} ({told[f'{key}.min']}..{told[f'{key}.max']}), by CPU {told[f'{key}.cpu_ratio']}")
    return told


def figure(key: str, ours: list[Measured], theirs: list[Measured]) -> Flat:
    """Our rate to theirs, round by round."""
    pairs = list(zip(ours, theirs, strict=True))
    told = spread_of(key, [mine.rate / other.rate for mine, other in pairs])
    told[f"{key}.cpu_ratio"] = spread([other.cpu_us / mine.cpu_us for mine, other in pairs]).median
    told |= {f"{key}.{name}": spread([getattr(one, name) for one in ours]).median for name in ("rate", "us", "cpu_us")}
    return told | {
        f"{key}.partner_{name}": spread([getattr(one, name) for one in theirs]).median
        for name in ("rate", "us", "cpu_us")
    }


def spread_of(key: str, values: list[float]) -> Flat:
    """The median under the key itself, the spread beside it."""
    found = spread(values)
    return {key: found.median, f"{key}.min": found.least, f"{key}.max": found.most, f"{key}.rounds": len(values)}


def _each(name: str, turns: list[Measured]) -> Flat:
    return {f"{name}.{what}": spread([getattr(turn, what) for turn in turns]).median for what in ("us", "cpu_us")}


async def in_lanes(
    work: Callable[[str], Awaitable[object]], keys: Iterator[str], at_once: int, seconds: float
) -> Measured:
    """`work` for key after key, so many at once, for so long."""
    going, done = for_seconds(seconds), 0
    watch = Stopwatch()

    async def lane() -> None:
        nonlocal done
        while going():
            await work(next(keys))
            done += 1

    async with asyncio.TaskGroup() as lanes:
        for _ in range(at_once):
            lanes.create_task(lane())
    return watch.read(done)


def fresh_keys(of: str) -> Iterator[str]:
    """New ones without end, as long as a name with a UUID; without a colon, which not everybody takes."""
    return (f"{of}-{number:032x}" for number in itertools.count())
