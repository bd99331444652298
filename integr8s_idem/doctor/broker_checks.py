"""Check the brokers and topics, and compare them with the settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.retry_topic_checks import retry_topic_findings
from integr8s_idem.errors import BrokerUnavailableError
from integr8s_idem.worker.broker_facts import BrokerMetadataError, list_topics, read_facts
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
class BrokerReport:
    """Findings, and the settings that were compared with the brokers instead of with defaults."""

    findings: list[Finding]
    checked: frozenset[str] = frozenset()


async def check_brokers(settings: Settings, readings: Sequence[Reading]) -> BrokerReport:
    """Check the brokers and the topics that `readings` name."""
    kafka = settings.kafka
    topics = dict.fromkeys(name for reading in readings for name in reading.topics)
    try:
        retries = [topic.name for reading in readings if reading.retries for topic in reading.retries.all()]
        facts = await read_facts(kafka, [*topics, *(name + kafka.dead_letter_suffix for name in topics), *retries])
        if any(reading.retries is not None for reading in readings):
            facts = replace(facts, existing=frozenset(await list_topics(kafka)))
    except BrokerMetadataError as error:
        return BrokerReport([*_unknown_topics(readings), _unsupported(str(error), topics)])
    except BrokerUnavailableError as error:
        what = f"no answer from {error.servers}: {error.reason}"
        cost = "workers wait and handle no events"
        remedy = "start the brokers, or correct kafka.bootstrap_servers, the user and the certificates"
        return BrokerReport([Finding(Code.BROKER_UNAVAILABLE, Severity.ERROR, BROKERS, what, cost, remedy)])
    checked = {_SESSION} if facts.session_bounds else set()
    if topics and not any(facts.unseen.get(name) for name in topics):
        checked.add(TTL)
    return BrokerReport(broker_findings(kafka, readings, facts, unreadable_codecs()), frozenset(checked))


def _unsupported(what: str, topics: Collection[str]) -> Finding:
    severity = Severity.WARNING if topics else Severity.INFO
    cost = "topics and their retention were not checked"
    remedy = "emulators do not support these requests; run the doctor with the production brokers"
    return Finding(Code.BROKER_UNSEEN, severity, BROKERS, what, cost, remedy)


def broker_findings(
    kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts, unreadable: Sequence[str] = ()
) -> list[Finding]:
    """Compare `facts` with the settings.  Pure.

    Args:
        kafka: The settings.
        readings: Topics that the services read, with their retention.
        facts: What the brokers reported.
        unreadable: Compression codecs that the installed client cannot read.
    """
    seen = f"{kafka.bootstrap_servers} answer, {len(facts.topics)} topics checked"
    return [
        Finding(Code.BROKER_SEEN, Severity.INFO, BROKERS, seen, "", ""),
        *_unknown_topics(readings),
        *_broker_settings(kafka, facts),
        *(_missing(name, facts) for reading in readings for name in reading.topics if name in facts.missing),
        *_missing_dead_letter_topics(kafka, readings, facts),
        *retry_topic_findings(readings, facts),
        *retention_findings(kafka, readings, facts),
        *(_unreadable_codecs(kafka, readings, facts, unreadable) if unreadable else ()),
    ]


def _unknown_topics(readings: Sequence[Reading]) -> Iterator[Finding]:
    if not readings:
        what = "no topics are known: the settings name none, and no application was given"
        remedy = "pass MODULE:APP, as for run"
        yield Finding(Code.TOPICS_UNKNOWN, Severity.INFO, BROKERS, what, "topics were not checked", remedy)


def _broker_settings(kafka: KafkaSettings, facts: BrokerFacts) -> Iterator[Finding]:
    if reason := facts.unseen.get(""):
        what = f"the configuration of the brokers cannot be read ({reason})"
        cost = "the session timeout was not checked"
        remedy = "grant this user DescribeConfigs on the cluster"
        yield Finding(Code.BROKER_UNSEEN, Severity.INFO, BROKERS, what, cost, remedy)
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
            "workers cannot join their consumer groups",
            "choose a value in this range",
        )


def _missing(name: str, facts: BrokerFacts) -> Finding:
    if facts.creates_topics:
        cost = (
            "the brokers create it on first use with their default number of partitions; a misspelled one stays empty"
        )
    else:
        cost = "its service never receives events"
    return Finding(Code.TOPIC_MISSING, _severity(facts), f"topic {name}", "does not exist", cost, "create it")


def _missing_dead_letter_topics(
    kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts
) -> Iterator[Finding]:
    names = dict.fromkeys(name + kafka.dead_letter_suffix for reading in readings for name in reading.topics)
    for name in names:
        if name not in facts.missing:
            continue
        if facts.creates_topics:
            cost = "the brokers create it for the first dead letter with their default retention and size limit"
        else:
            cost = "an event that fails cannot be dead-lettered, and blocks its partition"
        yield Finding(Code.DEAD_LETTER_MISSING, _severity(facts), f"topic {name}", "does not exist", cost, "create it")


def _unreadable_codecs(
    kafka: KafkaSettings, readings: Sequence[Reading], facts: BrokerFacts, unreadable: Sequence[str]
) -> Iterator[Finding]:
    """Yield topics whose `compression.type` is or allows a codec that the installed client cannot read."""
    for name in dict.fromkeys(name for reading in readings for name in reading.topics):
        topic, dead_letters = facts.topics.get(name), facts.topics.get(name + kafka.dead_letter_suffix)
        if topic is not None and topic.compression in unreadable:
            cost = "a partition is paused at its first message, and its events are not handled"
            yield _unreadable_codec(Severity.ERROR, topic, cost)
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
        # With `producer`, dead letters are readable, since the worker does not compress them.
        if dead_letters is not None and dead_letters.compression in unreadable:
            cost = "`integr8s-idem dlq` cannot list or replay its messages"
            yield _unreadable_codec(Severity.WARNING, dead_letters, cost)


def _unreadable_codec(severity: Severity, topic: TopicSettings, cost: str) -> Finding:
    what = f"compression.type = {topic.compression}, and the installed Kafka client cannot read {topic.compression}"
    return Finding(Code.CODEC_UNREADABLE, severity, f"topic {topic.name}", what, cost, _INSTALL_CODECS)


def _severity(facts: BrokerFacts) -> Severity:
    return Severity.WARNING if facts.creates_topics else Severity.ERROR
