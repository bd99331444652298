"""Compare the settings with those of topics: retention, and maximum sizes of events.  No I/O.

An event that is kept longer than its record can be redelivered after the record has expired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from integr8s_idem.config import KafkaSettings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.worker.retry_topics import RetryTopics

TTL: Final = "idempotency.default_ttl_seconds"
PRODUCER: Final = "producer"
"""`compression.type` of a topic that keeps the compression of its producers; Kafka's default."""
_LIMIT: Final = "kafka.max_event_bytes"
_OVERHEAD: Final = 12
"""Overhead of a batch in bytes: the broker's default for max.message.bytes exceeds 1 MiB by it."""
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Effective settings of a topic."""

    name: str
    retention_seconds: float | None
    """`None` for unlimited retention."""
    compacts: bool
    """Whether only the last event of each Kafka key is kept."""
    deletes: bool
    """Whether events older than the retention are deleted."""
    max_message_bytes: int
    compression: str = PRODUCER
    """`compression.type`: the codec of its batches, `uncompressed`, or `producer`."""

    @property
    def keeps_for_ever(self) -> bool:
        return self.retention_seconds is None or not self.deletes


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Settings of topics and brokers that were read."""

    topics: Mapping[str, TopicSettings] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Topics that do not exist."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Why settings could not be read, by the name of the topic; the key `""` is for the brokers' own settings."""
    creates_topics: bool | None = None
    """Whether missing topics are created at first use; `None` if unknown."""
    session_bounds: tuple[float, float] | None = None
    """Minimum and maximum session timeout in seconds; `None` if unknown."""
    existing: frozenset[str] = frozenset()
    """Names of all topics, to find retry topics that are no longer in use; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Topics that a service reads, and how long its records are kept."""

    topics: tuple[str, ...]
    ttl_seconds: float | None
    """`None` if its handlers are not guarded."""
    ttl_setting: str = TTL
    """Name of the setting."""
    retries: RetryTopics | None = None
    """Its retry topics, which may be none; `None` if its consumer group is unknown."""


def retention_findings(kafka: KafkaSettings, readings: Iterable[Reading], facts: BrokerFacts) -> list[Finding]:
    """Return mismatches between topics and settings, and topics whose settings could not be read."""
    found = [_unseen(name, why) for name, why in facts.unseen.items() if name]
    for reading in readings:
        for name in reading.topics:
            topic = facts.topics.get(name)
            if topic is None:
                continue
            found += _retention(reading, topic)
            found += _sizes(kafka, topic)
            dead_letters = facts.topics.get(name + kafka.dead_letter_suffix)
            if dead_letters is not None:
                found += _dead_letters(topic, dead_letters)
    return list(dict.fromkeys(found))


def _unseen(name: str, why: str) -> Finding:
    return Finding(
        Code.BROKER_UNSEEN,
        Severity.WARNING,
        f"topic {name}",
        f"its settings cannot be read ({why})",
        "it is unknown whether its events are kept longer than their records",
        'grant this user DescribeConfigs, or set kafka.retention_check = "off"',
    )


def _retention(reading: Reading, topic: TopicSettings) -> Iterator[Finding]:
    ttl = reading.ttl_seconds
    if ttl is None:
        return
    cost = "an event that is redelivered after its record has expired is handled a second time"
    if topic.keeps_for_ever:
        how = "retention.ms = -1" if topic.deletes else "cleanup.policy = compact"
        yield Finding(
            Code.RETENTION_ENDLESS,
            Severity.WARNING,
            f"topic {topic.name}",
            f"it keeps events forever ({how}), but {reading.ttl_setting} = {plain(ttl)} keeps records for {span(ttl)}",
            cost,
            "do not replay older events, or set cleanup.policy = delete and a retention.ms below the ttl",
        )
    elif topic.retention_seconds is not None and ttl <= topic.retention_seconds:
        kept = topic.retention_seconds
        yield Finding(
            Code.RETENTION_LONGER,
            Severity.WARNING,
            f"topic {topic.name}",
            f"it keeps events for {span(kept)} (retention.ms = {kept * 1000:.0f}), "
            f"but {reading.ttl_setting} = {plain(ttl)} keeps records for {span(ttl)}",
            cost,
            f"set {reading.ttl_setting} above {plain(kept)}, or retention.ms of the topic below {ttl * 1000:.0f}",
        )


def _sizes(kafka: KafkaSettings, topic: TopicSettings) -> Iterator[Finding]:
    limit, most = kafka.max_event_bytes, topic.max_message_bytes
    where = f"topic {topic.name}"
    if limit > most:
        yield Finding(
            Code.EVENT_LIMIT_HIGH,
            Severity.WARNING,
            where,
            f"{_LIMIT} = {limit} is more than its max.message.bytes = {most}",
            "the broker refuses events between these sizes, and the run that publishes one fails",
            f"set {_LIMIT} to at most {most}, or raise max.message.bytes",
        )
    elif most - _OVERHEAD > limit:
        yield Finding(
            Code.EVENT_LIMIT_LOW,
            Severity.WARNING,
            where,
            f"its max.message.bytes = {most} is more than {_LIMIT} = {limit}",
            "dead letters of messages between these sizes lose their bodies and cannot be replayed",
            f"set {_LIMIT} to {most}, or lower max.message.bytes",
        )


def _dead_letters(topic: TopicSettings, dead_letters: TopicSettings) -> Iterator[Finding]:
    where = f"topic {dead_letters.name}"
    if dead_letters.max_message_bytes < topic.max_message_bytes:
        yield Finding(
            Code.DEAD_LETTER_SMALLER,
            Severity.WARNING,
            where,
            f"its max.message.bytes = {dead_letters.max_message_bytes} is less than {topic.max_message_bytes} of "
            f"{topic.name}",
            "dead letters of messages between these sizes lose their bodies and cannot be replayed",
            f"set its max.message.bytes above {topic.max_message_bytes}, since dead letters have additional headers",
        )
    if dead_letters.compacts:
        yield Finding(
            Code.DEAD_LETTER_COMPACTED,
            Severity.WARNING,
            where,
            "its cleanup.policy includes compact",
            "only the last dead letter of each Kafka key is kept",
            "set its cleanup.policy to delete",
        )
    elif _shorter(dead_letters.retention_seconds, topic.retention_seconds):
        kept = dead_letters.retention_seconds or 0.0
        yield Finding(
            Code.DEAD_LETTER_SHORTER,
            Severity.WARNING,
            where,
            f"it keeps dead letters for {span(kept)} (retention.ms = {kept * 1000:.0f}), "
            f"but {topic.name} keeps events {_for_span(topic.retention_seconds)}",
            "dead letters are deleted before the events themselves",
            f"set its retention.ms to that of {topic.name}, or longer",
        )


def _shorter(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one < other)


def _for_span(seconds: float | None) -> str:
    return "forever" if seconds is None else f"for {span(seconds)}"


def span(seconds: float) -> str:
    """Format a duration: `7 days`."""
    for size, unit in _UNITS:
        if seconds >= size:
            count = round(seconds / size, 1)
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} s"


def plain(seconds: float) -> str:
    """Format seconds for a settings file."""
    return str(int(seconds)) if seconds == int(seconds) else str(seconds)
