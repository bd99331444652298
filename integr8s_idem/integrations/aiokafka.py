"""Plain aiokafka loops, each record done once.

consumer = AIOKafkaConsumer("orders", group_id="billing", enable_auto_commit=False)
await consumer.start()
async with contextlib.aclosing(guarded(consumer, manager, key=by_header("event_id"))) as deliveries:
    async for delivery in deliveries:
        await delivery.run(charge)          # charge(record), once per key, over all restarts

Closing commits what is done; without it, that comes again and is found done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager, replayed_value
from integr8s_idem.engine.work import Attempt, Executed
from integr8s_idem.errors import ApplicationError, InvalidKeyError
from integr8s_idem.integrations.kafka_loops import (
    COMMIT_INTERVAL,
    KeyOf,
    by_header,
    by_position,
    end_of,
    pause_after,
    refuse_plain,
    refuse_value,
    work_of,
)
from integr8s_idem.records import InProgress

__all__ = ["Delivery", "by_header", "by_position", "guarded"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

GivenUp = Callable[[ConsumerRecord[Any, Any], Exception], Awaitable[None]]
"""Takes a record that is given up, for example to a topic of dead letters."""

_POLL: float = 0.5
_LOOK: float = 0.1
"""Seconds of one poll, and of one look at a record that somebody else works on."""


async def guarded(
    consumer: AIOKafkaConsumer,
    manager: IdempotencyManager,
    *,
    key: KeyOf = by_position,
    ttl: Duration | None = None,
    given_up: GivenUp | None = None,
    commit_interval: Duration = COMMIT_INTERVAL,
) -> AsyncGenerator[Delivery, None]:
    """The records of a consumer that was started, one after the other, each to be done by `delivery.run`.

    Args:
        key: Names the work of a record; see `by_header` and `by_position`.
        ttl: How long an outcome is remembered, by the store's clock; longer than the topic keeps records.
        given_up: Takes records whose work has failed for good; they are committed then.  Without it `run` raises, and
            they are not.
        commit_interval: How often offsets are committed, by this process's clock.  Not much below a second: a commit
            in the midst of a rebalance makes aiokafka join anew.

    Raises:
        ApplicationError: The consumer commits by itself, or a delivery was neither run nor skipped.
        KafkaError: As `AIOKafkaConsumer.getmany`.
    """
    if getattr(consumer, "_enable_auto_commit", False):
        raise ApplicationError(
            "the consumer commits by itself, records that are not done included: "
            "make it by AIOKafkaConsumer(enable_auto_commit=False)"
        )
    kept = None if ttl is None else manager.checked_ttl(ttl)
    behind = _Behind(consumer, duration(commit_interval, "commit_interval").total_seconds())
    failures = 0
    try:
        while True:
            fetched = await consumer.getmany(timeout_ms=int(_POLL * 1000))
            for partition, records in fetched.items():
                for record in records:
                    if partition not in consumer.assignment():
                        break  # its next owner does it
                    delivery = Delivery(consumer, manager, record, key, kept, given_up)
                    try:
                        yield delivery
                    finally:  # the loop may be left with it
                        if delivery.settled:
                            behind.settled[partition] = record.offset + 1
                    if not delivery.settled:
                        failures += 1
                        _go_back(consumer, partition, delivery)
                        await asyncio.sleep(pause_after(failures))
                        break
                    failures = 0
                    await behind.commit_if_due()
            await behind.note_positions()
            await behind.commit_if_due()
    finally:
        await behind.commit()


def _go_back(consumer: AIOKafkaConsumer, partition: TopicPartition, delivery: Delivery) -> None:
    if not delivery.was_run:
        raise ApplicationError(
            f"{by_position(delivery.record)} was neither run nor skipped: write `await delivery.run(function)`, or "
            "`delivery.skip()` if there is nothing to do"
        )
    if partition in consumer.assignment():
        consumer.seek(partition, delivery.record.offset)


class _Behind:
    """Commits what is settled."""

    def __init__(self, consumer: AIOKafkaConsumer, interval: float) -> None:
        self._consumer = consumer
        self._interval = interval
        self._due = self._positions_due = asyncio.get_running_loop().time() + interval
        self._committed: dict[TopicPartition, int] = {}
        self.settled: dict[TopicPartition, int] = {}

    async def note_positions(self) -> None:
        """Settle markers and aborted messages as well: they move the position of the consumer without a record.

        Only for the end of a pass over what was fetched: each record is settled then, or the position is back at it.
        """
        now = asyncio.get_running_loop().time()
        if now < self._positions_due:
            return
        self._positions_due = now + self._interval
        for partition in self._consumer.assignment():
            if await self._position(partition) <= max(
                self.settled.get(partition, 0), self._committed.get(partition, 0)
            ):
                continue
            # The client also moves on past a batch that it cannot take, and says so in a later poll: this one.
            fetched = await self._consumer.getmany(partition, timeout_ms=0, max_records=1)
            if records := fetched.get(partition):
                self._consumer.seek(partition, records[0].offset)
            if position := await self._position(partition):
                self.settled[partition] = position

    async def _position(self, partition: TopicPartition) -> int:
        """Where the consumer goes on; 0 if that is not known at once."""
        try:
            async with asyncio.timeout(0):
                return int(await self._consumer.position(partition))
        except (KafkaError, TimeoutError):
            return 0

    async def commit_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._due:
            self._due = now + self._interval
            await self.commit()

    async def commit(self) -> None:
        ours = self._consumer.assignment()
        offsets = {partition: offset for partition, offset in self.settled.items() if partition in ours}
        self.settled.clear()
        if not offsets:
            return
        try:
            await self._consumer.commit(offsets)
        except KafkaError as error:
            # They come again, to us or to the next owner, and are found done.
            logger.warning("offsets were not committed: %s", error)
        else:
            self._committed.update(offsets)


class Delivery:
    """One record, to be done once."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        manager: IdempotencyManager,
        record: ConsumerRecord[Any, Any],
        key: KeyOf,
        ttl: timedelta | None,
        given_up: GivenUp | None,
    ) -> None:
        self.record = record
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

    async def run(self, function: Callable[[ConsumerRecord[Any, Any]], Awaitable[T]]) -> T:
        """Have `function` do it, unless it is done; then give what the first run has returned.

        Raises:
            ApplicationError: `function` is a plain one.
            InvalidKeyError: The record offers nothing to make a key of.
            PreviouslyFailedError, KeyReusedError, CorruptRecordError: It cannot be done, and nobody takes those that
                are given up.
            ResultDroppedError, ResultDecodeError: It is done, and what the first run returned cannot be given.
            LeaseLostError: It took too long; somebody else does it now.
            StoreError: The store gave no answer; it is fetched again.
            Exception: Whatever `function` raises, unchanged; it is fetched again.
        """
        self.was_run = True
        refuse_plain(function)
        try:
            work = work_of(self._manager, self.record, self._key, self._ttl, function)
        except InvalidKeyError as error:
            await self._failed(error, final=True)
            return cast("T", None)

        async def call(attempt: Attempt) -> T:
            self.attempt = attempt
            doing = function(self.record)
            refuse_value(doing, function)
            return await doing

        while isinstance(outcome := await self._manager.execute(work, call), InProgress):
            await self._wait()
        end = end_of(work, outcome)
        if end.error is not None:
            await self._failed(end.error, final=end.settled)
            return cast("T", None)
        self.settled = True
        if isinstance(end.done, Executed):
            return cast("T", end.done.value)
        assert end.done is not None
        return cast("T", replayed_value(work.key.label, end.done, function))

    async def _failed(self, error: Exception, *, final: bool) -> None:
        if not final or self._given_up is None:
            raise error
        await self._given_up(self.record, error)
        self.settled = True

    async def _wait(self) -> None:
        """Wait a moment, and stay in the group by polling meanwhile."""
        ours = self._consumer.assignment() - self._consumer.paused()
        self._consumer.pause(*ours)
        fetched: dict[Any, Any] = await self._consumer.getmany(timeout_ms=int(_LOOK * 1000))
        for partition, records in fetched.items():
            # A rebalance clears pauses: what has come by that is to come again.
            self._consumer.seek(partition, records[0].offset)
        self._consumer.resume(*(partition for partition in ours if partition in self._consumer.assignment()))
