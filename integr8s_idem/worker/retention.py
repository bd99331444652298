"""Settings compared with those of the topics: how long events are kept, how large they may be.  Pure.

An event that is kept longer than its record can be delivered again when nothing remembers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from integr8s_idem.config import KafkaSettings
from integr8s_idem.diagnostics import Code, Finding, Severity

TTL: Final = "idempotency.default_ttl_seconds"
PRODUCER: Final = "producer"
"""The `compression.type` of a topic whose batches stay as their producers have compressed them; Kafka's default."""
_LIMIT: Final = "kafka.max_event_bytes"
_OVERHEAD: Final = 12
"""Bytes that the broker's default for max.message.bytes has beyond 1 MiB, for the frame of a batch."""
_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"))


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """What a topic is set to, by itself or by the broker's default."""

    name: str
    retention_seconds: float | None
    """`None`: for ever."""
    compacts: bool
    """Of each Kafka key only the last event is kept."""
    deletes: bool
    """What is older than the retention goes."""
    max_message_bytes: int
    compression: str = PRODUCER
    """`compression.type`: the codec of its batches, `uncompressed`, or `producer`."""

    @property
    def keeps_for_ever(self) -> bool:
        return self.retention_seconds is None or not self.deletes


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What the brokers tell."""

    topics: Mapping[str, TopicSettings] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Topics that are not there."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """What the brokers did not show us, and why: topics by their names, the brokers' own settings as `""`."""
    creates_topics: bool | None = None
    """Whether a topic that is not there is made at its first use; `None`: not told."""
    session_bounds: tuple[float, float] | None = None
    """Least and most seconds of a session timeout; `None`: not told."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a service reads, and for how long it remembers what it did."""

    topics: tuple[str, ...]
    ttl_seconds: float | None
    """`None`: its handlers are not guarded."""
    ttl_setting: str = TTL
    """What sets it."""


def retention_findings(kafka: KafkaSettings, readings: Iterable[Reading], facts: BrokerFacts) -> list[Finding]:
    """Where topics and settings do not fit, each once; and what could not be compared."""
    found = [_unseen(name, why) for name, why in facts.unseen.items() if name]
    for reading in readings:
        for name in reading.topics:
            topic = facts.topics.get(name)
            if topic is None:
                continue
            found += _kept(reading, topic)
            found += _sizes(kafka, topic)
            letters = facts.topics.get(name + kafka.dead_letter_suffix)
            if letters is not None:
                found += _letters(topic, letters)
    return list(dict.fromkeys(found))


def _unseen(name: str, why: str) -> Finding:
    return Finding(
        Code.BROKER_UNSEEN,
        Severity.WARNING,
        f"topic {name}",
        f"its settings cannot be read ({why})",
        "whether its events outlive their records stays unseen",
        'let this user DescribeConfigs, or set kafka.retention_check = "off"',
    )


def _kept(reading: Reading, topic: TopicSettings) -> Iterator[Finding]:
    ttl = reading.ttl_seconds
    if ttl is None:
        return
    cost = "an event that comes again after its record has ended is handled a second time"
    if topic.keeps_for_ever:
        how = "retention.ms = -1" if topic.deletes else "cleanup.policy = compact"
        yield Finding(
            Code.RETENTION_ENDLESS,
            Severity.WARNING,
            f"topic {topic.name}",
            f"it keeps events for ever ({how}), {reading.ttl_setting} = {plain(ttl)} remembers them for {span(ttl)}",
            cost,
            "replay nothing older than that, or set cleanup.policy = delete and a retention.ms below the ttl",
        )
    elif topic.retention_seconds is not None and ttl <= topic.retention_seconds:
        kept = topic.retention_seconds
        yield Finding(
            Code.RETENTION_LONGER,
            Severity.WARNING,
            f"topic {topic.name}",
            f"it keeps events for {span(kept)} (retention.ms = {kept * 1000:.0f}), "
            f"{reading.ttl_setting} = {plain(ttl)} remembers them for {span(ttl)}",
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
            "an event between the two is sent and refused, and the run that publishes it fails",
            f"set {_LIMIT} to at most {most}, or raise max.message.bytes",
        )
    elif most - _OVERHEAD > limit:
        yield Finding(
            Code.EVENT_LIMIT_LOW,
            Severity.WARNING,
            where,
            f"its max.message.bytes = {most} is more than {_LIMIT} = {limit}",
            "a dead letter of a message between the two lacks its body and cannot be replayed",
            f"set {_LIMIT} to {most}, or lower max.message.bytes",
        )


def _letters(topic: TopicSettings, letters: TopicSettings) -> Iterator[Finding]:
    where = f"topic {letters.name}"
    if letters.max_message_bytes < topic.max_message_bytes:
        yield Finding(
            Code.DEAD_LETTER_SMALLER,
            Severity.WARNING,
            where,
            f"its max.message.bytes = {letters.max_message_bytes}, that of {topic.name} is {topic.max_message_bytes}",
            "a dead letter of a message between the two lacks its body and cannot be replayed",
            f"set its max.message.bytes to {topic.max_message_bytes}, better more: a letter has headers besides",
        )
    if letters.compacts:
        yield Finding(
            Code.DEAD_LETTER_COMPACTED,
            Severity.WARNING,
            where,
            "its cleanup.policy holds compact",
            "of the dead letters of one Kafka key only the last is kept",
            "set its cleanup.policy to delete",
        )
    elif _shorter(letters.retention_seconds, topic.retention_seconds):
        kept = letters.retention_seconds or 0.0
        yield Finding(
            Code.DEAD_LETTER_SHORTER,
            Severity.WARNING,
            where,
            f"it keeps letters for {span(kept)} (retention.ms = {kept * 1000:.0f}), "
            f"{topic.name} keeps its events for {_span_or_ever(topic.retention_seconds)}",
            "a letter that nobody has looked at is gone before the event itself would be",
            "set its retention.ms to that of its topic, or longer",
        )


def _shorter(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one < other)


def _span_or_ever(seconds: float | None) -> str:
    return "ever" if seconds is None else span(seconds)


def span(seconds: float) -> str:
    """A length of time in words: `7 days`."""
    for size, unit in _UNITS:
        if seconds >= size:
            count = round(seconds / size, 1)
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} s"


def plain(seconds: float) -> str:
    """As one would write it into settings."""
    return str(int(seconds)) if seconds == int(seconds) else str(seconds)
