"""`EventPublisher`: publish events with an idempotent producer, confirmed by all in-sync replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import EventTooLargeError, PublishError
from integr8s_idem.events import BaseEvent, Message, encode_event, event_headers
from integr8s_idem.telemetry import Observer, Signal, Span, conventions
from integr8s_idem.telemetry.setup import publisher_observer
from integr8s_idem.worker.client_options import bounded, connection_options

logger = logging.getLogger(__name__)

Sendable: TypeAlias = tuple[str, bytes | None, bytes | None, Sequence[tuple[str, bytes]]]
"""Topic, key, value and headers of a message."""


class Placement(NamedTuple):
    """Where the broker has placed a message."""

    partition: int
    offset: int


def describe_placement(span: Span, placement: Placement | None) -> None:
    """Add the place of a sent message to its span."""
    if placement is not None:
        span.annotate(conventions.PARTITION, str(placement.partition))
        span.annotate(conventions.OFFSET, placement.offset)


class EventPublisher:
    """Publishes events to their topics.  Connects at first use, and can be shared by the whole process."""

    def __init__(self, settings: KafkaSettings, observer: Observer | None = None) -> None:
        """`observer`: that of the service; by default, one that records spans when the process has an SDK."""
        self._settings = settings
        self._observer = publisher_observer(settings) if observer is None else observer
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    def topic_of(self, event_type: str) -> str:
        """Return the topic of an event type: `kafka.topic_prefix` and the type's name."""
        return self._settings.topic_prefix + event_type

    async def publish(self, *events: BaseEvent) -> None:
        """Publish events, and return when the broker has confirmed all of them.

        Events of one type and aggregate keep their order.  Publishing an event again is safe: its id is the same, so
        that consumers recognize the duplicate.

        Raises:
            PublishError: An event was not confirmed in time; it may have been written.
            EventTooLargeError: An event is larger than `max_event_bytes`; it was not sent.
        """
        sends = [self._publish(sequence) for sequence in _ordered_sequences(events)]
        if len(sends) == 1:
            await sends[0]
            return
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    def message(self, event: BaseEvent) -> Message:
        """Encode `event` as a message, with the headers of the current trace.

        Raises:
            EventError: The event contains NaN or infinity.
            EventTooLargeError: The event is larger than `max_event_bytes`.
        """
        headers = event_headers(event)
        self._observer.inject(headers)
        key = event.aggregate_id.encode("utf-8", "surrogatepass") if event.aggregate_id is not None else None
        return Message(
            self.topic_of(event.event_type), key, encode_event(event), headers, event.event_id, event.event_type
        )

    async def _publish(self, sequence: Sequence[BaseEvent]) -> None:
        # One after another: while the client connects, a later event could overtake earlier ones that wait.
        for event in sequence:
            with self._observer.sending(self.topic_of(event.event_type), event.event_id) as span:
                # The message carries the context of this span.
                describe_placement(span, await self.send_message(self.message(event)))

    async def publish_message(self, message: Message) -> None:
        """Publish a message that was encoded earlier, in the trace that its headers name.

        Raises:
            PublishError, EventTooLargeError: See `send_message`.
        """
        with self._observer.sending(message.topic, message.event_id, message.headers) as span:
            describe_placement(span, await self.send_message(message))

    async def send_message(self, message: Message) -> Placement | None:
        """Send an encoded message, and return where the broker has placed it, if it is known.

        Raises:
            PublishError: The broker did not confirm it in time; it may have been written.
            EventTooLargeError: The broker refuses it as too large.
        """
        placement = await self.send(message.topic, message.key, message.value, message.headers)
        self._observer.count(Signal.PUBLISHED, message.event_type)
        return placement

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Placement | None:
        """Send a message unchanged, and return where the broker has placed it, if it is known.

        A message without key and value gets an empty value, since the client does not send messages without both.

        Raises:
            EventTooLargeError: The broker refuses it as too large.
            PublishError: The broker did not confirm it in time; it may have been written.
        """
        used: AIOKafkaProducer | None = None

        async def confirmed() -> Placement:
            nonlocal used
            used = await self._connected()
            body = b"" if key is None and value is None else value
            sent = await used.send(topic, value=body, key=key, headers=list(headers))
            try:
                placed = await sent
                return Placement(placed.partition, placed.offset)
            except MessageSizeTooLargeError:
                # The refusal leaves a gap in the producer's sequence numbers: its next batch would fail.
                await self._discard(used)
                raise

        try:
            return await bounded(confirmed(), self._settings.request_timeout_seconds)
        except MessageSizeTooLargeError as error:
            raise EventTooLargeError(topic, len(value or b""), self._settings.max_event_bytes) from error
        except (KafkaError, OSError, TimeoutError) as error:
            # After a timeout or a fatal error, the state of the producer is unknown.
            await self._discard(used)
            raise PublishError(topic, _described(error), may_have_arrived=used is not None) from error

    async def send_all(self, messages: Sequence[Sendable]) -> list[PublishError | EventTooLargeError | None]:
        """Send messages unchanged, without waiting for each confirmation before the next message.

        Messages of one topic and key keep their order.  A message that was not confirmed is sent again alone.  If it
        fails again, the remaining messages of its topic are not sent again: they would overtake it, and each would wait
        for the timeout.

        Returns:
            For each message, `None` or its error.
        """
        outcomes: list[PublishError | EventTooLargeError | None] = [None] * len(messages)
        failed_topics: dict[str, PublishError] = {}
        for index in await self._send_pipelined(messages):
            topic = messages[index][0]
            outcomes[index] = failed_topics.get(topic) or await self._send_alone(messages[index])
            if isinstance(outcome := outcomes[index], PublishError):
                failed_topics[topic] = outcome
        return outcomes

    async def _send_alone(self, message: Sendable) -> PublishError | EventTooLargeError | None:
        try:
            await self.send(*message)
        except (PublishError, EventTooLargeError) as error:
            return error
        return None

    async def _send_pipelined(self, messages: Sequence[Sendable]) -> list[int]:
        """Send all messages, and return the indexes of those that were not confirmed."""
        seconds = self._settings.request_timeout_seconds
        confirmations: dict[int, asyncio.Future[Any]] = {}
        used: AIOKafkaProducer | None = None
        try:
            used = await bounded(self._connected(), seconds)
            for index, (topic, key, value, headers) in enumerate(messages):
                body = b"" if key is None and value is None else value
                sending = used.send(topic, value=body, key=key, headers=list(headers))
                with suppress(MessageSizeTooLargeError):  # the client refused it and did not send it
                    confirmations[index] = await bounded(sending, seconds)
                    confirmations[index].add_done_callback(_retrieve_exception)
            await _all_done(confirmations.values(), seconds)
            failures = [confirmation.exception() for confirmation in confirmations.values()]
            if any(failures):
                await self._discard(used)
        except (KafkaError, OSError, TimeoutError):
            await self._discard(used)
        return [index for index in range(len(messages)) if not _is_confirmed(confirmations.get(index))]

    async def _connected(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **connection_options(self._settings),
                    acks="all",
                    enable_idempotence=True,
                    max_request_size=self._settings.max_event_bytes,
                )
                try:
                    await producer.start()
                except BaseException:
                    await _stop(producer, self._settings.request_timeout_seconds)
                    raise
                self._producer = producer
            return self._producer

    async def _discard(self, used: AIOKafkaProducer | None) -> None:
        """Stop the producer `used`, unless another call has already replaced it; the next call creates a new one."""
        if used is not None and used is self._producer:
            self._producer = None
            await _stop(used, 1.0)

    async def close(self) -> None:
        """Wait for pending confirmations, up to `kafka.request_timeout_seconds`, and disconnect."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer, self._settings.request_timeout_seconds)


def _described(error: Exception) -> str:
    """Return the class and the text of `error`; the text of most errors of aiokafka begins with the class."""
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}" if text else name


def _ordered_sequences(events: Sequence[BaseEvent]) -> list[list[BaseEvent]]:
    """Group events by type and aggregate; an event without an aggregate is a group of its own."""
    sequences: dict[object, list[BaseEvent]] = {}
    for index, event in enumerate(events):
        group = index if event.aggregate_id is None else (event.event_type, event.aggregate_id)
        sequences.setdefault(group, []).append(event)
    return list(sequences.values())


async def _all_done(futures: Iterable[asyncio.Future[Any]], seconds: float) -> None:
    """Wait for all futures.

    Raises:
        TimeoutError: A future took longer than `seconds` after the one before it.
    """
    for future in futures:
        if not future.done():
            await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            raise TimeoutError


def _is_confirmed(future: asyncio.Future[Any] | None) -> bool:
    return future is not None and future.done() and not future.cancelled() and future.exception() is None


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Avoid asyncio's warning about an exception that was never retrieved, if the waiting task was cancelled."""
    if not future.cancelled():
        future.exception()


async def _stop(producer: Any, seconds: float) -> None:
    try:
        await bounded(producer.stop(), seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        logger.warning("producer did not stop cleanly: %s", error)
