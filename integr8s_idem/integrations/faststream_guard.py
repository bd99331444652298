"""Guards one message of a FastStream subscriber, or one batch, from its arrival to its acknowledgment."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerClosed
from faststream import BaseMiddleware
from faststream.exceptions import AckMessage, HandlerException, IgnoredException, NackMessage, StopConsume
from faststream.message import StreamMessage

from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import NO_RESULT
from integr8s_idem.engine.work import Discarded, HandlerFailed, Work
from integr8s_idem.errors import (
    IdempotencyError,
    InProgressError,
    InvalidKeyError,
    LeaseLostError,
    ServiceStoppedError,
    StoreError,
)
from integr8s_idem.events import derived_event_id
from integr8s_idem.integrations.faststream_results import materialized, replayed, stored
from integr8s_idem.integrations.faststream_subscribers import (
    NO_BATCHES,
    SubscriberError,
    SubscriberStoppedError,
    check_subscriber,
    has_group,
    key_of_message,
    name_of,
)
from integr8s_idem.integrations.kafka_loops import (
    End,
    KeyOf,
    by_position,
    note_discarded,
    pause_after,
    stop_of,
)
from integr8s_idem.integrations.message_runs import MessageRuns
from integr8s_idem.keys.fingerprints import fingerprint
from integr8s_idem.records import Completed
from integr8s_idem.telemetry.log_fields import SOURCE, CommonSource, LogSource, MessageSource

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STOPS: Final = (StopConsume, SystemExit)
"""Raised by a handler to stop its subscriber or the application."""

GivenUp = Callable[[Any, Exception], Awaitable[None]]
"""Called with a Kafka record that is given up, for example to send it to a dead-letter topic."""


@dataclass(frozen=True)
class GuardSettings:
    """The options of a middleware and the state that all its messages share."""

    manager: IdempotencyManager
    key: KeyOf
    ttl: timedelta | None
    given_up: GivenUp | None
    policy: FailurePolicy | None = None
    """The rules for errors; `None` if there are none, not even the default ones."""
    failures: dict[Any, int] = field(default_factory=dict)
    """Consecutive failures by subscriber."""
    names: dict[Any, str | None] = field(default_factory=dict)
    """Names of the subscribers that have passed `check_subscriber`."""


_SET_GIVEN_UP: Final = (
    "It is redelivered until it is accepted: pass IdempotencyMiddleware(given_up=…), an async function that, for "
    "example, sends such messages to a dead-letter topic."
)


class MessageGuard(BaseMiddleware[Any, Any]):
    """Guards one message or one batch."""

    def __init__(self, settings: GuardSettings, msg: Any, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._settings = settings
        self._manager = settings.manager
        self._subscriber: Any = context.get_local("handler_")
        self._runs = MessageRuns(settings.manager)
        self._value: Any = NO_RESULT
        """What the handler returned, unless it raised."""
        self._unit: str | None = None
        """The full key of a single message; the event ids of its published messages are derived from it."""
        self._published = 0
        self._is_guarded = False
        """Whether published messages answer a guarded message."""
        self._outer_source = SOURCE.get()
        self._message: Any = None
        self._must_redeliver = False
        """Whether the message must not be acknowledged, even if the rest of its batch succeeds."""

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        if not has_group(self._subscriber):
            return await call_next(msg)
        await self._check_subscriber(msg)
        self._is_guarded, self._message = True, msg
        SOURCE.set(self._log_source(msg.raw_message))
        if isinstance(msg.raw_message, tuple | list):
            if self._settings.policy is not None:
                logger.error("%s", NO_BATCHES)
                await msg.nack()
                raise SubscriberError(NO_BATCHES)
            return await self._consume_batch(call_next, msg)
        work = self._work_or_end(msg.raw_message)
        if isinstance(work, Work):
            self._unit = self._manager.space.full(work.key)
        ended = await self._or_redeliver(self._runs.begin(work, msg.raw_message))
        if ended is not None and ended.is_discarded:
            raise AckMessage
        if ended is not None and isinstance(ended.done, Completed):
            return replayed(ended.done)
        if ended is not None:
            await self._give_up(msg.raw_message, ended.error)
            await self._acknowledge()
        [attempt] = self._runs.start()
        self._unit = attempt.key  # another one if the message reuses a key, and a policy lets it run
        self._value = await self._work(call_next, msg)
        return self._value

    def _log_source(self, raw: Any) -> LogSource:
        name = self._settings.names[self._subscriber] or ""
        records = raw if isinstance(raw, tuple | list) else (raw,)
        return CommonSource([MessageSource(self._manager.scope, record, name) for record in records])

    async def _check_subscriber(self, msg: StreamMessage[Any]) -> None:
        """Stop a subscriber that cannot be guarded.  Its message is rejected, so that it is redelivered."""
        if self._subscriber in self._settings.names:
            return
        try:
            of_other_brokers = (each for each in self._settings.names if each.running)
            check_subscriber(self._subscriber, [*self.context.get_local("broker").subscribers, *of_other_brokers])
        except SubscriberError as error:
            logger.error("%s", error)
            await msg.nack()
            raise
        self._settings.names[self._subscriber] = name_of(self._subscriber)

    async def _consume_batch(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        """Pass the records of a batch that are not handled yet to the handler, without duplicates."""
        records: Sequence[Any] = msg.raw_message
        works = [self._work_or_end(record) for record in records]
        indexes = _first_occurrences(works)
        ends = await self._or_redeliver(self._runs.begin_all([(works[index], records[index]) for index in indexes]))
        reserved = [index for index, end in zip(indexes, ends, strict=True) if end is None]
        self._runs.start()
        for index, end in zip(indexes, ends, strict=True):
            if end is not None and end.error is not None:
                await self._give_up(records[index], end.error)
        if not reserved:
            await self._acknowledge()
        rest = copy.copy(msg)
        rest.raw_message = type(records)(records[index] for index in reserved)  # type: ignore[call-arg]
        for name in ("body", "batch_headers"):
            parts: Sequence[Any] = getattr(msg, name)
            if len(parts) == len(records):
                setattr(rest, name, [parts[index] for index in reserved])
        rest.headers = next(iter(rest.batch_headers), msg.headers)
        with self.context.scope("message", rest):  # what a handler with a parameter of type KafkaMessage gets
            return await self._work(call_next, rest)

    async def _or_redeliver(self, begin: Awaitable[T]) -> T:
        """Return the result of `begin`; reject the message, once, if a key cannot be reserved now."""
        try:
            return await begin
        except (InProgressError, StoreError) as error:
            logger.warning("%s", error)
            await self._redeliver()

    def _work_or_end(self, record: Any) -> Work | End:
        """Return the work of a record, or its end if no key can be made."""
        try:
            return self._work_of(record)
        except InvalidKeyError as error:
            return End(True, error=error)

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Give each published message the same event id in every run, so that consumers detect duplicates."""
        if not self._is_guarded:
            return await call_next(cmd)
        # Messages of one batch share their headers, and must not share an id.  The list lacks a body that is `None`.
        if self._unit is not None and "event_id" not in cmd.headers and len(cmd.batch_bodies) <= 1:
            # A copy: the dictionary belongs to the handler's response, which other publishers send as well.
            cmd.headers = {**cmd.headers, "event_id": derived_event_id(self._unit, self._published)}
        self._published += 1
        failures = 0
        while True:
            try:
                return await call_next(cmd)
            except KafkaError as error:
                if not _is_transient(error):
                    raise
                logger.warning("publishing to %s failed, retrying: %r", cmd.destination, error)
            failures += 1
            await asyncio.sleep(pause_after(failures))

    def _work_of(self, record: Any) -> Work:
        # The topic is not part of the key: a message that the subscriber reads from a retry topic is the same work.
        group, name = self._subscriber.group_id, self._settings.names[self._subscriber]
        text = self._settings.key(record)
        assert name is not None, "check_subscriber rejects subscribers without a name"
        key = key_of_message(group, name, text)
        ttl = None if self._settings.ttl is None else self._manager.checked_ttl(self._settings.ttl)
        digest, policy = fingerprint(record.value or b""), self._settings.policy
        return Work(self._manager.space.key(key), digest, ttl, handler=name, failures=policy)

    async def _work(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        with self._runs.within():
            try:
                return materialized(await call_next(msg), self._settings.names[self._subscriber])
            except asyncio.CancelledError:
                self._runs.raise_if_lost()
                raise

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        """Settle the message after the handler's scope has closed and its messages have been published."""
        try:
            return await self._settle(exc_val)
        finally:
            SOURCE.set(self._outer_source)

    async def _settle(self, exc_val: BaseException | None) -> bool:
        if not self._runs:
            if self._is_guarded and isinstance(exc_val, Exception) and not isinstance(exc_val, IgnoredException):
                # Raised by the user's key function, or by FastStream's code around this middleware.
                logger.error("%s: the message will be redelivered", _text_of(exc_val))
                await self._redeliver()
            return False
        if exc_val is None or isinstance(exc_val, AckMessage):
            await self._finish()
            if self._must_redeliver:
                await self._redeliver()
        elif isinstance(exc_val, Exception) and not _is_transient(exc_val) and not isinstance(exc_val, _STOPS):
            await self._fail(exc_val)
        else:
            lost = self._runs.lost()
            self._runs.release()
            if lost or _is_transient(exc_val):
                # A cancellation by a run would end the subscriber if it propagated.
                logger.warning("%s: the message will be redelivered", lost[0] if lost else _text_of(exc_val))
                await self._redeliver()
            if not isinstance(exc_val, asyncio.CancelledError):
                await self._message.nack()  # the subscriber or the process stops, and some policies acknowledge then
        return False

    async def _finish(self) -> None:
        is_kept = self._manager.config.enable_result_caching
        ends = await self._runs.finish(stored(self._value, is_kept=is_kept) if len(self._runs) == 1 else None)
        for end in ends:
            if isinstance(end, LeaseLostError | StoreError):
                logger.warning("%s", end)
            elif isinstance(end, BaseException):
                raise end
        if any(isinstance(end, BaseException) for end in ends):
            await self._redeliver()
        self._settings.failures.pop(self._subscriber, None)

    async def _fail(self, error: Exception) -> None:
        settled = 0
        for run, record, end in await self._runs.fail(error):
            if isinstance(end, HandlerFailed) and end.given_up:
                settled += 1
                await self._give_up(record, error)
            elif isinstance(end, Discarded):
                settled += 1
                note_discarded(self._manager, run.work, run.work.handler, end)
            elif isinstance(end, HandlerFailed) and (stopped := stop_of(run.work, run.work.handler, end)) is not None:
                await self._stop_subscriber(stopped)
        if settled == len(self._runs):
            await self._acknowledge()
        logger.warning("%s: the message will be redelivered", _text_of(error))
        await self._redeliver()

    async def _stop_subscriber(self, stopped: ServiceStoppedError) -> NoReturn:
        """Stop the subscriber.  Its message is rejected, so that it is redelivered at the next start."""
        self._runs.release()
        logger.error("%s", stopped, exc_info=stopped.__cause__)
        # First, since under some policies FastStream acknowledges a message whose consumer is stopped.
        await self._message.nack()
        error = SubscriberStoppedError(stopped.label, stopped.handler, stopped.rule, stopped.reason)
        raise error from stopped.__cause__

    async def _give_up(self, record: Any, error: Exception | None) -> None:
        """Pass a record to the `given_up` function.  If that is missing or fails, the message is redelivered."""
        assert error is not None, "work that is not done has ended with an error"
        position = by_position(record)
        if self._settings.given_up is None:
            self._must_redeliver = True
            logger.error("%s blocks its partition: %s %s", position, _text_of(error), _SET_GIVEN_UP)
            return
        logger.error("%s is given up: %s", position, _text_of(error))
        try:
            await self._settings.given_up(record, error)
        except Exception as failure:  # noqa: BLE001  # logged and retried
            self._must_redeliver = True
            logger.error("%s blocks its partition: given_up raised: %s", position, _text_of(failure))

    async def _acknowledge(self) -> NoReturn:
        """Acknowledge a message without calling the handler, unless it must be redelivered."""
        if self._must_redeliver:
            await self._redeliver()
        raise AckMessage

    async def _redeliver(self) -> NoReturn:
        """Reject the message after a pause, so that it is redelivered.  FastStream itself does not pause."""
        self._runs.release()
        failures = self._settings.failures.get(self._subscriber, 0) + 1
        self._settings.failures[self._subscriber] = failures
        await asyncio.sleep(pause_after(failures))
        raise NackMessage


def _first_occurrences(works: Sequence[Work | End]) -> list[int]:
    """Return the indexes of a batch without duplicates: reserving a duplicate would wait for this batch itself."""
    first: dict[Any, int] = {}
    for index, work in enumerate(works):
        # A record without a key cannot be compared with others.
        first.setdefault((work.key, work.fingerprint) if isinstance(work, Work) else index, index)
    return list(first.values())


def _text_of(error: BaseException) -> str:
    """Return the message of this library's and FastStream's errors, and the `repr` of others."""
    has_message = isinstance(error, IdempotencyError | HandlerException)
    return (str(error) if has_message else "") or repr(error)


def _is_transient(error: BaseException) -> bool:
    """Whether `error` comes from the broker and a retry may succeed.  It does not count as a failed run."""
    return isinstance(error, KafkaError) and not isinstance(error, MessageSizeTooLargeError | ProducerClosed)
