"""`EventPublisher`: events out, confirmed by all replicas, written once per try (idempotent producer)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import EventTooLargeError, PublishError
from integr8s_idem.events import BaseEvent, Message, encode_event, event_headers
from integr8s_idem.telemetry import SILENT, Observer, Signal
from integr8s_idem.worker.client_options import bounded, connection_options

logger = logging.getLogger(__name__)

Sendable: TypeAlias = tuple[str, bytes | None, bytes | None, Sequence[tuple[str, bytes]]]
"""Topic, key, value and headers of a message."""


class EventPublisher:
    """Publishes events to their topics.  Connects at first use; may be shared by everything in a process."""

    def __init__(self, settings: KafkaSettings, observer: Observer = SILENT) -> None:
        self._settings = settings
        self._observer = observer
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    def topic_of(self, event_type: str) -> str:
        """The topic of an event type: the prefix of the settings and its name."""
        return self._settings.topic_prefix + event_type

    async def publish(self, *events: BaseEvent) -> None:
        """Return once every event is confirmed.  Those of one type and aggregate arrive in their order.

        Publishing the same event again is safe: its id stays, and the next service's guard drops it.

        Raises:
            PublishError: Some were not confirmed in time; they may have arrived.
            EventTooLargeError: One is larger than `max_event_bytes`; it did not leave.
        """
        sends = [self._publish(line) for line in _lines(events)]
        if len(sends) == 1:
            await sends[0]
            return
        for failure in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    def message(self, event: BaseEvent) -> Message:
        """`event` as it goes to the broker, with the headers of the current trace.

        Raises:
            EventError: It holds NaN or infinity.
            EventTooLargeError: It is larger than `max_event_bytes`.
        """
        headers = event_headers(event)
        self._observer.inject(headers)
        key = event.aggregate_id.encode("utf-8", "surrogatepass") if event.aggregate_id is not None else None
        return Message(
            self.topic_of(event.event_type), key, encode_event(event), headers, event.event_id, event.event_type
        )

    async def _publish(self, line: Sequence[BaseEvent]) -> None:
        # One after the other: while the client connects, a later one may overtake those that wait for that.
        for event in line:
            await self.send_message(self.message(event))

    async def send_message(self, message: Message) -> None:
        """Send one message that was made earlier.  Raises as `publish` does."""
        await self.send(message.topic, message.key, message.value, message.headers)
        self._observer.count(Signal.PUBLISHED, message.event_type)

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        """Send one message as it is, but for one without key and value, which gets an empty value.

        The client sends none without both.

        Raises:
            EventTooLargeError: The broker refuses it for its size.
            PublishError: The broker did not confirm it in time.
        """
        used: AIOKafkaProducer | None = None

        async def confirmed() -> None:
            nonlocal used
            used = await self._connected()
            body = b"" if key is None and value is None else value
            sent = await used.send(topic, value=body, key=key, headers=list(headers))
            try:
                await sent
            except MessageSizeTooLargeError:
                # Refused by the broker, it leaves a gap in the producer's sequence: its next batch would fail.
                await self._discard(used)
                raise

        try:
            await bounded(confirmed(), self._settings.request_timeout_seconds)
        except MessageSizeTooLargeError as error:
            raise EventTooLargeError(topic, len(value or b""), self._settings.max_event_bytes) from error
        except (KafkaError, OSError, TimeoutError) as error:
            # After a timeout or a fatal error nothing is known of the producer's state: take a new one.
            await self._discard(used)
            raise PublishError(topic, f"{type(error).__name__}: {error}") from error

    async def send_all(self, messages: Sequence[Sendable]) -> list[PublishError | EventTooLargeError | None]:
        """Send messages as they are, each behind the one before it without a wait for its confirmation.

        Those of one topic and key arrive in their order, as far as they arrive.  What is refused spoils neither the
        others nor the answer: its place there has the error, once it was tried alone as well.  Where a topic has not
        confirmed one, those behind it are not tried: they would overtake it, and wait as long each.
        """
        outcomes: list[PublishError | EventTooLargeError | None] = [None] * len(messages)
        silent: dict[str, PublishError] = {}
        for place in await self._pipelined(messages):
            topic = messages[place][0]
            outcomes[place] = silent.get(topic) or await self._sent_alone(messages[place])
            if isinstance(outcome := outcomes[place], PublishError):
                silent[topic] = outcome
        return outcomes

    async def _sent_alone(self, message: Sendable) -> PublishError | EventTooLargeError | None:
        try:
            await self.send(*message)
        except (PublishError, EventTooLargeError) as error:
            return error
        return None

    async def _pipelined(self, messages: Sequence[Sendable]) -> list[int]:
        """Send all at once; the places of those that were not confirmed, some of them for the sake of others."""
        seconds = self._settings.request_timeout_seconds
        confirmations: dict[int, asyncio.Future[Any]] = {}
        used: AIOKafkaProducer | None = None
        try:
            used = await bounded(self._connected(), seconds)
            for place, (topic, key, value, headers) in enumerate(messages):
                body = b"" if key is None and value is None else value
                sending = used.send(topic, value=body, key=key, headers=list(headers))
                with suppress(MessageSizeTooLargeError):  # it was not handed over, and hurts nobody
                    confirmations[place] = await bounded(sending, seconds)
                    confirmations[place].add_done_callback(_seen)
            await _all_done(confirmations.values(), seconds)
            failures = [one.exception() for one in confirmations.values()]
            if any(failures):
                await self._discard(used)
        except (KafkaError, OSError, TimeoutError):
            await self._discard(used)
        return [place for place in range(len(messages)) if not _is_confirmed(confirmations.get(place))]

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
        """Take another producer from now on, unless somebody else who had `used` it has seen to that."""
        if used is not None and used is self._producer:
            self._producer = None
            await _stop(used, 1.0)

    async def close(self) -> None:
        """Let confirmed what is under way, bounded, and disconnect."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer, self._settings.request_timeout_seconds)


def _lines(events: Sequence[BaseEvent]) -> list[list[BaseEvent]]:
    """Those of one type and aggregate together; each of the others by itself."""
    lines: dict[object, list[BaseEvent]] = {}
    for place, event in enumerate(events):
        line = place if event.aggregate_id is None else (event.event_type, event.aggregate_id)
        lines.setdefault(line, []).append(event)
    return list(lines.values())


async def _all_done(futures: Iterable[asyncio.Future[Any]], seconds: float) -> None:
    """Raises `TimeoutError` if one takes longer, counted from the end of the one before it."""
    for future in futures:
        if not future.done():
            await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            raise TimeoutError


def _is_confirmed(future: asyncio.Future[Any] | None) -> bool:
    return future is not None and future.done() and not future.cancelled() and future.exception() is None


def _seen(future: asyncio.Future[Any]) -> None:
    """Somebody who waits for it may be gone: then nobody else would ask what became of it."""
    if not future.cancelled():
        future.exception()


async def _stop(producer: Any, seconds: float) -> None:
    try:
        await bounded(producer.stop(), seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        logger.warning("producer did not stop cleanly: %s", error)
