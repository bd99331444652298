"""Combine the metrics of several worker processes to those of one.

The processes send what their collectors yield, in plain lists and numbers.  Counters and histograms are added, and
those of a process that has ended remain in the sum: a sum that decreased would look like a restart to Prometheus, which
would then count all events again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from integr8s_idem.telemetry import Gauge

LABEL: Final = "worker_process"
"""Label with the number of the process, for metrics that have no meaningful sum."""

WORKER_PROCESSES: Final = "idempotency_worker_processes"
RESTARTS: Final = "idempotency_worker_process_restarts"
SUPERVISOR_HELP: Final[Mapping[str, str]] = {
    WORKER_PROCESSES: "Worker processes that are running.",
    RESTARTS: "Worker processes that ended unexpectedly and were started again.",
}
"""The metrics that only a supervisor has, with their HELP texts."""

Families: TypeAlias = Sequence[Sequence[Any]]
"""Metrics as JSON: name, help, type, unit, and a list of samples, each a name, labels, a value, and an exemplar if any.

An exemplar is a list of labels, value, and time in seconds since 1970.
"""

_Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""
_Exemplar: TypeAlias = tuple[dict[str, str], float, float | None]
"""Labels, value, and time in seconds since 1970, if known."""
_Combine: TypeAlias = Callable[[float, float], float]

_ADDED: Final = frozenset({"counter", "histogram", "gaugehistogram", "summary"})
_KEPT: Final = frozenset({"counter", "histogram", "summary"})
"""Types that only increase."""


def _sum(one: float, other: float) -> float:
    return one + other


_GAUGES: Final[Mapping[str, _Combine]] = {
    Gauge.KEYS_ACTIVE.value: max,  # each process counts those of all, in the store
    Gauge.IN_FLIGHT.value: _sum,
    Gauge.CONSUMER_LAG.value: _sum,  # each process measures the partitions that it reads
    Gauge.STORE_UP.value: min,
    Gauge.OUTBOX_WAITING.value: max,  # counted in the store
    Gauge.OUTBOX_AGE.value: max,
    Gauge.EVENT_LOOP_LAG.value: max,
    Gauge.NATIVE_CODE.value: min,
    WORKER_PROCESSES: _sum,
    "process_virtual_memory_bytes": _sum,
    "process_resident_memory_bytes": _sum,
    "process_open_fds": _sum,
    "process_max_fds": min,
    "process_start_time_seconds": min,  # that of the supervisor
    "python_info": max,
}
"""How to combine known gauges.  Nobody knows whether to add others, so those get the label `worker_process`."""


def plain_families(collected: Iterable[Metric]) -> list[list[Any]]:
    """Return what a registry or a collector has collected as JSON-serializable lists."""
    return [
        [
            family.name,
            family.documentation,
            family.type,
            family.unit,
            # Collectors of applications yield any kind of number.
            [_plain_sample(sample) for sample in family.samples],
        ]
        for family in collected
    ]


def _plain_sample(sample: Sample) -> list[Any]:
    plain = [sample.name, sample.labels, float(sample.value)]
    if sample.exemplar is None:
        return plain
    labels, value, at = sample.exemplar
    return [*plain, [labels, float(value), None if at is None else float(at)]]


@dataclass
class _Family:
    documentation: str
    kind: str
    unit: str
    samples: dict[_Key, float] = field(default_factory=dict)
    exemplars: dict[_Key, _Exemplar] = field(default_factory=dict)
    """The latest of all processes.  They are kept when their process ends: its trace can still be found."""

    def add(self, name: str, number: int, samples: Iterable[Sequence[Any]]) -> None:
        """Add the samples of a process to those of the others."""
        for sample, labels, value, *exemplar in samples:
            combine = _combination(name, self.kind, sample, labels)
            if combine is None:
                labels, combine = {**labels, LABEL: str(number)}, max
            key = (sample, tuple(labels.items()))
            self.samples[key] = combine(self.samples[key], value) if key in self.samples else value
            if exemplar:
                self._keep(key, exemplar[0])

    def _keep(self, key: _Key, exemplar: _Exemplar) -> None:
        kept = self.exemplars.get(key)
        if kept is None or (kept[2] or 0) < (exemplar[2] or 0):
            self.exemplars[key] = exemplar


def _combination(name: str, kind: str, sample: str, labels: Mapping[str, str]) -> _Combine | None:
    """Return how samples of several processes are combined; `None` if they remain separate."""
    if kind not in _ADDED:
        return _GAUGES.get(name)
    if "quantile" in labels:
        return None
    return min if sample == f"{name}_created" else _sum


class MergedMetrics(Collector):
    """Collects the metrics of all worker processes as if they were one.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: dict[int, Families] = {}
        self._ended: dict[str, _Family] = {}

    def update(self, number: int, families: Families) -> None:
        """Replace the metrics of the process `number`."""
        with self._lock:
            self._latest[number] = families

    def retire(self, number: int) -> None:
        """Keep the counters and histograms of a process that has ended, and forget its other metrics."""
        with self._lock:
            kept = [family for family in self._latest.pop(number, ()) if family[2] in _KEPT]
            _merge(self._ended, number, kept)

    def collect(self) -> Iterable[Metric]:
        """Return the combined metrics."""
        with self._lock:
            merged = {
                name: replace(family, samples=dict(family.samples), exemplars=dict(family.exemplars))
                for name, family in self._ended.items()
            }
            for number, families in sorted(self._latest.items()):
                _merge(merged, number, families)
        for name, family in merged.items():
            metric = Metric(name, family.documentation, family.kind, family.unit)
            metric.samples = [
                Sample(key[0], dict(key[1]), value, exemplar=_exported(family.exemplars.get(key)))
                for key, value in family.samples.items()
            ]
            yield metric


def _exported(exemplar: _Exemplar | None) -> Exemplar | None:
    return None if exemplar is None else Exemplar(*exemplar)


def _merge(into: dict[str, _Family], number: int, families: Families) -> None:
    for name, documentation, kind, unit, samples in families:
        into.setdefault(name, _Family(documentation, kind, unit)).add(name, number, samples)
