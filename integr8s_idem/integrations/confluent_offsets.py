"""The offsets of a confluent-kafka loop: what it fetches again, and what it commits."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from integr8s_idem.integrations.kafka_loops import take_over

logger = logging.getLogger(__name__)


class _Delivery(Protocol):
    @property
    def settled(self) -> bool: ...


class Offsets:
    """The offsets of one loop: of the message in progress, and of settled messages to commit."""

    def __init__(self, consumer: Consumer, interval: float) -> None:
        self._consumer = consumer
        self._interval = interval
        self._due = time.monotonic() + interval
        self._message: Message | None = None
        self._delivery: _Delivery | None = None
        self._settled: dict[tuple[str, int], int] = {}
        previous = take_over(consumer, self)
        if previous is not None:
            previous.close()

    def poll(self, timeout: float) -> Message | None:
        # Kept before anything else happens to it: an interrupt may raise at any moment.
        self._message = self._consumer.poll(timeout)
        return self._message

    def begin(self, delivery: _Delivery) -> None:
        """Note the delivery of the message that was polled last."""
        self._delivery = delivery

    def end(self) -> None:
        """Settle the message that was polled last, or seek back to it if its delivery is not settled."""
        if self._message is not None and self._message.error() is None:
            at = _position_of(self._message)
            if self._delivery is not None and self._delivery.settled:
                self._settled[at.topic, at.partition] = at.offset + 1
            elif is_assigned(self._consumer, at.topic, at.partition):
                self._consumer.seek(at)
        self._message = self._delivery = None

    def note_end(self, message: Message | None) -> None:
        """Settle transaction markers and aborted messages if `message` reports the end of a partition.

        Every record before that end has been polled.  Each is settled, or the consumer has sought back to it, and then
        librdkafka drops its pending end-of-partition reports.
        """
        error = message.error() if message is not None else None
        if message is None or error is None or error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            return
        topic, partition, end = message.topic(), message.partition(), message.offset()
        if topic is not None and partition is not None and end:
            self._settled[topic, partition] = end

    def commit_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval
            self.commit()

    def commit(self) -> None:
        try:
            # The next owner of a revoked partition commits its offsets.
            self._settled = {at: end for at, end in self._settled.items() if is_assigned(self._consumer, *at)}
            if self._settled:
                self._commit([TopicPartition(*at, end) for at, end in self._settled.items()])
        except (KafkaException, RuntimeError) as error:  # RuntimeError if the consumer was closed before the loop ended
            # They remain settled for the next commit.
            logger.warning("offsets were not committed: %s", error)

    def _commit(self, offsets: list[TopicPartition]) -> None:
        # An error of all partitions is raised, one of some partitions is returned.
        results = self._consumer.commit(offsets=offsets, asynchronous=False) or offsets
        for each in results:
            if each.error is None:
                self._settled.pop((each.topic, each.partition), None)
            else:
                logger.warning("offset of %s[%d] was not committed: %s", each.topic, each.partition, each.error)

    def close(self) -> None:
        """Leave the consumer at the first message that is not settled, for the next loop, and commit."""
        try:
            self.end()
        except (KafkaException, RuntimeError) as error:  # RuntimeError if the consumer was closed before the loop ended
            # A warning, since an exception would hide the one that the loop ends with.
            logger.warning("could not seek back to the message that is not processed: %s", error)
        self.commit()


def is_assigned(consumer: Consumer, topic: str, partition: int) -> bool:
    return any((each.topic, each.partition) == (topic, partition) for each in consumer.assignment())


def _position_of(message: Any) -> TopicPartition:
    return TopicPartition(message.topic(), message.partition(), message.offset())
