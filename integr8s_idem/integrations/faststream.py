"""FastStream: subscribers of Kafka whose messages are handled once.  The only file that knows FastStream.

    broker = KafkaBroker(…, middlewares=[IdempotencyMiddleware(manager, key=by_header("event_id"))])

    @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    @broker.publisher("receipts")
    async def charge(order: Order) -> Receipt: ...

A record is completed after the handler, the scope that Dishka has opened for it (the business commit), and what
`@publisher` sends, and before FastStream acknowledges the message.  A duplicate does not reach the handler: what the
first run returned is returned again, so that `@publisher` sends again what may be missing.

What `@publisher` sends has a header `event_id`, derived from the key of the message that it answers, if it has none.
While the broker does not take it, it is sent again and again: the handler has succeeded, and is not run again for that.

A failure is answered by a pause and a negative acknowledgment, so that the message comes again, whatever the policy
does with errors.  What is given up is acknowledged once `given_up` has taken it; without one it comes again, too, and
holds up what lies behind it.  With `AckPolicy.ACK_FIRST`, which is FastStream's default for Kafka, messages are
acknowledged before they are handled: that is refused.  A subscriber without a `group_id` reads what comes while it
listens, in each process anew, and is left alone.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn

from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerClosed

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import OnInProgress
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import decode_result, encode_result, repeatable
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    IdempotencyError,
    InProgressError,
    InvalidKeyError,
    LeaseLostError,
    ResultDecodeError,
    ResultDroppedError,
    StoreError,
)
from integr8s_idem.events import derived_event_id
from integr8s_idem.integrations.kafka_loops import End, KeyOf, by_header, by_position, end_of, pause_after
from integr8s_idem.keys import EntryPoint, Key, fingerprint
from integr8s_idem.records import Completed, StoredResult

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, HandlerException, IgnoredException, NackMessage, StopConsume
    from faststream.message import StreamMessage
    from faststream.response import Response
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "faststream", error)) from error

__all__ = ["IdempotencyMiddleware", "SubscriberError", "by_header", "by_position"]

logger = logging.getLogger(__name__)

GivenUp = Callable[[Any, Exception], Awaitable[None]]
"""Takes a record of Kafka's that is given up, for example to a topic of dead letters."""


@dataclass(frozen=True)
class _Settings:
    """What all messages of a broker are guarded by."""

    manager: IdempotencyManager
    key: KeyOf
    ttl: timedelta | None
    given_up: GivenUp | None
    failures: dict[Any, int] = field(default_factory=dict)
    """In a row, by subscriber."""
    checked: set[Any] = field(default_factory=set)
    """Subscribers that can be guarded."""


class IdempotencyMiddleware:
    """Guards all subscribers of a broker."""

    def __init__(
        self,
        manager: IdempotencyManager,
        *,
        key: KeyOf = by_position,
        ttl: Duration | None = None,
        given_up: GivenUp | None = None,
    ) -> None:
        """
        Args:
            manager: Its scope names the service.
            key: Names the work of a record; see `by_header` and `by_position`.
            ttl: How long an outcome is remembered, by the store's clock; longer than the topic keeps messages.
            given_up: Takes records that cannot be done, or have failed for good; they are acknowledged then.  Without
                it they are not, and hold up what lies behind them.
        """
        self._settings = _Settings(manager, key, duration(ttl, "ttl"), given_up)

    def __call__(self, msg: Any, /, *, context: Any) -> _Guard:
        return _Guard(self._settings, msg, context=context)

    def check(self, broker: Any) -> None:
        """To be called before the broker starts: `app.on_startup(lambda: guard.check(broker))`.

        Raises:
            SubscriberError: A subscriber acknowledges messages before they are handled, or by itself; it has no name to
                make keys of, or that of another one of its group.
        """
        for subscriber in broker.subscribers:
            refuse(subscriber, broker)


def key_of_message(group: str, subscriber: str, text: str) -> Key:
    """The key of a message that is named by `text`, for one subscriber."""
    return Key.of_entry(EntryPoint.FASTSTREAM, group, subscriber, text, name=f"{subscriber} {text}")


class SubscriberError(ApplicationError, StopConsume):
    """A subscriber as it is would lose messages; it is stopped rather than let do so."""


_SAFE: Final = frozenset({AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR})


def in_a_group(subscriber: Any) -> bool:
    """Whether somebody remembers how far it is: without a `group_id` it reads what comes, and nothing comes again."""
    return bool(getattr(subscriber, "group_id", None))


def refuse(subscriber: Any, broker: Any) -> None:
    """Refuse a subscriber that cannot be guarded; one that reads in no group, or has no function, is left alone.

    Raises:
        SubscriberError: It acknowledges otherwise than after the record of its message is completed, it has no name to
            make keys of, or another one of its group has the same.
    """
    if not in_a_group(subscriber) or not subscriber.calls:
        return
    refuse_policy(subscriber)
    name, group = name_of(subscriber), subscriber.group_id
    if name is None:
        functions = ", ".join(call.name for call in subscriber.calls)
        raise SubscriberError(
            f"keys are made of a subscriber's name, and one of the group {group} has none that stays: its functions "
            f"are {functions}. {_TITLE}"
        )
    alike = [other for other in broker.subscribers if other.group_id == group and name_of(other) == name]
    if len(alike) > 1:
        raise SubscriberError(
            f"the group {group} has {len(alike)} subscribers named {name}, which would share their keys, and miss each "
            f"other's messages. {_TITLE}"
        )


_TITLE: Final = 'Give each a title of its own: @broker.subscriber(…, title="charge-orders")'


def refuse_policy(subscriber: Any) -> None:
    """As `refuse`, of the acknowledgment alone."""
    policy = getattr(subscriber, "ack_policy", None)
    if policy not in _SAFE:
        told = policy.name if isinstance(policy, AckPolicy) else repr(policy)
        raise SubscriberError(
            f"a subscriber with AckPolicy.{told} acknowledges messages that are not handled yet, and a crash loses "
            "them: write ack_policy=AckPolicy.NACK_ON_ERROR"
        )


def name_of(subscriber: Any) -> str | None:
    """What stands in the keys of a subscriber: its title, or its function's name, if it has one and has but one."""
    title: str | None = subscriber.specification.config.title_
    names: list[str] = [call.name for call in subscriber.calls]
    own = names[0] if len(names) == 1 and names[0].isidentifier() else None
    return title or own


_GIVE_A_TAKER: Final = (
    "It comes again until somebody takes it: give IdempotencyMiddleware given_up=, an async function that takes such "
    "messages, for instance to a topic of dead letters."
)


class _Guard(BaseMiddleware[Any, Any]):
    """One message, or one batch of them, on its way."""

    def __init__(self, settings: _Settings, msg: Any, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._settings = settings
        self._manager = settings.manager
        self._subscriber: Any = context.get_local("handler_")
        self._runs: list[tuple[Run, Any]] = []
        """What this message has begun, with its records."""
        self._value: Any = None
        self._unit = ""
        """The full key of its one unit of work, from which the ids of what it publishes are derived."""
        self._published = 0
        self._is_ours = False
        """Whether what is published answers a message of ours."""
        self._stays = False
        """Whether it is not to be acknowledged, whatever becomes of the rest of its batch."""

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        if not in_a_group(self._subscriber):
            return await call_next(msg)
        await self._refuse(msg)
        self._is_ours = True
        if isinstance(msg.raw_message, tuple | list):
            return await self._consume_batch(call_next, msg)
        work = self._asked_for(msg.raw_message)
        if isinstance(work, Work):
            self._unit = self._manager.space.full(work.key)
        ended = await self._begin(work, msg.raw_message)
        await turn_of_the_loop()
        while ended is None and isinstance(work, Work) and self._runs[0][0].is_late():
            ended = await self._begin_again(*self._runs[0])
        if ended is not None and isinstance(ended.done, Completed):
            return _replayed(ended.done)
        if ended is not None:
            await self._give_up(msg.raw_message, ended.error)
            await self._pass_by()
        self._start()
        self._value = await self._work(call_next, msg)
        return self._value

    async def _refuse(self, msg: StreamMessage[Any]) -> None:
        """Stop a subscriber that cannot be guarded; its message comes again, whatever its policy does with errors."""
        if self._subscriber in self._settings.checked:
            return
        try:
            refuse(self._subscriber, self.context.get_local("broker"))
        except SubscriberError as error:
            logger.error("%s", error)
            await msg.nack()
            raise
        self._settings.checked.add(self._subscriber)

    async def _consume_batch(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        """Those of a batch that are not done go on to the handler, each once."""
        records: Sequence[Any] = msg.raw_message
        works = [self._asked_for(record) for record in records]
        places = _places_of_different_work(works)
        ends = await self._begin_all([(works[at], records[at]) for at in places])
        ours = [at for at, end in zip(places, ends, strict=True) if end is None]
        self._start()
        for at, end in zip(places, ends, strict=True):
            if end is not None and end.error is not None:
                await self._give_up(records[at], end.error)
        if not ours:
            await self._pass_by()
        rest = copy.copy(msg)
        rest.raw_message = type(records)(records[index] for index in ours)  # type: ignore[call-arg]
        for name in ("body", "batch_headers"):
            parts: Sequence[Any] = getattr(msg, name)
            if len(parts) == len(records):
                setattr(rest, name, [parts[index] for index in ours])
        return await self._work(call_next, rest)

    async def _begin_all(self, asked: Sequence[tuple[Work | End, Any]]) -> list[End | None]:
        """As `_begin`, of each.  If one cannot be asked for, none is begun."""
        ends = await asyncio.gather(*(self._begin(*each) for each in asked), return_exceptions=True)
        begun = await self._ends_or_abandon(ends)
        await turn_of_the_loop()
        # While the last of them was reserved, the lease of the first may have run out.
        while late := [(run, record) for run, record in self._runs if run.is_late()]:
            places = [next(at for at, (_, asked_for) in enumerate(asked) if asked_for is record) for _, record in late]
            again = await asyncio.gather(
                *(self._begin_again(run, record) for run, record in late), return_exceptions=True
            )
            for at, end in zip(places, await self._ends_or_abandon(again), strict=True):
                begun[at] = end
        return begun

    def _start(self) -> None:
        """Begin the time of what is ours to do.  Nothing may be awaited since it was found not to be late."""
        task = asyncio.current_task()
        assert task is not None, "FastStream handles messages in tasks"
        for run, _ in self._runs:
            run.start(task)

    async def _ends_or_abandon(self, ends: Sequence[End | BaseException | None]) -> list[End | None]:
        for end in ends:
            if isinstance(end, BaseException):
                await self._abandon()
                raise end
        return [end for end in ends if not isinstance(end, BaseException)]

    def _asked_for(self, record: Any) -> Work | End:
        """The work of a record, made once for all that is done with it; or its end, if it has no key."""
        try:
            return self._work_of(record)
        except InvalidKeyError as error:
            return End(True, error=error)

    async def _begin(self, work: Work | End, record: Any) -> End | None:
        """`None`: it is ours to do.  Otherwise how it has ended."""
        if isinstance(work, End):
            return work
        executor = self._manager.executor
        try:
            opened: Run | Outcome[Any] = await executor.await_outcome(
                work,
                partial(executor.open, work),
                on_in_progress=OnInProgress.WAIT,
                wait_timeout=self._manager.config.wait_timeout,
            )
        except (InProgressError, StoreError) as error:
            logger.warning("%s", error)
            await self._again()
        if not isinstance(opened, Run):
            return end_of(work, opened)
        self._runs.append((opened, record))
        return None

    async def _begin_again(self, run: Run, record: Any) -> End | None:
        """As `_begin`, for a run that was not started and whose lease is late."""
        self._runs.remove((run, record))
        run.not_started()
        try:
            return await self._begin(run.work, record)
        except BaseException:
            run.release()  # it may be ours still: the message must not wait for the end of its lease
            raise

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
        """Name what is sent: the same at every run and replay, so that the next service knows it again."""
        if not self._is_ours:
            return await call_next(cmd)
        # Messages of one batch share their headers, and must not share an id.
        if self._unit and "event_id" not in cmd.headers and len(cmd.batch_bodies) == 1:
            cmd.headers["event_id"] = derived_event_id(self._unit, self._published)
        self._published += 1
        failures = 0
        while True:
            try:
                return await call_next(cmd)
            except KafkaError as error:
                if not _is_the_brokers(error):
                    raise
                logger.warning("%s does not take what is published: %r", cmd.destination, error)
            failures += 1
            await asyncio.sleep(pause_after(failures))

    def _work_of(self, record: Any) -> Work:
        # The topic is no part of the key: what a subscriber reads again from a topic for retries is the same work.
        group, name, told = self._subscriber.group_id, name_of(self._subscriber), self._settings.key(record)
        assert name is not None, "it was refused"
        key = key_of_message(group, name, told)
        ttl = None if self._settings.ttl is None else self._manager.checked_ttl(self._settings.ttl)
        return Work(self._manager.space.key(key), fingerprint(record.value or b""), ttl)

    async def _work(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        with self._runs[0][0].within() if len(self._runs) == 1 else nullcontext():
            try:
                return _repeatable(await call_next(msg), name_of(self._subscriber))
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
        """Settle, once the handler's scope is closed and what it publishes is out."""
        if not self._runs:
            if self._is_ours and isinstance(exc_val, Exception) and not isinstance(exc_val, IgnoredException):
                # Out of the user's function that makes keys, or of FastStream's code around ours.
                logger.error("%s: it comes again", _said(exc_val))
                await self._again()
            return False
        if exc_val is None or isinstance(exc_val, AckMessage):
            await self._finish(self._runs)
            if self._stays:
                await self._again()
        elif isinstance(exc_val, Exception) and not _is_the_brokers(exc_val):
            await self._fail(self._runs, exc_val)
        else:
            lost = [error for run, _ in self._runs if (error := _lost(run)) is not None]
            await self._abandon()
            if lost or isinstance(exc_val, Exception):
                # Were it let go on, a cancellation of ours would end the subscriber.
                logger.warning("%s: it comes again", lost[0] if lost else _said(exc_val))
                await self._again()
        return False

    async def _finish(self, runs: Sequence[tuple[Run, Any]]) -> None:
        lost = _stop(runs)
        value = _stored(self._value) if len(runs) == 1 else None
        standing = (run for run, _ in runs if run not in lost)
        ends = [*lost.values(), *await asyncio.gather(*(run.finish(value) for run in standing), return_exceptions=True)]
        for end in ends:
            if isinstance(end, LeaseLostError | StoreError):
                logger.warning("%s", end)
            elif isinstance(end, BaseException):
                raise end
        if any(isinstance(end, BaseException) for end in ends):
            await self._again()
        self._settings.failures.pop(self._subscriber, None)

    async def _fail(self, runs: Sequence[tuple[Run, Any]], error: Exception) -> None:
        lost = _stop(runs, error)
        standing = [(run, record) for run, record in runs if run not in lost]
        ends = await asyncio.gather(*(run.fail(error) for run, _ in standing), return_exceptions=True)
        given_up = 0
        for (_, record), end in zip(standing, ends, strict=True):
            if isinstance(end, HandlerFailed) and end.given_up:
                given_up += 1
                await self._give_up(record, error)
        if given_up == len(runs):
            await self._pass_by()
        logger.warning("%s: it comes again", _said(error))
        await self._again()

    async def _give_up(self, record: Any, error: Exception | None) -> None:
        """Hand over what cannot be done.  What nobody takes stays."""
        assert error is not None, "what is not done has ended by an error"
        place = by_position(record)
        if self._settings.given_up is None:
            self._stays = True
            logger.error("%s holds up what lies behind it: %s %s", place, _said(error), _GIVE_A_TAKER)
            return
        logger.error("%s is given up: %s", place, _said(error))
        try:
            await self._settings.given_up(record, error)
        except Exception as failure:  # noqa: BLE001  # told, and tried again
            self._stays = True
            logger.error("%s holds up what lies behind it: given_up has failed: %s", place, _said(failure))

    async def _pass_by(self) -> NoReturn:
        """There is nothing to do: acknowledge the message, unless it stays."""
        if self._stays:
            await self._again()
        raise AckMessage

    async def _abandon(self) -> None:
        """Give back what is begun."""
        runs, self._runs = self._runs, []
        for run, _ in runs:
            run.release()

    async def _again(self) -> NoReturn:
        """Have the message come again, after a pause: FastStream itself makes none."""
        await self._abandon()
        failures = self._settings.failures.get(self._subscriber, 0) + 1
        self._settings.failures[self._subscriber] = failures
        await asyncio.sleep(pause_after(failures))
        raise NackMessage


def _places_of_different_work(works: Sequence[Work | End]) -> list[int]:
    """Copies in one batch are settled with the first: to ask for them as well would be to wait for ourselves."""
    first: dict[Any, int] = {}
    for at, work in enumerate(works):
        # Nobody knows what one without a key is a copy of.
        first.setdefault((work.key, work.fingerprint) if isinstance(work, Work) else at, at)
    return list(first.values())


def _said(error: BaseException) -> str:
    """What `error` is: our own, and FastStream's, say it in a sentence."""
    ours = isinstance(error, IdempotencyError | HandlerException)
    return (str(error) if ours else "") or repr(error)


def _is_the_brokers(error: BaseException) -> bool:
    """Whether another try may go well, whatever the handler does: no run has failed by it."""
    return isinstance(error, KafkaError) and not isinstance(error, MessageSizeTooLargeError | ProducerClosed)


def _stop(runs: Iterable[tuple[Run, Any]], error: Exception | None = None) -> dict[Run, LeaseLostError]:
    """End the time of all runs, at once: none of them cancels this task while it waits for their outcomes.

    Returns those whose lease had ended before.
    """
    lost = {}
    for run, _ in runs:
        try:
            run.stop(error)
        except LeaseLostError as ended:
            lost[run] = ended
    return lost


def _lost(run: Run) -> Exception | None:
    """Why a run has cancelled its handler's task, if it has."""
    try:
        run.raise_if_lost()
    except Exception as error:  # noqa: BLE001  # to be told
        return error
    return None


def _repeatable(value: Any, name: str | None) -> Any:
    """Read an iterator that a handler returned, before FastStream does; of a `Response`, its body."""
    if isinstance(value, Response):
        value.body = repeatable(value.body, f"{name}")
        return value
    return repeatable(value, f"{name}")


_RESPONSE: Final = "; response"


def _stored(value: Any) -> Any:
    """A result as it is kept; of a `Response` its body and its headers."""
    if not isinstance(value, Response):
        return value
    try:
        body, head = encode_result(value.body), encode_result(value.headers)
    except Exception:  # noqa: BLE001  # a serializer is the user's code; the work is done, and its result is dropped
        return value
    return StoredResult(head.body + b"\n" + body.body, body.content_type + _RESPONSE)


def _replayed(done: Completed) -> Any:
    """What the first run has returned, for FastStream to publish it again.

    Raises:
        AckMessage: It was not kept, or cannot be read.  Nothing is missing: a record is completed behind its messages.
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
