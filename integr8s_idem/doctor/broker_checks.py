"""The brokers: whether they answer, whether the topics are there, and how all of that fits the settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.errors import BrokerUnavailableError
from integr8s_idem.worker.broker_facts import BrokerMetadataError, read_facts
from integr8s_idem.worker.compression import unreadable_codecs
from integr8s_idem.worker.retention import (
    PRODUCER,
    TTL,
    BrokerFacts,
    Reading,
    TopicSettings,
    plain,
    retention_findings,
)

BROKERS: Final = "brokers"
_SESSION: Final = "kafka.session_timeout_seconds"
_INSTALL_CODECS: Final = "run `pip install 'cramjam>=2.8'` where the workers run, and restart them"


@dataclass(frozen=True)
class BrokerLook:
    """What was found, and the settings that were compared with those of the brokers rather than with defaults."""

    findings: list[Finding]
    answered: frozenset[str] = frozenset()


async def look_at_brokers(settings: Settings, readings: Sequence[Reading]) -> BrokerLook:
    """All about the brokers and the topics that `readings` name."""
    kafka = settings.kafka
    topics = dict.fromkeys(name for reading in readings for name in reading.topics)
    try:
        facts = await read_facts(kafka, [*topics, *(name + kafka.dead_letter_suffix for name in topics)])
    except BrokerMetadataError as error:
        return BrokerLook([*_known(readings), _tell_nothing(str(error), topics)])
    except BrokerUnavailableError as error:
        told = f"no answer from {error.servers}: {error.reason}"
        cost = "workers wait, and handle nothing meanwhile"
        mend = "start them, or mend kafka.bootstrap_servers, its user and its certificates"
        return BrokerLook([Finding(Code.BROKER_UNAVAILABLE, Severity.ERROR, BROKERS, told, cost, mend)])
    answered = {_SESSION} if facts.session_bounds else set()
    if topics and not any(facts.unseen.get(name) for name in topics):
        answered.add(TTL)
    return BrokerLook(broker_findings(kafka, readings, facts, unreadable_codecs()), frozenset(answered))


def _tell_nothing(told: str, topics: Collection[str]) -> Finding:
    severity = Severity.WARNING if topics else Severity.INFO
    cost = "whether topics are there, and outlive their records, stays unseen"
    mend = "an emulator is like that; ask the doctor again with the brokers of production"
    return Finding(Code.BROKER_UNSEEN, severity, BROKERS, told, cost, mend)


def broker_findings(
    kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts, unreadable: Sequence[str] = ()
) -> list[Finding]:
    """What these facts mean for these settings.  Pure.

    `unreadable`: compression codecs that the installed client cannot read.
    """
    seen = f"{kafka.bootstrap_servers} answer, {len(facts.topics)} topics looked at"
    return [
        Finding(Code.BROKER_SEEN, Severity.INFO, BROKERS, seen, "", ""),
        *_known(readings),
        *_own(kafka, facts),
        *(_missing(name, facts) for reading in readings for name in reading.topics if name in facts.missing),
        *_letters_missing(kafka, readings, facts),
        *retention_findings(kafka, readings, facts),
        *(_codecs_unreadable(kafka, readings, facts, unreadable) if unreadable else ()),
    ]


def _known(readings: Sequence[Reading]) -> Iterator[Finding]:
    if not readings:
        what = "no topic is known: the settings name none, and no application was given"
        mend = "give MODULE:APP, as to run"
        yield Finding(Code.TOPICS_UNKNOWN, Severity.INFO, BROKERS, what, "topics were not looked at", mend)


def _own(kafka: KafkaSettings, facts: BrokerFacts) -> Iterator[Finding]:
    if why := facts.unseen.get(""):
        what = f"the brokers' own settings cannot be read ({why})"
        cost = "whether they take the session timeout stays unseen"
        mend = "let this user DescribeConfigs on the cluster"
        yield Finding(Code.BROKER_UNSEEN, Severity.INFO, BROKERS, what, cost, mend)
    if facts.session_bounds is None:
        return
    least, most = facts.session_bounds
    if not least <= kafka.session_timeout_seconds <= most:
        yield Finding(
            Code.SESSION_TIMEOUT,
            Severity.ERROR,
            _SESSION,
            f"= {plain(kafka.session_timeout_seconds)}, the brokers allow {plain(least)} to {plain(most)} seconds "
            "(group.min.session.timeout.ms, group.max.session.timeout.ms)",
            "they let no worker into its group",
            "set it between the two",
        )


def _missing(name: str, facts: BrokerFacts) -> Finding:
    if facts.creates_topics:
        cost = "the brokers make it at its first use, with their own number of partitions; a misspelled one stays empty"
    else:
        cost = "its service waits for events that never come"
    return Finding(Code.TOPIC_MISSING, _severity(facts), f"topic {name}", "it is not there", cost, "create it")


def _letters_missing(kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts) -> Iterator[Finding]:
    names = dict.fromkeys(name + kafka.dead_letter_suffix for reading in readings for name in reading.topics)
    for name in names:
        if name not in facts.missing:
            continue
        if facts.creates_topics:
            cost = "the brokers make it at the first dead letter, with their own retention and size limit"
        else:
            cost = "an event that is given up cannot leave, and its partition stands still"
        yield Finding(Code.DEAD_LETTER_MISSING, _severity(facts), f"topic {name}", "it is not there", cost, "create it")


def _codecs_unreadable(
    kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts, unreadable: Sequence[str]
) -> Iterator[Finding]:
    """Topics whose `compression.type` is, or allows, a codec that the installed client cannot read."""
    for name in dict.fromkeys(name for reading in readings for name in reading.topics):
        topic, letters = facts.topics.get(name), facts.topics.get(name + kafka.dead_letter_suffix)
        if topic is not None and topic.compression in unreadable:
            cost = "a partition is paused at its first message, and its events are not handled"
            yield _codec_unreadable(Severity.ERROR, topic, cost)
        elif topic is not None and topic.compression == PRODUCER:
            yield Finding(
                Code.CODEC_UNREADABLE,
                Severity.WARNING,
                f"topic {topic.name}",
                f"compression.type = {PRODUCER}: producers choose the codec, and the installed Kafka client cannot "
                f"read {', '.join(unreadable)}",
                "a partition is paused at the first message compressed with one of them",
                _INSTALL_CODECS,
            )
        # Under `producer` dead letters can be read: the worker does not compress them.
        if letters is not None and letters.compression in unreadable:
            yield _codec_unreadable(Severity.WARNING, letters, "`integr8s-idem dlq` cannot list or replay its messages")


def _codec_unreadable(severity: Severity, topic: TopicSettings, cost: str) -> Finding:
    what = f"compression.type = {topic.compression}, and the installed Kafka client cannot read {topic.compression}"
    return Finding(Code.CODEC_UNREADABLE, severity, f"topic {topic.name}", what, cost, _INSTALL_CODECS)


def _severity(facts: BrokerFacts) -> Severity:
    return Severity.WARNING if facts.creates_topics else Severity.ERROR
