"""confluent-kafka consumer loops that process each message once.

    consumer = Consumer({"bootstrap.servers": …, "group.id": "billing", "enable.auto.commit": False})
    consumer.subscribe(["orders"])
    for delivery in guarded(consumer, manager, key=by_header("event_id")):
        delivery.run(charge)                    # calls charge(message) once per key, across restarts

The loop and the function run in the calling thread; the idempotency manager runs in an event loop of another thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.outcomes import pending_error
from integr8s_idem.engine.results import materialized
from integr8s_idem.engine.work import Attempt, Outcome, Work
from integr8s_idem.errors import ApplicationError, InvalidKeyError, ServiceStoppedError
from integr8s_idem.failures import FailureRule
from integr8s_idem.functions.sync_bridge import Here, in_a_loop, named, own_loop, refuse_awaitable, wait_for
from integr8s_idem.integrations.kafka_loops import (
    COMMIT_INTERVAL,
    KeyOf,
    by_header,
    by_position,
    end_of,
    note_discarded,
    pause_after,
    policy_of,
    refuse_async,
    stop_of,
    value_of,
    work_of,
)
from integr8s_idem.records import Pending
from integr8s_idem.telemetry.log_fields import MessageSource, logging_as

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

    from integr8s_idem.integrations.confluent_offsets import Offsets
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "confluent", error)) from error

__all__ = ["Delivery", "by_header", "by_position", "guarded"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

GivenUp = Callable[[Message, Exception], None]
"""Called with a message that is given up, for example to send it to a dead-letter topic."""

_POLL: Final = 0.5
_WAIT_POLL: Final = 0.1
"""Poll timeouts in seconds: normally, and while another worker is processing a record."""


@dataclass(frozen=True, slots=True)
class _Record:
    """The parts of a message from which keys are made."""

    topic: str
    partition: int
    offset: int
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    key: bytes | str | None = None

    @staticmethod
    def of(message: Message) -> _Record:
        found: Sequence[tuple[str, Any]] = cast("Any", message.headers()) or []
        headers = [(name, value.encode() if isinstance(value, str) else value or b"") for name, value in found]
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        return _Record(topic, partition, offset, message.value(), headers, message.key())


def guarded(
    consumer: Consumer,
    manager: IdempotencyManager,
    *,
    key: KeyOf = by_position,
    ttl: Duration | None = None,
    given_up: GivenUp | None = None,
    failures: Iterable[FailureRule] | None = None,
    commit_interval: Duration = COMMIT_INTERVAL,
    stop: threading.Event | None = None,
) -> Iterator[Delivery]:
    """Iterate over the messages of a subscribed consumer, one at a time; call `delivery.run` for each.

    Set `enable.auto.commit` to false: the client does not expose this setting, so it cannot be checked here.

    Args:
        key: Returns the key of a record, which has topic, partition, offset, value and headers.
        ttl: How long an outcome is kept, by the store's clock.  Choose it longer than the retention of the topic.
        given_up: Function that accepts messages whose work has failed permanently; they are committed afterwards.
            Without it `run` raises, and they are not committed.
        failures: Rules for errors of the function, without pauses of their own, and before the default ones; see
            `integr8s_idem.failures`.  Without them, each error is retried, except `PermanentError`.
        commit_interval: How often offsets are committed, by this process's clock.
        stop: Ends the loop once it is set by another thread or a signal handler, even if no messages arrive.  `run`
            stops waiting for another worker, and raises `InProgressError`.

    Raises:
        ApplicationError: The calling thread runs an event loop, a delivery was neither run nor skipped, or a rule has a
            pause of its own.
        ServiceStoppedError: A rule stops the loop; the message is not committed.
        KafkaException: The consumer reports a permanent error.
    """
    if in_a_loop():
        raise ApplicationError("a confluent-kafka loop would block the running event loop: call it in a thread")
    checked_ttl = None if ttl is None else manager.checked_ttl(ttl)
    policy = policy_of(failures)
    offsets = Offsets(consumer, duration(commit_interval, "commit_interval").total_seconds())
    failed = 0
    try:
        while not _is_set(stop):
            message = offsets.poll(_POLL)
            if message is None or _is_transient(message.error()):
                offsets.note_end(message)
                offsets.commit_if_due()
                continue
            delivery = Delivery(consumer, manager, message, key, checked_ttl, given_up, policy, stop)
            offsets.begin(delivery)
            offsets.commit_if_due()
            yield delivery
            offsets.end()
            if delivery.settled:
                failed = 0
            else:
                failed += 1
                _check_was_run(delivery)
                if delivery.stopped is not None:
                    raise delivery.stopped
                _pause(pause_after(failed), stop)
    finally:  # the caller may leave the loop by `break` or an error
        offsets.close()


_TRANSIENT: Final = frozenset(
    (KafkaError._MAX_POLL_EXCEEDED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TRANSPORT, KafkaError._TIMED_OUT)  # noqa: SLF001
)
"""Errors that the consumer recovers from: it rejoins its group, and looks up a missing topic again."""


def _is_transient(error: KafkaError | None) -> bool:
    """Whether a poll returned a transient error instead of a message.

    Raises:
        KafkaException: The error is permanent.
    """
    if error is None:
        return False
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
        return True
    if error.fatal() or not (error.retriable() or error.code() in _TRANSIENT):
        raise KafkaException(error)
    logger.warning("%s", error)
    return True


def _pause(seconds: float, stop: threading.Event | None) -> None:
    """Sleep for `seconds`, or until `stop` is set."""
    # Not `stop.wait`: a signal handler that sets the event could wait forever for the lock that its thread holds.
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not _is_set(stop):
        time.sleep(min(left, _WAIT_POLL))


def _is_set(stop: threading.Event | None) -> bool:
    return stop is not None and stop.is_set()


def _check_was_run(delivery: Delivery) -> None:
    if not delivery.was_run:
        raise ApplicationError(
            f"{by_position(delivery.record)} was neither run nor skipped: write `delivery.run(function)`, or "
            "`delivery.skip()` if there is nothing to do"
        )


class Delivery:
    """One message, to be processed once."""

    def __init__(
        self,
        consumer: Consumer,
        manager: IdempotencyManager,
        message: Message,
        key: KeyOf,
        ttl: timedelta | None,
        given_up: GivenUp | None,
        failures: FailurePolicy | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.message = message
        self.record = _Record.of(message)
        self.settled = False
        """Whether the message may be committed."""
        self.stopped: ServiceStoppedError | None = None
        """Ends the loop: the function failed with an error that a rule stops for."""
        self.was_run = False
        self.attempt: Attempt | None = None
        """The attempt of the run, once it has started."""
        self._consumer = consumer
        self._manager = manager
        self._key = key
        self._ttl = ttl
        self._given_up = given_up
        self._failures = failures
        self._stop = stop

    def skip(self) -> None:
        """Mark the message as processed without running a function."""
        self.settled = True

    def run(self, function: Callable[[Message], T]) -> T:
        """Call `function` with the message in this thread, or return the stored result if it was processed before.

        Raises:
            ApplicationError: `function` is async, or has returned an awaitable.
            InvalidKeyError: No key can be made from the message.
            PreviouslyFailedError, KeyReusedError, CorruptRecordError: The message cannot be processed, and there is no
                `given_up` function.
            ResultDroppedError, ResultDecodeError: The message was processed, but the result of that run is not
                available.
            ServiceStoppedError: A rule stops the loop, which ends with this error.
            InProgressError: Another worker is processing the message, and `stop` is set; the message is fetched again.
            LeaseLostError: The lease expired; another worker may process the message now.
            StoreError: The store did not answer; the message is fetched again.
            Exception: Any error of `function`, unchanged; the message is fetched again.  Only a `StopIteration` becomes
                the cause of a `RuntimeError`, as in a generator.
        """
        self.was_run = True
        refuse_async(function)
        with logging_as(MessageSource(self._manager.scope, self.record, named(function))):
            return self._run(function)

    def _run(self, function: Callable[[Message], T]) -> T:
        try:
            work = work_of(self._manager, self.record, self._key, self._ttl, function, self._failures)
        except InvalidKeyError as error:
            self._failed(error, final=True)
            return cast("T", None)
        loop = self._manager.running_loop or own_loop()
        while isinstance(outcome := wait_for(loop, functools.partial(self._once, work, function)), Pending):
            if _is_set(self._stop):
                raise pending_error(work.key.label, outcome)
            self._wait()
        self.stopped = stop_of(work, named(function), outcome)
        if self.stopped is not None:
            raise self.stopped
        end = end_of(work, outcome)
        if end.is_discarded:
            note_discarded(self._manager, work, named(function), outcome)
            self.settled = True
            return cast("T", None)
        if end.error is not None:
            self._failed(end.error, final=end.settled)
            return cast("T", None)
        self.settled = True
        return cast("T", value_of(end, work, function))

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
        """Wait briefly, polling with all partitions paused to stay in the consumer group."""
        assigned: list[Any] = self._consumer.assignment()
        self._consumer.pause(assigned)
        try:
            message = self._consumer.poll(_WAIT_POLL)
            if message is not None and message.error() is None:
                # A newly assigned partition is not paused: fetch its message again later.
                record = _Record.of(message)
                self._consumer.seek(TopicPartition(record.topic, record.partition, record.offset))
        finally:  # an interrupt leaves the loop, which may be entered again
            # Resume revoked partitions too: if they were assigned again, they would still be paused.
            self._consumer.resume(assigned)
