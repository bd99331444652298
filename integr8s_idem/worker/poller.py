"""Fetch messages with one client, register them, and seek back after a failed poll.

Numbers such as R1 and A5 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker.assignments import Assignment, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.backpressure import Backpressure
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.fetch_order import POLL_RECORDS, POLL_SECONDS, FetchOrder
from integr8s_idem.worker.fetch_watchdog import FetchWatchdog
from integr8s_idem.worker.kafka_protocols import Consumer, Partition
from integr8s_idem.worker.partition_registry import PartitionRegistry
from integr8s_idem.worker.static_membership import StaticMembership, is_fenced

logger = logging.getLogger(__name__)

FEW: Final = 20
"""Messages that are not worth a poll while there is enough to do: polling takes as long as handling one or two."""

PAUSE_SECONDS: Final = 0.02
"""Maximum pause while there is enough to do: before a poll at the limit, if some partitions may have less than is kept
for them, and after a poll that returned few messages while more than half of a limit is in flight."""

SAME_FAILURES: Final = 3
"""Consecutive failures of polls after which the poller searches for a damaged partition."""

EMPTY_POLLS: Final = 15
"""Maximum polls of a damaged partition without messages: the client may wait for a response about other partitions."""

HOPELESS_FAILURES: Final = 10
"""Consecutive failures of polls, with errors that are not retriable, after which the client counts as broken."""

WATCH_SECONDS: Final = 5.0
"""Interval of the checks whether the client still fetches."""

POLL_BACKOFF: Final = Backoff(initial=0.2, longest=5.0)
"""Delays after a failed poll."""


class Poller:
    """Fetches with one client until it is cancelled or the client is broken."""

    def __init__(
        self,
        service: str,
        consumer: Consumer,
        partitions: PartitionRegistry,
        backpressure: Backpressure,
        watchdog: FetchWatchdog,
        observer: Observer,
        *,
        put: Callable[[Sequence[Delivery]], None],
        on_first_poll: Callable[[], None],
        is_ordered: bool,
        hold: Callable[[], bool],
        answer_seconds: float,
        longest_poll: float,
        is_static: bool = False,
    ) -> None:
        """
        Args:
            put: Called with the deliveries of one partition, in order.
            on_first_poll: Called after the first successful poll, before its deliveries are put.
            is_ordered: Whether deliveries of a partition wait for each other.
            hold: Whether to pause all partitions.
            answer_seconds: Timeout of a request to a broker.
            longest_poll: Maximum seconds of a poll, which waits for rebalances.
            is_static: Whether the client is a static member of its group.
        """
        self.consumer = consumer
        self.membership = StaticMembership(consumer) if is_static else None
        self.watchdog = watchdog
        self._service = service
        self._partitions = partitions
        self._backpressure = backpressure
        self._observer = observer
        self._put = put
        self._on_first_poll = on_first_poll
        self._full_seconds = PAUSE_SECONDS if is_ordered else POLL_SECONDS
        self._fetch_order = FetchOrder(consumer, partitions, backpressure, take=self._take, is_ordered=is_ordered)
        self._fetch = self._fetch_order.fetch
        self._hold = hold
        self._answer_seconds = answer_seconds
        self._longest_poll = longest_poll
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the client is to be replaced."""
        self.is_failure_temporary = False
        """Whether it is to be replaced because of a temporary error of the brokers, and may not be broken itself."""
        self._fetched: Collection[Partition] = ()
        """Partitions for which the last poll returned messages, or that were assigned during it."""
        self._positions_due = 0.0
        self.polled = False
        """Whether a poll has succeeded."""
        self.last_poll = time.monotonic()
        self.reason = ""
        """Why the last poll failed; empty if it succeeded."""

    def begin(self) -> None:
        """Start the timers when the client has joined the group."""
        self.last_poll = time.monotonic()
        self.watchdog.reset()

    async def poll(self) -> None:
        """Poll until cancelled.

        Raises:
            KafkaError: The group's offsets are out of range or missing, and an operator must choose new ones; or the
                client was fenced: see `static_membership.is_fenced`.
        """
        failures = 0
        while True:
            self._apply_pressure()
            if self._backpressure.full:
                # If all partitions are paused, a poll takes its maximum time even if there is room sooner.
                await self._backpressure.wait_for_room(self._full_seconds)
                self._apply_pressure()
            try:
                await self._note_positions()
                await self._note_starts()
                batches = await self._fetch_order.next_batches()
            except (NoOffsetForPartitionError, OffsetOutOfRangeError):
                raise
            except Exception as error:
                if self.membership is not None and is_fenced(error):
                    self.membership.fenced()
                    raise
                # Otherwise any error: a damaged batch raises those of its codec.
                failures += 1
                await self._failed(error, failures)
                continue
            failures, self.reason = 0, ""
            if not self.polled:
                self.polled = True
                self._on_first_poll()
            self.last_poll = time.monotonic()
            self._take(batches)
            assignments = self._partitions.assignments.items()
            self._fetched = {*batches, *(partition for partition, new in assignments if new.start is None)}
            if self._backpressure.is_above_half and 0 < sum(map(len, batches.values())) < FEW:
                await self._backpressure.wait_for_room(PAUSE_SECONDS)

    def _apply_pressure(self) -> None:
        self._backpressure.apply(self.consumer, self._partitions.assignments, hold=self._hold())

    async def watch(self) -> None:
        """Check periodically that the client still fetches (A5), until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            silent = time.monotonic() - self.last_poll
            if silent > self._longest_poll:
                self._give_up(f"no poll has finished for {silent:.0f} s")
            elif reason := await self.watchdog.diagnose(self.consumer, self._not_paused()):
                self._give_up(reason)

    def _not_paused(self) -> list[Partition]:
        return sorted(self._partitions.assignments.keys() - self._backpressure.paused)

    def _give_up(self, reason: str, *, is_temporary: bool = False) -> None:
        if not self.broken.done():
            self.is_failure_temporary = is_temporary
            self.broken.set_result(reason)

    # Failed polls.

    async def _failed(self, error: Exception, failures: int) -> None:
        self.last_poll = time.monotonic()
        self.watchdog.reset()
        self.reason = f"poll failed: {type(error).__name__}: {error}"
        logger.warning("%s: %s", self._service, self.reason)
        retriable = isinstance(error, KafkaError) and error.retriable
        if not self._rewind():
            self._give_up(f"{self.reason}; the start of a new partition was not known yet", is_temporary=retriable)
        elif not retriable and failures >= HOPELESS_FAILURES:
            self._give_up(self.reason)
        elif not retriable and failures >= SAME_FAILURES:
            await self._set_damaged_aside()
        await asyncio.sleep(POLL_BACKOFF.pause(failures))

    def _rewind(self) -> bool:
        """Seek to the next offsets: a failed `getmany` loses messages that it has already read from other partitions.

        Returns:
            Whether the next offsets of all partitions are known.  That of a partition that was assigned during the
            failed poll is not; a new client starts at the committed offset.
        """
        assigned = self.consumer.assignment()
        current = [each for each in self._partitions.assignments.values() if each.partition in assigned]
        for assignment in current:
            if (offset := assignment.next_offset) is not None:
                self.consumer.seek(assignment.partition, offset)
        unknown = [assignment for assignment in current if assignment.next_offset is None and not assignment.closed]
        for assignment in unknown:
            # Polling continues until the client is replaced: later messages must not overtake the lost ones.
            assignment.close()
        return not unknown

    async def _note_starts(self) -> None:
        """Read the start of new assignments, in order to seek back to it if a poll fails."""
        unknown = [a for a in self._partitions.assignments.values() if a.start is None and not a.closed]
        for assignment in unknown:
            try:
                assignment.start = await bounded(self.consumer.position(assignment.partition), self._answer_seconds)
            except (KafkaError, TimeoutError):
                continue  # not known yet, or revoked: tried again at the next poll

    async def _note_positions(self) -> None:
        """Note the client's positions, so that markers and aborted messages can be committed (R2).

        Only the polling task may do this, between two polls: during a poll, a position may be past records that are not
        registered yet.  Records of a closing assignment are never registered, so it is skipped.
        """
        now = asyncio.get_running_loop().time()
        if due := now >= self._positions_due:
            self._positions_due = now + POLL_SECONDS
        fetched, self._fetched = self._fetched, ()
        for partition, assignment in list(self._partitions.assignments.items()):
            if not (partition in fetched or (due and assignment.start is not None)):
                continue
            position = await self._position(assignment)
            if position is None or position <= (assignment.next_offset or 0):
                continue
            # The client also moves past a batch that it cannot read, and raises the error in a later poll: this one.
            self._take(await self._fetch(partition, most=1, seconds=0.0))
            if not self._backpressure.has_room:
                self._apply_pressure()  # the next polls must not exceed the limit
            if (position := await self._position(assignment)) is not None:
                assignment.progress.fetched_to(position, assignment.start or 0)

    async def _position(self, assignment: Assignment) -> int | None:
        """Return the client's position, or `None` if it is not available immediately."""
        if assignment.closed or assignment.damaged or assignment.partition not in self.consumer.assignment():
            return None
        try:
            async with asyncio.timeout(0):
                return await self.consumer.position(assignment.partition)
        except (KafkaError, TimeoutError):
            return None

    async def _set_damaged_aside(self) -> None:
        """Find and pause the partition of a batch that cannot be read, since it fails every poll (A9)."""
        for partition, assignment in list(self._partitions.assignments.items()):
            if assignment.damaged or assignment.closed or partition not in self.consumer.assignment():
                continue
            try:
                batches = await self._fetch(partition)
            except Exception as error:  # noqa: BLE001  # a damaged batch raises any error of its codec
                if type(error) is KafkaError:
                    return  # an error of the client, not of a message
                if await self._is_damaged(assignment):
                    self._set_aside(assignment, error)
            else:
                self._take(batches)
        self._rewind()

    async def _is_damaged(self, assignment: Assignment) -> bool:
        """Register the messages before the damage one at a time, since a larger poll returns none of them.

        Afterwards, the next offset of `assignment` is that of the damage.

        Returns:
            Whether there still is damage: data that was damaged in transit is intact when it is fetched again.
        """
        taken = empty = 0
        while taken < POLL_RECORDS and empty < EMPTY_POLLS and not assignment.closed:
            try:
                batches = await self._fetch(assignment.partition, most=1)
            except Exception:  # noqa: BLE001  # a damaged batch raises any error of its codec
                return True
            self._take(batches)
            taken += len(batches)
            empty += not batches
        return taken < POLL_RECORDS and not assignment.closed

    def _set_aside(self, assignment: Assignment, error: Exception) -> None:
        assignment.damaged = True
        self._observer.count(Signal.PARTITION_DAMAGED)
        with logging_with(assignment, offset=assignment.next_offset):
            logger.error(
                "%s: %s[%d] cannot be read from offset %s on and is paused; other partitions continue: %s",
                self._service,
                assignment.partition.topic,
                assignment.partition.partition,
                assignment.next_offset,
                f"{type(error).__name__}: {error}",
            )

    # Messages.

    def _take(self, batches: Mapping[Any, Sequence[Any]]) -> None:
        """Register messages before anything is awaited (R1)."""
        if batches:
            self.watchdog.reset(fetched=True)
        for partition, records in batches.items():
            assignment = self._partitions.assignments.get(partition)
            if assignment is None or assignment.closed or not records:
                continue  # revoked or closing: the messages will be redelivered
            if assignment.retry is not None:
                assignment.retry.log_end = self.consumer.highwater(partition) or 0
            expected = assignment.progress.next_offset
            if expected is not None and records[0].offset < expected:
                assignment = self._partitions.restart(assignment, records[0].offset)
            are_new = assignment.progress.deliver(*[record.offset for record in records])
            new = [Delivery(record, assignment) for record, is_new in zip(records, are_new, strict=True) if is_new]
            if new:
                self._put(new)
