"""Retry events later, from retry topics, while later events of their partitions are handled.

The order of the steps is: the record is scheduled, the copy is confirmed, the offset moves.  After a crash between two
of them, the event is redelivered, meets its scheduled record, and is copied again; the record lets one of the copies
run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from integr8s_idem.config import KafkaSettings, ReplaySettings, ServiceSettings
from integr8s_idem.errors import ApplicationError, EventTooLargeError, PublishError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.publisher import EventPublisher, describe_placement
from integr8s_idem.worker.replay_signatures import event_hash
from integr8s_idem.worker.retry_copies import RetryCopy, copy_of, origin_of
from integr8s_idem.worker.retry_topics import RetryTopics

logger = logging.getLogger(__name__)

COPY_BACKOFF = Backoff(initial=0.5, longest=10.0)
"""Delays between attempts to publish a copy."""


@dataclass(slots=True)
class Retries:
    """Publishes the copies of one service."""

    topics: RetryTopics
    publisher: EventPublisher
    secrets: Sequence[bytes]
    """The first signs copies, all of them verify; empty if copies are not signed."""
    observer: Observer
    missing: frozenset[str] = frozenset()
    """Names of retry topics that did not exist when this worker joined its group: it does not read them."""

    def copy_of(self, delivery: Delivery) -> RetryCopy | None:
        """Return the copy that a delivery of a retry topic is; `None` if it is for another consumer group.

        Raises:
            UnverifiedCopyError: It is not a copy, or not signed.
        """
        record = delivery.record
        copy = copy_of(record, self.secrets)
        if copy.group != self.topics.group:
            place = f"{record.topic}[{record.partition}]@{record.offset}"
            logger.warning("%s: skipped: it is a retry for another consumer group", place)
            return None
        delivery.copied_from = copy.origin
        return copy

    def wait_seconds(self, delivery: Delivery, remaining: timedelta) -> float | None:
        """Return how long a delivery of work that is not due yet waits here; `None` if it is copied to a retry topic.

        It waits if the remaining time is at most the delay of its topic, which is zero for a topic of events.
        """
        partition = delivery.assignment.retry
        if partition is None:
            return None
        if remaining <= partition.topic.delay:
            return remaining.total_seconds()
        if self.topics.choose(delivery.source.topic, remaining).name != partition.topic.name:
            return None
        now = asyncio.get_running_loop().time()
        return partition.patience(delivery.record.offset, now) or None

    async def publish(
        self, delivery: Delivery, execution: GuardedExecution, attempt: int, remaining: timedelta
    ) -> bool:
        """Publish a copy of a delivery for one of its handlers, and return when the broker has confirmed it.

        Args:
            delivery: The event, or a copy of it.
            execution: The handler whose attempt has failed.
            attempt: The number of that attempt.
            remaining: Time until the work is due.

        Returns:
            `False` if it could not be published before the work was due, so that it is to be handled here.

        Raises:
            AbandonedError: Its assignment is closing.
        """
        loop, tries = asyncio.get_running_loop(), 0
        due_at = loop.time() + remaining.total_seconds()
        event = execution.event
        origin = origin_of(delivery.source)
        topic = self.topics.choose(origin.topic, remaining).name
        copy = RetryCopy(
            self.topics.group,
            execution.handler.name,
            event_hash(delivery.event_id),
            execution.generation,
            attempt,
            execution.work.uncounted_attempts,
            origin,
        )
        while True:
            try:
                if topic in self.missing:
                    raise PublishError(topic, "it did not exist when this worker started, which does not read it")
                with self.observer.sending(topic, delivery.event_id, origin.headers, in_current=True) as span:
                    headers = copy.headers(topic, self.secrets)
                    describe_placement(span, await self.publisher.send(topic, origin.key, origin.value, headers))
            except (PublishError, EventTooLargeError) as error:
                tries += 1
                logger.error(
                    "%s: cannot publish its copy to retry topic %s, waiting, at most until it is due in %.1f s: %s",
                    execution.label,
                    topic,
                    max(due_at - loop.time(), 0.0),
                    error,
                )
                await self._wait(delivery, error, tries, due_at)
                if loop.time() >= due_at:
                    return False
            else:
                self.observer.count(Signal.RETRY_COPY, event.event_type)
                return True

    async def _wait(self, delivery: Delivery, error: Exception, tries: int, due_at: float) -> None:
        left = max(due_at - asyncio.get_running_loop().time(), 0.0)
        # A copy that is too large remains too large: it waits here instead.
        pause = left if isinstance(error, EventTooLargeError) else min(COPY_BACKOFF.pause(tries), left)
        await asyncio.wait({delivery.assignment.closing}, timeout=pause)
        if delivery.assignment.closed:
            raise AbandonedError from error


def retries_of(
    name: str,
    group: str,
    dispatcher: EventDispatcher,
    publisher: EventPublisher,
    sources: Sequence[str],
    section: ServiceSettings,
    kafka: KafkaSettings,
    replay: ReplaySettings,
) -> Retries | None:
    """Return the retries of the service `name`; `None` if it has no retry topics.

    Raises:
        ApplicationError: The handlers and the settings do not match.
    """
    overtaking = sorted({handler.name for handler in dispatcher.router.handlers if handler.overtakes})
    if not section.retry_topics:
        if not overtaking:
            return None
        raise ApplicationError(
            f"handler {overtaking[0]} of service {name} has delayed_retries='overtake', but the service has no retry "
            f'topics: set services.{name}.retry_topics, as in ["1m", "10m", "1h"]'
        )
    if dispatcher.manager is None:
        raise ApplicationError(
            f"service {name} has retry topics, but its handlers are not guarded: only the record of an event can tell "
            "which of its copies may run, and when. Use an IdempotentDispatcherProvider, or remove retry_topics"
        )
    if not replay.keys and replay.unsigned_policy == "refuse":
        raise ApplicationError(
            f'service {name} has retry topics, but [replay] unsigned = "refuse" and no secret: it would refuse its own '
            "copies. Set [replay] secret"
        )
    if kafka.auto_offset_reset != "earliest":
        # No offset is committed until the first copy is settled: a worker that starts before that would skip copies.
        raise ApplicationError(
            f'service {name} has retry topics, but kafka.auto_offset_reset is "{kafka.auto_offset_reset}": it also '
            'applies to retry topics, whose copies would be lost. Set "earliest"; to skip the existing events of a '
            "new group, commit its offsets before you start it"
        )
    topics = RetryTopics(group, section.retry_topics, sources)
    topics.check()
    return Retries(topics, publisher, replay.keys, dispatcher.observer)
