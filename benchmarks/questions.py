"""The benchmarks, one per file, and their figures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks import (
    batches,
    costs,
    deployments,
    footprint,
    frames,
    growth,
    http,
    kafka,
    local,
    processes,
    single,
    subscribers,
    transactions,
)
from benchmarks.measuring import Flat
from benchmarks.rounds import Options, Progress


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    keys: tuple[str, ...]
    """Its figures, with or without a target."""
    measure: Callable[[Options, Progress], Awaitable[Flat]]


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "single": Benchmark(single.KEYS, single.measure),
    "local": Benchmark(local.KEYS, local.measure),
    "batches": Benchmark(batches.KEYS, batches.measure),
    "kafka": Benchmark(kafka.KEYS, kafka.measure),
    "subscribers": Benchmark(subscribers.KEYS, subscribers.measure),
    "costs": Benchmark((), costs.measure),
    "frames": Benchmark((), frames.measure),
    "deployments": Benchmark((), deployments.measure),
    "processes": Benchmark(processes.KEYS, processes.measure),
    "footprint": Benchmark(footprint.KEYS, footprint.measure),
    "growth": Benchmark(growth.KEYS, growth.measure),
    "http": Benchmark(http.KEYS, http.measure),
    "transactions": Benchmark(transactions.KEYS, transactions.measure),
}
KEYS: Final = tuple(key for benchmark in BENCHMARKS.values() for key in benchmark.keys)
