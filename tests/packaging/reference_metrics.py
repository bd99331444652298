"""`docs/reference/metrics.md`: every metric with its labels and meaning.  `make reference` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from integr8s_idem.telemetry import Gauge, Phase, Signal, prometheus
from tests.packaging.markdown import MADE, cell, table

_HEAD: Final = """\
Each worker process serves them at `/metrics`, port 9464 of the loopback address unless `[telemetry]` says otherwise.
Which of them to watch, and what it means when they move: [guarantees](../explanation/guarantees.md#what-to-watch).

Every label comes from a closed set. No key, payload or error text is in any of them. `service` is the service's name;
`event_type` is empty where there is none. Of event types, and of topics, {labels} are told apart in each service;
further ones share the label `{other}`.
"""


def page() -> str:
    lines = ["# Metrics", "", MADE, "", _HEAD.format(labels=prometheus.MAX_LABELS, other=prometheus.OTHER)]
    lines += ["## What has happened", "", "Counters. They begin at 0 with the process.", ""]
    lines += [*table(("metric", "labels", "meaning"), [_counter(signal) for signal in Signal]), ""]
    lines += ["## How it stands", "", "Gauges, measured from time to time.", ""]
    lines += [*table(("metric", "labels", "meaning"), [_gauge(gauge) for gauge in Gauge]), ""]
    lines += ["## How long it takes", "", f"Histograms, in seconds. Buckets: {_buckets()}.", ""]
    lines += [*table(("metric", "labels", "meaning"), [*_histograms()]), ""]
    lines += ["## Values of labels", ""]
    values = {
        "phase": [phase.name.lower() for phase in Phase],
        "reason": [
            *dict.fromkeys(
                [
                    *prometheus._UNDECODABLE_REASONS,
                    *prometheus._DEAD_LETTER_REASONS,
                    *prometheus._REPLAY_REFUSED_REASONS,
                ]
            )
        ],
    }
    rows = [(f"`{label}`", ", ".join(f"`{value}`" for value in known)) for label, known in values.items()]
    lines += table(("label", "values"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _counter(signal: Signal) -> tuple[str, str, str]:
    return f"`{signal.value}_total`", _names(prometheus._counter_labels(signal)), cell(prometheus.HELP[signal])


def _gauge(gauge: Gauge) -> tuple[str, str, str]:
    return f"`{gauge.value}`", _names(prometheus._gauge_labels(gauge)), cell(prometheus.HELP[gauge])


def _histograms() -> Iterator[tuple[str, str, str]]:
    families: Any = prometheus._Collector().describe()
    for family in families:
        if family.type == "histogram":
            yield f"`{family.name}`", _names(family._labelnames), cell(family.documentation)


def _buckets() -> str:
    return ", ".join(f"{bound:g}" for bound in prometheus.BUCKETS)


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)
