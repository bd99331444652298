"""Metrics of services in observe mode.  Without such a service, a page of metrics does not have them."""

from __future__ import annotations

from typing import Final

from integr8s_idem.telemetry.convention_metrics import ConventionMetric

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR

GAP_BUCKETS: Final = (
    *(1, 10, _MINUTE, 5 * _MINUTE, 15 * _MINUTE),
    *(_HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR),
    *(_DAY, 2 * _DAY, 3 * _DAY, 5 * _DAY, 7 * _DAY, 8 * _DAY, 10 * _DAY, 14 * _DAY, 21 * _DAY, 30 * _DAY, 90 * _DAY),
)
"""Upper bounds in seconds: values that one would choose as a ttl."""

OBSERVATIONS: Final = ConventionMetric(
    "idempotency_observations",
    "Deliveries of a service in observe mode, by what was found out about them; payload is other if it has changed.",
    ("event_type", "result", "payload"),
)
OBSERVED_GAP: Final = ConventionMetric(
    "idempotency_observed_gap_seconds",
    "Time from the end of the first handler to a duplicate in seconds, by the store's clock, in observe mode.",
    ("event_type",),
    GAP_BUCKETS,
)
OBSERVE_METRICS: Final = (OBSERVATIONS, OBSERVED_GAP)
