"""What a process weighs, written down by itself, and whether that grows."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Final

import psutil

from integr8s_idem.events import encode_event
from tests.crashes.jobs import Job

EVERY: Final = 2.0
"""Seconds between two samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process, right after a full garbage collection and with free memory given back."""

    at: float
    """Seconds, by the monotonic clock."""
    rss: int
    """Bytes."""
    blocks: int
    """Blocks that Python has allocated: free of what an allocator keeps in reserve."""
    descriptors: int
    tasks: int


async def sampling(path: Path) -> None:
    """Append samples of this process to `path`, one JSON list a line."""
    _fill_caches()
    process = psutil.Process()
    libc = ctypes.CDLL(None)
    while True:
        await asyncio.sleep(EVERY)
        gc.collect()
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)
        tasks = len(asyncio.all_tasks())
        line = [time.monotonic(), process.memory_info().rss, sys.getallocatedblocks(), process.num_fds(), tasks]
        with path.open("a") as file:
            file.write(json.dumps(line) + os.linesep)


def _fill_caches() -> None:
    """Pydantic's parser keeps the last 16 384 short strings it has seen, of which most ids occur once: at the pace
    of a soak that would grow for a quarter of an hour."""
    for number in range(3 * 16_384):
        Job.model_validate_json(encode_event(Job(work=f"filler:{number}", aggregate_id=f"of:{number}")))


def samples_of(path: Path) -> list[Sample]:
    """All samples so far."""
    return [Sample(*json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through samples, by least squares."""

    per_hour: float
    error: float
    """Standard error of `per_hour`."""


def slope(points: list[tuple[float, float]], blocks: int = 20) -> Slope:
    """How fast the values of `points` (seconds, value) grow.

    Neighboring samples are not independent of each other: the line goes through the medians of `blocks`
    stretches of equal length, so that its error is told by how these scatter.
    """
    size = max(1, len(points) // blocks)
    stretches = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    hours = [statistics.mean(at for at, _ in stretch) / 3600 for stretch in stretches]
    values = [statistics.median(value for _, value in stretch) for stretch in stretches]
    line = statistics.linear_regression(hours, values)
    rest = [value - (line.slope * hour + line.intercept) for hour, value in zip(hours, values, strict=True)]
    spread = sum((hour - statistics.mean(hours)) ** 2 for hour in hours)
    error = sqrt(sum(value**2 for value in rest) / max(1, len(rest) - 2) / spread)
    return Slope(line.slope, error)
