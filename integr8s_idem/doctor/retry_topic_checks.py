"""Check retry topics.  No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.worker.retention import BrokerFacts, Reading
from integr8s_idem.worker.retry_topics import RetryTopic, RetryTopics


def retry_topic_findings(readings: Sequence[Reading], facts: BrokerFacts) -> Iterator[Finding]:
    """Compare the retry topics of services with the topics that exist."""
    for reading in readings:
        if reading.retries is None:
            continue
        topics = reading.retries.all()
        if topics:
            yield _seen(reading.retries.group, topics)
        for topic in topics:
            yield from _findings(topic, facts)
        for topic in reading.retries.retired(facts.existing):
            yield _retired(topic, reading.retries)


def _seen(group: str, topics: Sequence[RetryTopic]) -> Finding:
    names = ", ".join(topic.name for topic in topics)
    what = f"events wait for retries in {names}"
    cost = "without retry_topics, or with a version that does not know them, nobody reads them: their events are lost"
    remedy = "before a rollback, set delayed_retries to block, and wait until the lag of these topics is 0"
    return Finding(Code.RETRY_TOPICS_SEEN, Severity.INFO, f"group {group}", what, cost, remedy)


def _findings(topic: RetryTopic, facts: BrokerFacts) -> Iterator[Finding]:
    where = f"topic {topic.name}"
    if topic.name in facts.missing:
        if facts.creates_topics:
            severity = Severity.WARNING
            cost = "the brokers create it for the first copy with their default retention and number of partitions"
        else:
            severity = Severity.ERROR
            cost = "events that are to be retried later wait in their partition, and hold up later ones"
        yield Finding(Code.RETRY_TOPIC_MISSING, severity, where, "does not exist", cost, "create it")
    found = facts.topics.get(topic.name)
    if found is None:
        return
    if found.compacts:
        what = "cleanup.policy contains compact: only the last copy of each Kafka key is kept"
        cost = "events that wait for a retry are lost"
        yield Finding(Code.RETRY_TOPIC_LOSES, Severity.ERROR, where, what, cost, "set cleanup.policy = delete")
    if found.deletes and found.retention_seconds is not None:
        delay = topic.delay.total_seconds()
        if found.retention_seconds <= delay:
            what = f"retention.ms keeps copies for {found.retention_seconds:g} s, but they wait for {delay:g} s"
            cost = "events that wait for a retry are lost"
            remedy = "keep copies for the delay and the longest time that all workers may be down"
            yield Finding(Code.RETRY_TOPIC_LOSES, Severity.ERROR, where, what, cost, remedy)


def _retired(topic: RetryTopic, retries: RetryTopics) -> Finding:
    where = f"topic {topic.name}"
    if retries.tiers:
        what = "is not among the retry_topics of its service, whose workers read it nevertheless"
        return Finding(
            Code.RETRY_TOPIC_RETIRED, Severity.INFO, where, what, "", "delete it when its lag is 0 and remains so"
        )
    what = "is a retry topic of a service that has no retry_topics any more"
    cost = "nobody reads it: events that wait there are not handled"
    remedy = "if its lag is not 0, set retry_topics again until it is; then delete it"
    return Finding(Code.RETRY_TOPIC_RETIRED, Severity.WARNING, where, what, cost, remedy)
