"""Generate `docs/reference/metrics.md`: each metric with its labels and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from integr8s_idem.telemetry import Gauge, Phase, Signal, metric_labels
from integr8s_idem.telemetry.convention_metrics import METRICS, ConventionMetric
from integr8s_idem.telemetry.merged_metrics import RESTARTS, SUPERVISOR_HELP
from integr8s_idem.telemetry.metric_help import HELP
from integr8s_idem.telemetry.metric_series import BUCKETS
from integr8s_idem.telemetry.metrics_collector import MetricsCollector
from tests.packaging.markdown import MADE, cell, table

_HEAD: Final = """\
Each worker process serves its metrics at `/metrics`, by default on port 9464 of the loopback address (`[telemetry]`).
[Guarantees](../explanation/guarantees.md#what-to-watch) explains which of them to watch, and what their changes mean.

The number of values of every label is limited; keys, payloads and error texts are never used. `service` is the name
of the service; `event_type` is empty if it is unknown. In each service, the first {labels} event types and the first
{labels} topics have labels of their own; all others share the label `{other}`.

`messaging_*` metrics are exported only with `messaging_metrics = true`. They and `db_client_operation_duration_seconds`
follow OpenTelemetry's semantic conventions. Buckets of `idempotency_*` and `messaging_*` histograms have exemplars
with the ids of a recorded trace, if the scraper asks for the OpenMetrics format.
"""


_EXEMPLARS: Final = """\
In the OpenMetrics format, which Prometheus requests, a bucket names the latest recorded trace in it as an exemplar:
[from a slow panel to a trace](../how-to/set-up-dashboards.md#from-a-slow-panel-to-a-trace).
"""


_CONVENTIONS: Final = """\
These have the names, labels and buckets of OpenTelemetry's semantic conventions 1.44.0, in addition to `service`. A
label is left out if it does not apply or is unknown: `error_type` after a success, `server_address` of a database with
several servers, the topic of a commit of several topics. `db_query_summary` is the method of the store, such as
`reserve` or `complete`; calls within a transaction of the application are not measured. Those of `messaging_` are
exported only with `messaging_metrics = true` in `[telemetry]`; with it, an event takes about a tenth more Python calls.
"""


_SUPERVISOR: Final = """\
With `run --processes`, the supervisor serves the combined metrics of its workers:
[metrics and health](../how-to/run-several-processes.md#metrics-and-health). It adds metrics of its own, without labels.
"""


def page() -> str:
    lines = ["# Metrics", "", MADE, "", _HEAD.format(labels=metric_labels.MAX_LABELS, other=metric_labels.OTHER)]
    lines += ["## Counters", "", "Counters start at 0 with the process.", ""]
    lines += [*table(("metric", "labels", "meaning"), [_counter(signal) for signal in Signal]), ""]
    lines += ["## Gauges", "", "Gauges are measured periodically.", ""]
    lines += [*table(("metric", "labels", "meaning"), [_gauge(gauge) for gauge in Gauge]), ""]
    lines += ["## Histograms", "", f"Histograms measure seconds. Buckets: {_buckets()}.", ""]
    lines += [*table(("metric", "labels", "meaning"), [*_histograms()]), "", _EXEMPLARS, ""]
    lines += ["## Metrics of OpenTelemetry's conventions", "", _CONVENTIONS, ""]
    lines += [*table(("metric", "labels", "buckets", "meaning"), [_convention(metric) for metric in METRICS]), ""]
    lines += ["## Worker processes", "", _SUPERVISOR, ""]
    of_supervisor = [(f"`{_exported(name)}`", cell(meaning)) for name, meaning in SUPERVISOR_HELP.items()]
    lines += [*table(("metric", "meaning"), of_supervisor), ""]
    lines += ["## Label values", ""]
    values = {
        "phase": [phase.name.lower() for phase in Phase],
        "reason": [
            *dict.fromkeys(
                [
                    *metric_labels.UNDECODABLE_REASONS,
                    *metric_labels.DEAD_LETTER_REASONS,
                    *metric_labels.REPLAY_REFUSED_REASONS,
                ]
            )
        ],
    }
    rows = [(f"`{label}`", ", ".join(f"`{value}`" for value in known)) for label, known in values.items()]
    lines += table(("label", "values"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _exported(name: str) -> str:
    return f"{name}_total" if name == RESTARTS else name


def _counter(signal: Signal) -> tuple[str, str, str]:
    return f"`{signal.value}_total`", _names(metric_labels.counter_labels(signal)), cell(HELP[signal])


def _gauge(gauge: Gauge) -> tuple[str, str, str]:
    return f"`{gauge.value}`", _names(metric_labels.gauge_labels(gauge)), cell(HELP[gauge])


def _histograms() -> Iterator[tuple[str, str, str]]:
    families: Any = MetricsCollector().describe()
    for family in families:
        if family.type == "histogram" and family.name.startswith("idempotency_"):
            yield f"`{family.name}`", _names(family._labelnames), cell(family.documentation)


def _convention(metric: ConventionMetric) -> tuple[str, str, str, str]:
    name = metric.name if metric.buckets else f"{metric.name}_total"
    buckets = ", ".join(f"{bound:g}" for bound in metric.buckets)
    return f"`{name}`", _names(("service", *metric.labels)), buckets, cell(metric.help)


def _buckets() -> str:
    return ", ".join(f"{bound:g}" for bound in BUCKETS)


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)
