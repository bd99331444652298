"""aiokafka consumer loops that process each record once.

consumer = AIOKafkaConsumer("orders", group_id="billing", enable_auto_commit=False)
await consumer.start()
async with contextlib.aclosing(guarded(consumer, manager, key=by_header("event_id"))) as deliveries:
    async for delivery in deliveries:
        await delivery.run(charge)          # calls charge(record) once per key, across restarts

Closing the generator commits the processed records.  Otherwise they are redelivered and recognized as duplicates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

from aiokafka import AIOKafkaConsumer, ConsumerRecord

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, InvalidKeyError, ServiceStoppedError
from integr8s_idem.failures import FailureRule
from integr8s_idem.functions.sync_bridge import named
from integr8s_idem.integrations.aiokafka_offsets import Offsets
from integr8s_idem.integrations.kafka_loops import (
    COMMIT_INTERVAL,
    KeyOf,
    by_header,
    by_position,
    end_of,
    note_discarded,
    pause_after,
    policy_of,
    require_async,
    require_awaitable,
    stop_of,
    value_of,
    work_of,
)
from integr8s_idem.records import Pending
from integr8s_idem.telemetry.log_fields import MessageSource, logging_as

__all__ = ["Delivery", "by_header", "by_position", "guarded"]

T = TypeVar("T")

GivenUp = Callable[[ConsumerRecord[Any, Any], Exception], Awaitable[None]]
"""Called with a record that is given up, for example to send it to a dead-letter topic."""

_POLL: float = 0.5
_WAIT_POLL: float = 0.1
"""Poll timeouts in seconds: normally, and while another worker is processing a record."""


async def guarded(
    consumer: AIOKafkaConsumer,
    manager: IdempotencyManager,
    *,
    key: KeyOf = by_position,
    ttl: Duration | None = None,
    given_up: GivenUp | None = None,
    failures: Iterable[FailureRule] | None = None,
    commit_interval: Duration = COMMIT_INTERVAL,
) -> AsyncGenerator[Delivery, None]:
    """Iterate over the records of a started consumer, one at a time; call `delivery.run` for each.

    Args:
        key: Returns the key of a record; see `by_header` and `by_position`.
        ttl: How long an outcome is kept, by the store's clock.  Choose it longer than the retention of the topic.
        given_up: Async function that accepts records whose work has failed permanently; they are committed afterwards.
            Without it `run` raises, and they are not committed.
        failures: Rules for errors of the function, without pauses of their own, and before the default ones; see
            `integr8s_idem.failures`.  Without them, each error is retried, except `PermanentError`.
        commit_interval: How often offsets are committed, by this process's clock.  Avoid values well below a second:
            a commit during a rebalance makes aiokafka rejoin the group.

    Raises:
        ApplicationError: The consumer is not started or has auto-commit enabled, a delivery was neither run nor
            skipped, or a rule has a pause of its own.
        ServiceStoppedError: A rule stops the loop; the record is not committed.
        KafkaError: Raised by `AIOKafkaConsumer.getmany`.
    """
    if getattr(consumer, "_enable_auto_commit", False):
        raise ApplicationError(
            "the consumer has auto-commit enabled, which also commits records that are not processed: "
            "create it with AIOKafkaConsumer(enable_auto_commit=False)"
        )
    if getattr(consumer, "_coordinator", True) is None:  # created by `start`
        raise ApplicationError("the consumer is not started: call `await consumer.start()` before the loop")
    checked_ttl = None if ttl is None else manager.checked_ttl(ttl)
    policy = policy_of(failures)
    offsets = Offsets(consumer, duration(commit_interval, "commit_interval").total_seconds())
    failed = 0
    try:
        await offsets.open()
        while True:
            fetched = await consumer.getmany(timeout_ms=int(_POLL * 1000))
            offsets.note_fetched(fetched)
            for partition, records in fetched.items():
                for record in records:
                    if partition not in consumer.assignment():
                        break  # the partition was revoked; its next owner processes the record
                    delivery = Delivery(consumer, manager, record, key, checked_ttl, given_up, policy)
                    offsets.begin(partition, delivery)
                    yield delivery
                    offsets.end()
                    if not delivery.settled:
                        failed += 1
                        offsets.seek_back(partition)
                        _check_was_run(delivery)
                        if delivery.stopped is not None:
                            raise delivery.stopped
                        await asyncio.sleep(pause_after(failed))
                        break
                    failed = 0
                    await offsets.commit_if_due()
                offsets.forget(partition)
            await offsets.note_positions()
            await offsets.commit_if_due()
    finally:  # the caller may leave the loop by `break` or an error
        await offsets.close()


def _check_was_run(delivery: Delivery) -> None:
    if not delivery.was_run:
        raise ApplicationError(
            f"{by_position(delivery.record)} was neither run nor skipped: write `await delivery.run(function)`, or "
            "`delivery.skip()` if there is nothing to do"
        )


class Delivery:
    """One record, to be processed once."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        manager: IdempotencyManager,
        record: ConsumerRecord[Any, Any],
        key: KeyOf,
        ttl: timedelta | None,
        given_up: GivenUp | None,
        failures: FailurePolicy | None = None,
    ) -> None:
        self.record = record
        self.settled = False
        """Whether the record may be committed."""
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

    def skip(self) -> None:
        """Mark the record as processed without running a function."""
        self.settled = True

    async def run(self, function: Callable[[ConsumerRecord[Any, Any]], Awaitable[T]]) -> T:
        """Call `function` with the record, or return the stored result if it was processed before.

        Raises:
            ApplicationError: `function` is not async.
            InvalidKeyError: No key can be made from the record.
            PreviouslyFailedError, KeyReusedError, CorruptRecordError: The record cannot be processed, and there is no
                `given_up` function.
            ResultDroppedError, ResultDecodeError: The record was processed, but the result of that run is not
                available.
            ServiceStoppedError: A rule stops the loop, which ends with this error.
            LeaseLostError: The lease expired; another worker may process the record now.
            StoreError: The store did not answer; the record is fetched again.
            Exception: Any error of `function`, unchanged; the record is fetched again.
        """
        self.was_run = True
        require_async(function)
        with logging_as(MessageSource(self._manager.scope, self.record, named(function))):
            return await self._run(function)

    async def _run(self, function: Callable[[ConsumerRecord[Any, Any]], Awaitable[T]]) -> T:
        try:
            work = work_of(self._manager, self.record, self._key, self._ttl, function, self._failures)
        except InvalidKeyError as error:
            await self._failed(error, final=True)
            return cast("T", None)

        async def call(attempt: Attempt) -> T:
            self.attempt = attempt
            awaitable = function(self.record)
            require_awaitable(awaitable, function)
            return await awaitable

        while isinstance(outcome := await self._manager.execute(work, call), Pending):
            await self._wait()
        self.stopped = stop_of(work, named(function), outcome)
        if self.stopped is not None:
            raise self.stopped
        end = end_of(work, outcome)
        if end.is_discarded:
            note_discarded(self._manager, work, named(function), outcome)
            self.settled = True
            return cast("T", None)
        if end.error is not None:
            await self._failed(end.error, final=end.settled)
            return cast("T", None)
        self.settled = True
        return cast("T", value_of(end, work, function))

    async def _failed(self, error: Exception, *, final: bool) -> None:
        if not final or self._given_up is None:
            raise error
        await self._given_up(self.record, error)
        self.settled = True

    async def _wait(self) -> None:
        """Wait briefly, polling with all partitions paused to stay in the consumer group."""
        paused = self._consumer.assignment() - self._consumer.paused()
        self._consumer.pause(*paused)
        try:
            fetched: dict[Any, Any] = await self._consumer.getmany(timeout_ms=int(_WAIT_POLL * 1000))
            for partition, records in fetched.items():
                # A rebalance clears pauses, so records may have been fetched: fetch them again later.
                self._consumer.seek(partition, records[0].offset)
        finally:  # a cancellation leaves the loop, which may be entered again
            self._consumer.resume(*(partition for partition in paused if partition in self._consumer.assignment()))
