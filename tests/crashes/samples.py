"""Samples of a process's resource usage, taken by itself, and their trend."""

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
    """Resource usage right after a full garbage collection, with free memory returned to the system."""

    at: float
    """Seconds of the monotonic clock."""
    rss: int
    """Bytes."""
    blocks: int
    """Blocks allocated by Python, which do not include the reserve of an allocator."""
    descriptors: int
    tasks: int


async def sampling(path: Path) -> None:
    """Append samples of this process to `path`, one JSON list per line."""
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
    """Fill Pydantic's cache of the last 16 384 short strings, which would otherwise grow for a quarter of an hour."""
    for number in range(3 * 16_384):
        Job.model_validate_json(encode_event(Job(work=f"filler:{number}", aggregate_id=f"of:{number}")))


def samples_of(path: Path) -> list[Sample]:
    """Return all samples in the file."""
    return [Sample(*json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True, slots=True)
class Slope:
    """Slope of a straight line through samples, by least squares."""

    per_hour: float
    error: float
    """Standard error of `per_hour`."""


def slope(points: list[tuple[float, float]], blocks: int = 20) -> Slope:
    """Return the slope of `points` (seconds, value).

    Neighboring samples are not independent of each other.  Therefore the line is fitted to the medians of `blocks`
    intervals of equal length, and the error is computed from their residuals.
    """
    size = max(1, len(points) // blocks)
    intervals = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    hours = [statistics.mean(at for at, _ in interval) / 3600 for interval in intervals]
    values = [statistics.median(value for _, value in interval) for interval in intervals]
    line = statistics.linear_regression(hours, values)
    residuals = [value - (line.slope * hour + line.intercept) for hour, value in zip(hours, values, strict=True)]
    spread = sum((hour - statistics.mean(hours)) ** 2 for hour in hours)
    error = sqrt(sum(value**2 for value in residuals) / max(1, len(residuals) - 2) / spread)
    return Slope(line.slope, error)
