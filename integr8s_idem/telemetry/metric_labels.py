"""The labels of metrics, all with a bounded number of values.

Services and phases are few; event types, topics and reasons beyond a maximum share the label `other`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from integr8s_idem.telemetry import Gauge, Signal

MAX_LABELS: Final = 200
"""Maximum distinct event types, and distinct topics, of a service; further ones share the label `other`."""
MAX_LABEL_LENGTH: Final = 128
"""Maximum characters of a label; longer values are counted as `other`."""
MAX_REASONS: Final = 30
"""Maximum distinct reasons of a service."""
OTHER: Final = "other"

WITHOUT_EVENT_TYPE: Final = frozenset(
    {
        Signal.STORE_DATA_LOST,
        Signal.STORE_FAILOVER,
        Signal.STORE_RESTART,
        Signal.PURGED,
        Signal.UNDECODABLE,
        Signal.REPLAY_REFUSED,
        Signal.REPLAY_FOR_OTHERS,
        Signal.COMMIT_FAILED,
        Signal.REBALANCE,
        Signal.PARTITION_DAMAGED,
        Signal.SERVICE_STOPPED,
    }
)
"""Signals that never have an event type, and therefore no such label."""

UNDECODABLE_REASONS: Final = ("empty", "malformed", "missing_id", "unknown_type", "unsupported_version", "invalid")
DEAD_LETTER_REASONS: Final = (
    "handler_failed",
    "outcome_unknown",
    "previously_failed",
    "key_reused",
    "corrupt_record",
    "no_key",
    "no_handler",
    "unverified_copy",
)
REPLAY_REFUSED_REASONS: Final = ("unsigned", "bad_signature", "malformed", "other_event", "not_failed")
ANSWERS: Final = ("done", "not_done", "unknown", "failed")
"""Values of the label `answer`."""
WITH_REASON: Final = frozenset({Signal.DEAD_LETTER, Signal.UNDECODABLE, Signal.REPLAY_REFUSED, Signal.RECONCILED})
"""Signals with a label `reason`, or `answer`."""


def counter_labels(signal: Signal) -> list[str]:
    """Return the names of a counter's labels."""
    event_type = [] if signal in WITHOUT_EVENT_TYPE else ["event_type"]
    reason = "answer" if signal is Signal.RECONCILED else "reason"
    return ["service", *event_type, *([reason] if signal in WITH_REASON else [])]


def gauge_labels(gauge: Gauge) -> list[str]:
    """Return the names of a gauge's labels."""
    return ["service", "topic"] if gauge is Gauge.CONSUMER_LAG else ["service"]


def initial_reasons(signal: Signal, event_type: str) -> tuple[str, ...]:
    """Return the reasons whose counters start at 0; a message that could not be decoded has no event type."""
    if signal not in WITH_REASON:
        return ("",)
    if signal is Signal.RECONCILED:
        return ANSWERS
    if signal is Signal.REPLAY_REFUSED:
        return REPLAY_REFUSED_REASONS
    return DEAD_LETTER_REASONS if event_type else UNDECODABLE_REASONS


class BoundedLabels:
    """Maps values to labels: a value is its own label, or `other` if it is unsuitable or exceeds the maximum."""

    def __init__(self, most: int = MAX_LABELS, known: Iterable[str] = ()) -> None:
        self._known = {"", OTHER, *known}
        self._most = most + 2

    def __contains__(self, value: str) -> bool:
        return value in self._known

    def label(self, value: str) -> str:
        """Return the label of `value`."""
        if value in self._known:
            return value
        # This includes lone surrogates, which cannot be encoded as UTF-8 and would make every scrape fail.
        if len(value) > MAX_LABEL_LENGTH or not value.isprintable() or len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
