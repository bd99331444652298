"""Findings about a setup, each with a stable code.  Pure.

Stores report findings through `ping` and errors, the worker checks for others at startup, and `integr8s-idem doctor`
shows all of them.  Every code is explained in docs/reference/doctor.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Events are not handled, or are certain to be handled wrongly."""
    WARNING = "warning"
    """Events are handled, but records or events may be lost later."""
    INFO = "info"
    """For information."""


class Code(str, Enum):
    """Stable identifiers of findings."""

    CHECK_FAILED = "check-failed"
    CHECK_TIMEOUT = "check-timeout"

    SETTINGS_MISTAKE = "settings-mistake"
    SETTINGS_WARNING = "settings-warning"
    APPLICATION_BROKEN = "application-broken"
    KEY_FIELDS = "key-fields"
    FAILURE_RULES = "failure-rules"
    RULE_UNREACHABLE = "failure-rule-unreachable"
    RULE_DISCARDS_ALL = "failure-rule-discards-all"
    SPEEDUPS_SEEN = "speedups-seen"
    SPEEDUPS_UNUSABLE = "speedups-unusable"

    STORE_SEEN = "store-seen"
    STORE_UNAVAILABLE = "store-unavailable"
    STORE_REFUSED = "store-refused"
    STORE_CREDENTIALS = "store-credentials"
    STORE_PERMISSION = "store-permission"
    STORE_VERSION = "store-version"
    STORE_REPLICA = "store-replica"
    STORE_PRIMARY_UNKNOWN = "store-primary-unknown"
    STORE_CLUSTER_DOWN = "store-cluster-down"
    STORE_TOO_FEW_REPLICAS = "store-too-few-replicas"
    STORE_EVICTION = "store-eviction"
    STORE_MEMORY = "store-memory"
    STORE_NOT_PERSISTENT = "store-not-persistent"
    STORE_LATE_SYNC = "store-late-sync"
    STORE_JOURNAL = "store-journal"
    STORE_UNSEEN = "store-unseen"
    STORE_NOT_PURGED = "store-not-purged"
    STORE_REGIONS = "store-regions"
    STORE_FORGETS = "store-forgets"
    STORE_WARNING = "store-warning"
    SCHEMA_MISSING = "schema-missing"
    SCHEMA_OLDER = "schema-older"
    SCHEMA_NEWER = "schema-newer"
    SCHEMA_OTHER = "schema-other"
    SCHEMA_INCOMPLETE = "schema-incomplete"
    CLOCK_SKEW = "clock-skew"
    OUTBOX_WAITING = "outbox-waiting"

    BROKER_SEEN = "broker-seen"
    BROKER_UNAVAILABLE = "broker-unavailable"
    BROKER_UNSEEN = "broker-unseen"
    TOPICS_UNKNOWN = "topics-unknown"
    TOPIC_MISSING = "topic-missing"
    RETENTION_LONGER = "retention-longer-than-ttl"
    RETENTION_ENDLESS = "retention-endless"
    CODEC_UNREADABLE = "codec-unreadable"
    EVENT_LIMIT_HIGH = "event-limit-above-topic"
    EVENT_LIMIT_LOW = "event-limit-below-topic"
    DEAD_LETTER_MISSING = "dead-letter-topic-missing"
    DEAD_LETTER_SMALLER = "dead-letter-topic-smaller"
    DEAD_LETTER_SHORTER = "dead-letter-topic-shorter"
    DEAD_LETTER_COMPACTED = "dead-letter-topic-compacted"
    RETRY_TOPICS_SEEN = "retry-topics-seen"
    RETRY_TOPIC_MISSING = "retry-topic-missing"
    RETRY_TOPIC_LOSES = "retry-topic-loses-copies"
    RETRY_TOPIC_RETIRED = "retry-topic-retired"
    SESSION_TIMEOUT = "session-timeout-out-of-bounds"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, in parts that form one line."""

    code: Code
    severity: Severity
    where: str
    """A setting, a topic, a server: `idempotency.default_ttl_seconds`, `topic orders`, `store`."""
    what: str
    cost: str
    """The possible consequence; empty if there is none."""
    remedy: str
    """What to set or to do; empty if nothing."""

    def __str__(self) -> str:
        return in_one_line(self.what, self.cost, self.remedy)


class StoreWarning(str):
    """A warning of a store: a sentence that also has a code and parts."""

    code: Code
    what: str
    cost: str
    remedy: str

    def __new__(cls, code: Code, what: str, cost: str, remedy: str) -> StoreWarning:
        self = super().__new__(cls, in_one_line(what, cost, remedy))
        self.code, self.what, self.cost, self.remedy = code, what, cost, remedy
        return self

    def __getnewargs__(self) -> tuple[Code, str, str, str]:  # type: ignore[override]  # for pickle and copy
        return self.code, self.what, self.cost, self.remedy


def in_one_line(what: str, cost: str, remedy: str) -> str:
    """Join the problem, its consequence and its remedy into one sentence."""
    return what.rstrip(".") + (f": {cost}" if cost else "") + (f"; {remedy}" if remedy else "")
