"""Plain confluent-kafka loops, each record done once.

    consumer = Consumer({"bootstrap.servers": …, "group.id": "billing", "enable.auto.commit": False})
    consumer.subscribe(["orders"])
    for delivery in guarded(consumer, manager, key=by_header("event_id")):
        delivery.run(charge)                    # charge(message), once per key, over all restarts

The loop and the function run in the thread that calls them; the guard runs in an event loop of another thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.engine.manager import IdempotencyManager, replayed_value
from integr8s_idem.engine.results import materialized
from integr8s_idem.engine.work import Attempt, Executed, Outcome, Work
from integr8s_idem.errors import ApplicationError, InvalidKeyError
from integr8s_idem.functions.sync_bridge import Here, in_a_loop, own_loop, refuse_awaitable, wait_for
from integr8s_idem.integrations.kafka_loops import (
    COMMIT_INTERVAL,
    KeyOf,
    by_header,
    by_position,
    end_of,
    pause_after,
    refuse_async,
    work_of,
)
from integr8s_idem.records import InProgress

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "confluent", error)) from error

__all__ = ["Delivery", "by_header", "by_position", "guarded"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

GivenUp = Callable[[Message, Exception], None]
"""Takes a message that is given up, for example to a topic of dead letters."""

_POLL: Final = 0.5
_LOOK: Final = 0.1
"""Seconds of one poll, and of one look at a record that somebody else works on."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A message as keys are made of it."""

    topic: str
    partition: int
    offset: int
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]

    @staticmethod
    def of(message: Message) -> _Record:
        found: Sequence[tuple[str, Any]] = cast("Any", message.headers()) or []
        headers = [(name, value.encode() if isinstance(value, str) else value or b"") for name, value in found]
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        return _Record(topic, partition, offset, message.value(), headers)


def guarded(
    consumer: Consumer,
    manager: IdempotencyManager,
    *,
    key: KeyOf = by_position,
    ttl: Duration | None = None,
    given_up: GivenUp | None = None,
    commit_interval: Duration = COMMIT_INTERVAL,
    stop: threading.Event | None = None,
) -> Iterator[Delivery]:
    """The messages of a consumer that has subscribed, one after the other, each to be done by `delivery.run`.

    The consumer must be one with `enable.auto.commit` false; it does not say whether it is.

    Args:
        key: Names the work of a message, of which it sees topic, partition, offset, value and headers.
        ttl: How long an outcome is remembered, by the store's clock; longer than the topic keeps messages.
        given_up: Takes messages whose work has failed for good; they are committed then.  Without it `run` raises,
            and they are not.
        commit_interval: How often offsets are committed, by this process's clock.
        stop: Once it is set, by another thread or a handler of signals, the loop ends, also while no message comes.

    Raises:
        ApplicationError: It is called in an event loop's thread, or a delivery was neither run nor skipped.
        KafkaException: The consumer has an error that it does not recover from by itself.
    """
    if in_a_loop():
        raise ApplicationError("a loop of confluent-kafka would stop the event loop it is called in: use a thread")
    kept = None if ttl is None else manager.checked_ttl(ttl)
    behind = _Behind(consumer, duration(commit_interval, "commit_interval").total_seconds())
    failures = 0
    try:
        while stop is None or not stop.is_set():
            message = consumer.poll(_POLL)
            behind.commit_if_due()
            if message is None or _is_told(message.error()):
                behind.note_end(message)
                continue
            delivery = Delivery(consumer, manager, message, key, kept, given_up)
            try:
                yield delivery
            finally:  # the loop may be left with it
                if delivery.settled:
                    behind.settle(delivery.record)
            if delivery.settled:
                failures = 0
            else:
                failures += 1
                _go_back(consumer, delivery)
                time.sleep(pause_after(failures))
    finally:
        behind.commit()


_PASSING: Final = frozenset(
    (KafkaError._MAX_POLL_EXCEEDED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TRANSPORT, KafkaError._TIMED_OUT)  # noqa: SLF001
)
"""What the consumer goes on after: it joins its group again, and looks again for a topic that is not there yet."""


def _is_told(error: KafkaError | None) -> bool:
    """Whether what came is no message, but an error that passes.

    Raises:
        KafkaException: It is one that does not.
    """
    if error is None:
        return False
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
        return True
    if error.fatal() or not (error.retriable() or error.code() in _PASSING):
        raise KafkaException(error)
    logger.warning("%s", error)
    return True


def _go_back(consumer: Consumer, delivery: Delivery) -> None:
    place = delivery.record
    if not delivery.was_run:
        raise ApplicationError(
            f"{by_position(place)} was neither run nor skipped: write `delivery.run(function)`, or `delivery.skip()` "
            "if there is nothing to do"
        )
    if _is_ours(consumer, place.topic, place.partition):
        consumer.seek(TopicPartition(place.topic, place.partition, place.offset))


def _is_ours(consumer: Consumer, topic: str, partition: int) -> bool:
    return any((each.topic, each.partition) == (topic, partition) for each in consumer.assignment())


class _Behind:
    """Commits what is settled."""

    def __init__(self, consumer: Consumer, interval: float) -> None:
        self._consumer = consumer
        self._interval = interval
        self._due = time.monotonic() + interval
        self._settled: dict[tuple[str, int], int] = {}

    def settle(self, record: _Record) -> None:
        self._settled[record.topic, record.partition] = record.offset + 1

    def note_end(self, message: Message | None) -> None:
        """Settle markers and aborted messages as well, if `message` says that the end of a partition was reached.

        Every record before that end has been polled; it is settled, or it was sought back to, and then librdkafka
        drops an end that it has reported meanwhile.
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
        settled, self._settled = self._settled, {}
        try:
            offsets = [
                TopicPartition(topic, partition, offset)
                for (topic, partition), offset in settled.items()
                if _is_ours(self._consumer, topic, partition)
            ]
            if offsets:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except (KafkaException, RuntimeError) as error:  # the latter where the consumer was closed before the loop
            # They come again, to us or to the next owner, and are found done.
            logger.warning("offsets were not committed: %s", error)


class Delivery:
    """One message, to be done once."""

    def __init__(
        self,
        consumer: Consumer,
        manager: IdempotencyManager,
        message: Message,
        key: KeyOf,
        ttl: timedelta | None,
        given_up: GivenUp | None,
    ) -> None:
        self.message = message
        self.record = _Record.of(message)
        self.settled = False
        """Whether it may be committed."""
        self.was_run = False
        self.attempt: Attempt | None = None
        """That of the run, once it has begun."""
        self._consumer = consumer
        self._manager = manager
        self._key = key
        self._ttl = ttl
        self._given_up = given_up

    def skip(self) -> None:
        """There is nothing to do."""
        self.settled = True

    def run(self, function: Callable[[Message], T]) -> T:
        """Have `function` do it, in this thread, unless it is done; then give what the first run has returned.

        Raises:
            ApplicationError: `function` is an async one, or has returned something to await.
            InvalidKeyError: The message offers nothing to make a key of.
            PreviouslyFailedError, KeyReusedError, CorruptRecordError: It cannot be done, and nobody takes those that
                are given up.
            ResultDroppedError, ResultDecodeError: It is done, and what the first run returned cannot be given.
            LeaseLostError: It took too long; somebody else does it now.
            StoreError: The store gave no answer; it is fetched again.
            Exception: Whatever `function` raises, unchanged; it is fetched again.
        """
        self.was_run = True
        refuse_async(function)
        try:
            work = work_of(self._manager, self.record, self._key, self._ttl, function)
        except InvalidKeyError as error:
            self._failed(error, final=True)
            return cast("T", None)
        loop = self._manager.running_loop or own_loop()
        while isinstance(outcome := wait_for(loop, functools.partial(self._once, work, function)), InProgress):
            self._wait()
        end = end_of(work, outcome)
        if end.error is not None:
            self._failed(end.error, final=end.settled)
            return cast("T", None)
        self.settled = True
        if isinstance(end.done, Executed):
            return cast("T", end.done.value)
        assert end.done is not None
        return cast("T", replayed_value(work.key.label, end.done, function))

    async def _once(self, work: Work, function: Callable[[Message], T], here: Here) -> Outcome[T]:
        async def call(attempt: Attempt) -> T:
            self.attempt = attempt
            value: T = await here(lambda: materialized(function(self.message), function), attempt)
            refuse_awaitable(value, function)
            return value

        return await self._manager.execute(work, call)

    def _failed(self, error: Exception, *, final: bool) -> None:
        if not final or self._given_up is None:
            raise error
        self._given_up(self.message, error)
        self.settled = True

    def _wait(self) -> None:
        """Wait a moment, and stay in the group by polling meanwhile."""
        ours: list[Any] = self._consumer.assignment()
        self._consumer.pause(ours)
        come = self._consumer.poll(_LOOK)
        if come is not None and come.error() is None:
            # What has come nevertheless, of a partition that is new, is to come again.
            place = _Record.of(come)
            self._consumer.seek(TopicPartition(place.topic, place.partition, place.offset))
        # Those that a rebalance has taken meanwhile, too: if they come back, they would be paused still.
        self._consumer.resume(ours)
