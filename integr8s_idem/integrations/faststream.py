"""FastStream middleware that makes Kafka subscribers handle each message once.

    broker = KafkaBroker(…, middlewares=[IdempotencyMiddleware(manager, key=by_header("event_id"))])

    @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    @broker.publisher("receipts")
    async def charge(order: Order) -> Receipt: ...

The record of a message is completed after the handler has returned, its Dishka scope has closed (the business commit)
and `@publisher` has sent its messages, and before FastStream acknowledges the message.  A duplicate does not reach the
handler: the middleware returns the result of the first run, so that `@publisher` sends messages that may be missing.

Messages that `@publisher` sends without an `event_id` header get one that is derived from the key of the message they
answer.  While the broker does not accept them, the middleware keeps retrying: the handler has succeeded and does not
run again.

After a failure the middleware pauses and rejects the message with a negative acknowledgment, so that it is
redelivered under every acknowledgment policy.  Messages that are given up are acknowledged once the `given_up` function
has accepted them; without that function they are redelivered and block their partition.  Subscribers with
`AckPolicy.ACK_FIRST`, FastStream's default for Kafka, are rejected because it acknowledges messages before they are
handled.  Subscribers without a `group_id` are not guarded: nothing is redelivered to them.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerClosed

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import OnInProgress
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import decode_result, encode_result, repeatable
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import Discarded, HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    IdempotencyError,
    InProgressError,
    InvalidKeyError,
    LeaseLostError,
    ResultDecodeError,
    ResultDroppedError,
    ServiceStoppedError,
    StoreError,
)
from integr8s_idem.events import derived_event_id
from integr8s_idem.failures import FailureRule
from integr8s_idem.integrations.kafka_loops import (
    End,
    KeyOf,
    by_header,
    by_position,
    end_of,
    note_discarded,
    pause_after,
    policy_of,
    stop_of,
)
from integr8s_idem.keys import EntryPoint, Key
from integr8s_idem.keys.fingerprints import fingerprint
from integr8s_idem.records import Completed, Pending, StoredResult
from integr8s_idem.telemetry.log_fields import SOURCE, CommonSource, LogSource, MessageSource

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, HandlerException, IgnoredException, NackMessage, StopConsume
    from faststream.kafka.subscriber.usecase import BatchSubscriber
    from faststream.message import StreamMessage
    from faststream.response import Response
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "faststream", error)) from error

__all__ = ["IdempotencyMiddleware", "SubscriberError", "by_header", "by_position"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

GivenUp = Callable[[Any, Exception], Awaitable[None]]
"""Called with a Kafka record that is given up, for example to send it to a dead-letter topic."""


@dataclass(frozen=True)
class _Settings:
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


class IdempotencyMiddleware:
    """Middleware that guards all subscribers of a broker."""

    def __init__(
        self,
        manager: IdempotencyManager,
        *,
        key: KeyOf = by_position,
        ttl: Duration | None = None,
        given_up: GivenUp | None = None,
        failures: Iterable[FailureRule] | None = None,
    ) -> None:
        """
        Args:
            manager: Guards the messages; its scope names the service.
            key: Returns the key of a record; see `by_header` and `by_position`.
            ttl: How long an outcome is kept, by the store's clock.  Choose it longer than the retention of the topic.
            given_up: Async function that accepts records which cannot be handled or have failed permanently; they are
                acknowledged afterwards.  Without it they are redelivered and block their partition.
            failures: Rules for errors of handlers, without pauses of their own, and before the default ones; see
                `integr8s_idem.failures`.  Without them, each error is retried, except `PermanentError`.  They do not
                apply to batches: subscribers with `batch=True` are rejected.

        Raises:
            ApplicationError: A rule has a pause of its own.
        """
        self._settings = _Settings(manager, key, duration(ttl, "ttl"), given_up, policy_of(failures))

    def __call__(self, msg: Any, /, *, context: Any) -> _Guard:
        return _Guard(self._settings, msg, context=context)

    def check(self, broker: Any) -> None:
        """Check all subscribers of a broker.  Call it at startup: `app.on_startup(lambda: guard.check(broker))`.

        Raises:
            SubscriberError: A subscriber acknowledges messages before they are handled, or manually; or it has no
                stable name, or the name of another subscriber of its group.
        """
        for subscriber in broker.subscribers:
            check_subscriber(subscriber, broker)
            if self._settings.policy is not None and has_group(subscriber) and isinstance(subscriber, BatchSubscriber):
                raise SubscriberError(_NO_BATCHES)


def key_of_message(group: str, subscriber: str, text: str) -> Key:
    """Return the key of a message for one subscriber; `text` identifies the message."""
    return Key.of_entry(EntryPoint.FASTSTREAM, group, subscriber, text, name=f"{subscriber} {text}")


class SubscriberError(ApplicationError, StopConsume):
    """A subscriber is configured in a way that would lose messages.  FastStream stops it."""


class SubscriberStoppedError(ServiceStoppedError, StopConsume):
    """A rule stops a subscriber because of an error of its handler.  FastStream stops it."""


_NO_BATCHES: Final = (
    "rules for errors (failures=) do not apply to batches, in which only one message may be the cause: give "
    "subscribers with batch=True a broker whose IdempotencyMiddleware has no rules"
)


_SAFE: Final = frozenset({AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR})


def has_group(subscriber: Any) -> bool:
    """Whether a subscriber has a `group_id`.  Without one no offsets are committed and nothing is redelivered."""
    return bool(getattr(subscriber, "group_id", None))


def check_subscriber(subscriber: Any, broker: Any) -> None:
    """Check that a subscriber can be guarded.  Subscribers without a group or without a function are ignored.

    Raises:
        SubscriberError: It may acknowledge a message before the record of the message is completed; or it has no
            stable name, or the name of another subscriber of its group.
    """
    if not has_group(subscriber) or not subscriber.calls:
        return
    check_ack_policy(subscriber)
    name, group = name_of(subscriber), subscriber.group_id
    if name is None:
        functions = ", ".join(call.name for call in subscriber.calls)
        raise SubscriberError(
            f"a subscriber in group {group} has no stable name for its keys: its functions are {functions}. {_TITLE}"
        )
    same_name = [other for other in broker.subscribers if other.group_id == group and name_of(other) == name]
    if len(same_name) > 1:
        raise SubscriberError(
            f"group {group} has {len(same_name)} subscribers named {name}; they would share keys and miss each other's "
            f"messages. {_TITLE}"
        )


_TITLE: Final = 'Give each subscriber its own title: @broker.subscriber(…, title="charge-orders")'


def check_ack_policy(subscriber: Any) -> None:
    """Check that a subscriber acknowledges messages only after they are handled."""
    policy = getattr(subscriber, "ack_policy", None)
    if policy not in _SAFE:
        shown = policy.name if isinstance(policy, AckPolicy) else repr(policy)
        raise SubscriberError(
            f"a subscriber with AckPolicy.{shown} acknowledges messages before they are handled, so a crash loses "
            "them: set ack_policy=AckPolicy.NACK_ON_ERROR"
        )


def name_of(subscriber: Any) -> str | None:
    """Return the name of a subscriber in keys: its title, or else the name of its only function."""
    title: str | None = subscriber.specification.config.title_
    names: list[str] = [call.name for call in subscriber.calls]
    own = names[0] if len(names) == 1 and names[0].isidentifier() else None
    return title or own


_SET_GIVEN_UP: Final = (
    "It is redelivered until it is accepted: pass IdempotencyMiddleware(given_up=…), an async function that, for "
    "example, sends such messages to a dead-letter topic."
)


class _Guard(BaseMiddleware[Any, Any]):
    """Guards one message or one batch."""

    def __init__(self, settings: _Settings, msg: Any, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._settings = settings
        self._manager = settings.manager
        self._subscriber: Any = context.get_local("handler_")
        self._runs: list[tuple[Run, Any]] = []
        """The open runs of this message, each with its Kafka record."""
        self._value: Any = None
        self._unit: Key | None = None
        """The key of a single message; the event ids of its published messages are derived from it."""
        self._published = 0
        self._is_guarded = False
        """Whether published messages answer a guarded message."""
        self._outer_source = SOURCE.get()
        self._message: StreamMessage[Any] | None = None
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
                logger.error("%s", _NO_BATCHES)
                await msg.nack()
                raise SubscriberError(_NO_BATCHES)
            return await self._consume_batch(call_next, msg)
        work = self._work_or_end(msg.raw_message)
        if isinstance(work, Work):
            self._unit = work.key
        ended = await self._or_redeliver(self._begin(work, msg.raw_message))
        await turn_of_the_loop()
        while ended is None and isinstance(work, Work) and self._runs[0][0].is_late():
            ended = await self._or_redeliver(self._begin_again(*self._runs[0]))
        if ended is not None and ended.is_discarded:
            raise AckMessage
        if ended is not None and isinstance(ended.done, Completed):
            return _replayed(ended.done)
        if ended is not None:
            await self._give_up(msg.raw_message, ended.error)
            await self._acknowledge()
        self._start()
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
            check_subscriber(self._subscriber, self.context.get_local("broker"))
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
        ends = await self._or_redeliver(self._begin_all([(works[index], records[index]) for index in indexes]))
        reserved = [index for index, end in zip(indexes, ends, strict=True) if end is None]
        self._start()
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
        return await self._work(call_next, rest)

    async def _begin_all(self, requests: Sequence[tuple[Work | End, Any]]) -> list[End | None]:
        """Call `_begin` for each.  If one raises, release all."""
        ends: dict[int, End | None] = {}
        late: list[Work] = []
        try:
            while pending := [index for index in range(len(requests)) if index not in ends]:
                await self._begin_pending(requests, pending, ends)
                await turn_of_the_loop()
                # While the last record was reserved, the lease of the first may have expired.
                for run, record in [each for each in self._runs if each[0].is_late()]:
                    self._runs.remove((run, record))
                    run.not_started()
                    late.append(run.work)
                    del ends[_index_of(record, requests)]
        except BaseException:
            for work in late:
                self._manager.executor.release_unstarted(work)
            await self._abandon()
            raise
        return [ends[index] for index in range(len(requests))]

    async def _begin_pending(
        self, requests: Sequence[tuple[Work | End, Any]], pending: Sequence[int], ends: dict[int, End | None]
    ) -> None:
        """Begin all at once; then those that are in progress elsewhere, each when the other run has ended.

        While a batch waits for a key, it holds only keys that sort before it, and releases the others: if each of two
        instances waited for a key of the other, both would wait until they time out.
        """
        begun = await asyncio.gather(*(self._try_to_begin(*requests[i]) for i in pending), return_exceptions=True)
        busy: dict[int, str] = {}
        for index, end in zip(pending, begun, strict=True):
            if isinstance(end, BaseException):
                raise end
            if isinstance(end, Pending):
                busy[index] = end.key
            else:
                ends[index] = end
        while busy:
            index = min(busy, key=busy.__getitem__)
            for run, record in self._runs_after(busy[index]):
                self._runs.remove((run, record))
                run.release()
                released = _index_of(record, requests)
                del ends[released]
                busy[released] = self._manager.space.full(run.work.key)
            del busy[index]
            ends[index] = await self._begin(*requests[index])

    def _runs_after(self, key: str) -> list[tuple[Run, Any]]:
        """Return the runs that hold a key that sorts after `key`."""
        return [each for each in self._runs if each[0].lease is not None and each[0].lease.reservation.key > key]

    def _start(self) -> None:
        """Start the timers of all open runs.  The caller must not await between the lease check and this call."""
        task = asyncio.current_task()
        assert task is not None, "FastStream handles messages in tasks"
        for run, _ in self._runs:
            run.start(task)

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

    async def _begin(self, work: Work | End, record: Any) -> End | None:
        """Reserve the key of a record.  Return `None` if this process has reserved it, otherwise how the work ended.

        Raises:
            InProgressError: Another run did not end within `wait_timeout`.
            StoreError: The store did not answer.
        """
        if isinstance(work, End):
            return work
        executor = self._manager.executor
        opened = await executor.open(work)
        if isinstance(opened, Pending):
            opened = await executor.settled(
                work,
                opened,
                partial(executor.open, work),
                on_in_progress=OnInProgress.WAIT,
                wait_timeout=self._manager.config.wait_timeout,
            )
        return self._hold(work, opened, record)

    async def _try_to_begin(self, work: Work | End, record: Any) -> End | Pending | None:
        """As `_begin`, without waiting for another run."""
        if isinstance(work, End):
            return work
        opened = await self._manager.executor.open(work)
        return opened if isinstance(opened, Pending) else self._hold(work, opened, record)

    def _hold(self, work: Work, opened: Run | Outcome[Any], record: Any) -> End | None:
        if not isinstance(opened, Run):
            return end_of(work, opened)
        self._runs.append((opened, record))
        return None

    async def _begin_again(self, run: Run, record: Any) -> End | None:
        """Reserve a key again after the lease of its run expired before the run was started."""
        self._runs.remove((run, record))
        run.not_started()
        try:
            return await self._begin(run.work, record)
        except BaseException:
            self._manager.executor.release_unstarted(run.work)
            raise

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Give each published message the same event id in every run, so that consumers detect duplicates."""
        if not self._is_guarded:
            return await call_next(cmd)
        # Messages of one batch share their headers, and must not share an id.
        if self._unit is not None and "event_id" not in cmd.headers and len(cmd.batch_bodies) == 1:
            cmd.headers["event_id"] = derived_event_id(self._manager.space.full(self._unit), self._published)
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
        with self._runs[0][0].within() if len(self._runs) == 1 else nullcontext():
            try:
                return _materialized(await call_next(msg), self._settings.names[self._subscriber])
            except asyncio.CancelledError:
                for run, _ in self._runs:
                    run.raise_if_lost()
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
            await self._finish(self._runs)
            if self._must_redeliver:
                await self._redeliver()
        elif isinstance(exc_val, Exception) and not _is_transient(exc_val):
            await self._fail(self._runs, exc_val)
        else:
            lost = [error for run, _ in self._runs if (error := _lost(run)) is not None]
            await self._abandon()
            if lost or isinstance(exc_val, Exception):
                # A cancellation by a run would end the subscriber if it propagated.
                logger.warning("%s: the message will be redelivered", lost[0] if lost else _text_of(exc_val))
                await self._redeliver()
        return False

    async def _finish(self, runs: Sequence[tuple[Run, Any]]) -> None:
        lost = _stop(runs)
        value = _stored(self._value) if len(runs) == 1 else None
        held = [run for run, _ in runs if run not in lost]
        unrecorded = [run.finish(value) for run in held] if len(held) == 1 else await self._finish_together(held)
        ends = [*lost.values(), *await _ends_of(unrecorded)]
        for end in ends:
            if isinstance(end, LeaseLostError | StoreError):
                logger.warning("%s", end)
            elif isinstance(end, BaseException):
                raise end
        if any(isinstance(end, BaseException) for end in ends):
            await self._redeliver()
        self._settings.failures.pop(self._subscriber, None)

    async def _finish_together(self, runs: Sequence[Run]) -> list[Coroutine[Any, Any, object]]:
        """Record the outcomes of a batch in one call, and return calls that record those that were not written.

        The rows of a batch may have been committed together: a crash must not leave some of its records incomplete.
        """
        returned = [run.returned(run.lease, None) for run in runs if run.lease is not None]
        try:
            written = await self._manager.executor.complete_together(returned)
        except StoreError:
            written = [False] * len(returned)
        return [each.run.complete(each) for each, is_written in zip(returned, written, strict=True) if not is_written]

    async def _fail(self, runs: Sequence[tuple[Run, Any]], error: Exception) -> None:
        lost = _stop(runs, error)
        held = [(run, record) for run, record in runs if run not in lost]
        ends = await _ends_of([run.fail(error) for run, _ in held])
        settled = 0
        for (run, record), end in zip(held, ends, strict=True):
            if isinstance(end, HandlerFailed) and end.given_up:
                settled += 1
                await self._give_up(record, error)
            elif isinstance(end, Discarded):
                settled += 1
                note_discarded(self._manager, run.work, run.work.handler, end)
            elif isinstance(end, HandlerFailed) and (stopped := stop_of(run.work, run.work.handler, end)) is not None:
                await self._stop_subscriber(stopped)
        if settled == len(runs):
            await self._acknowledge()
        logger.warning("%s: the message will be redelivered", _text_of(error))
        await self._redeliver()

    async def _stop_subscriber(self, stopped: ServiceStoppedError) -> NoReturn:
        """Stop the subscriber.  Its message is rejected, so that it is redelivered at the next start."""
        await self._abandon()
        logger.error("%s", stopped, exc_info=stopped.__cause__)
        assert self._message is not None, "a run belongs to a message"
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

    async def _abandon(self) -> None:
        """Release all open runs."""
        runs, self._runs = self._runs, []
        for run, _ in runs:
            run.release()

    async def _redeliver(self) -> NoReturn:
        """Reject the message after a pause, so that it is redelivered.  FastStream itself does not pause."""
        await self._abandon()
        failures = self._settings.failures.get(self._subscriber, 0) + 1
        self._settings.failures[self._subscriber] = failures
        await asyncio.sleep(pause_after(failures))
        raise NackMessage


def _index_of(record: Any, requests: Sequence[tuple[Work | End, Any]]) -> int:
    return next(index for index, (_, requested) in enumerate(requests) if requested is record)


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


def _stop(runs: Iterable[tuple[Run, Any]], error: Exception | None = None) -> dict[Run, LeaseLostError]:
    """Stop the timers of all runs, so that none of them cancels this task while it waits for their outcomes.

    Returns the runs whose lease had already expired.
    """
    lost = {}
    for run, _ in runs:
        try:
            run.stop(error)
        except LeaseLostError as expired:
            lost[run] = expired
    return lost


async def _ends_of(calls: Sequence[Coroutine[Any, Any, object]]) -> list[object]:
    """Await concurrent calls, and return their results or errors.  A single call needs no task of its own."""
    if len(calls) != 1:
        return await asyncio.gather(*calls, return_exceptions=True)
    try:
        return [await calls[0]]
    except Exception as error:  # noqa: BLE001  # returned to the caller
        return [error]


def _lost(run: Run) -> Exception | None:
    """Return the reason why a run cancelled its handler's task, or `None` if it did not."""
    try:
        run.raise_if_lost()
    except Exception as error:  # noqa: BLE001  # logged by the caller
        return error
    return None


def _materialized(value: Any, name: str | None) -> Any:
    """Read an iterator that a handler returned, or the body of its `Response`, before FastStream does."""
    if isinstance(value, Response):
        value.body = repeatable(value.body, f"{name}")
        return value
    return repeatable(value, f"{name}")


_RESPONSE: Final = "; response"


def _stored(value: Any) -> Any:
    """Convert a handler's result for the store.  Of a `Response`, the body and the headers are stored."""
    if not isinstance(value, Response):
        return value
    try:
        body, head = encode_result(value.body), encode_result(value.headers)
    except Exception:  # noqa: BLE001  # user-defined serializers may raise; the work is done, so drop the result
        return value
    return StoredResult(head.body + b"\n" + body.body, body.content_type + _RESPONSE)


def _replayed(done: Completed) -> Any:
    """Return the result of the first run, for FastStream to publish it again.

    Raises:
        AckMessage: The result was not stored or cannot be read.  No published message is missing, because a record
            is completed after its messages are sent.
    """
    result = done.result
    if result is None:
        if done.result_dropped:
            logger.warning("%s", ResultDroppedError(done.key))
        raise AckMessage
    kind, mark, _ = result.content_type.partition(_RESPONSE)
    try:
        if not mark:
            return decode_result(done.key, result)
        head, _, body = result.body.partition(b"\n")
        headers = decode_result(done.key, StoredResult(head))
        return Response(decode_result(done.key, StoredResult(body, kind)), headers=headers)
    except ResultDecodeError as error:
        logger.warning("%s", error)
        raise AckMessage from error
