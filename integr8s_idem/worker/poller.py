"""Fetching with one client: poll on whatever happens, note what comes, go back when a poll fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.assignments import Assignment, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.backpressure import Backpressure
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.fetch_watchdog import FetchWatchdog
from integr8s_idem.worker.kafka_protocols import Consumer, Partition
from integr8s_idem.worker.partition_registry import PartitionRegistry

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.2
"""Longest wait of one poll; also how late a stop is noticed."""

POLL_RECORDS: Final = 500
"""Most messages of one poll."""

SAME_FAILURES: Final = 3
"""Polls that fail in a row before a damaged partition is looked for."""

EMPTY_POLLS: Final = 15
"""Polls of a damaged partition that bring nothing: the client may be waiting for an answer about other partitions."""

HOPELESS_FAILURES: Final = 10
"""Polls that fail in a row, for a reason that does not pass, before the client itself is taken for broken."""

WATCH_SECONDS: Final = 5.0
"""Pause between two looks at whether the client still fetches."""

POLL_BACKOFF: Final = Backoff(initial=0.2, longest=5.0)
"""Pauses after a poll that failed."""


class Poller:
    """Fetches with one client until it is cancelled, or gives the client up."""

    def __init__(
        self,
        service: str,
        consumer: Consumer,
        holdings: PartitionRegistry,
        pressure: Backpressure,
        watch: FetchWatchdog,
        observer: Observer,
        *,
        put: Callable[[Delivery], None],
        hold: Callable[[], bool],
        answer_seconds: float,
        longest_poll: float,
    ) -> None:
        """
        Args:
            put: Takes what has come.
            hold: Whether nothing is to be fetched now.
            answer_seconds: Longest wait for one answer of a broker.
            longest_poll: Seconds that a poll may take: a rebalance holds it up.
        """
        self.consumer = consumer
        self.watch = watch
        self._service = service
        self._partitions = holdings
        self._backpressure = pressure
        self._observer = observer
        self._put = put
        self._hold = hold
        self._answer_seconds = answer_seconds
        self._longest_poll = longest_poll
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once another client is to take the place of this one."""
        self._fetched: Collection[Partition] = ()
        """Partitions of which the last poll has brought something, or that were assigned while it was under way."""
        self._positions_due = 0.0
        self.polled = False
        """Whether a poll has gone well."""
        self.last_poll = time.monotonic()
        self.reason = ""
        """Why the last poll failed, if it did."""

    def begin(self) -> None:
        """The client has joined: silence counts from now on."""
        self.last_poll = time.monotonic()
        self.watch.stir()

    async def poll(self) -> None:
        """Poll without end.

        Raises:
            KafkaError: The group's offsets are gone: where to go on is for people to say, not for us to guess.
        """
        failures = 0
        while True:
            self._apply_pressure()
            if self._backpressure.full:
                # A poll of partitions that all rest would last its full time, though there is room again soon.
                await self._backpressure.ease(POLL_SECONDS)
                self._apply_pressure()
            try:
                await self._note_positions()
                await self._note_starts()
                batches = await self._fetch(most=min(POLL_RECORDS, self._backpressure.room))
            except (NoOffsetForPartitionError, OffsetOutOfRangeError):
                raise
            except Exception as error:  # noqa: BLE001  # a damaged batch raises what its codec likes
                failures += 1
                await self._failed(error, failures)
                continue
            failures, self.reason, self.polled = 0, "", True
            self.last_poll = time.monotonic()
            self._take(batches)
            held = self._partitions.assignments.items()
            self._fetched = {*batches, *(partition for partition, assignment in held if assignment.start is None)}

    def _apply_pressure(self) -> None:
        self._backpressure.apply(self.consumer, self._partitions.assignments, hold=self._hold())

    async def look(self) -> None:
        """Notice a client that fetches no more (A5), until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            silent = time.monotonic() - self.last_poll
            if silent > self._longest_poll:
                self._give_up(f"no poll has ended for {silent:.0f} s")
            elif reason := await self.watch.doubt(self.consumer, self._awake()):
                self._give_up(reason)

    def _awake(self) -> list[Partition]:
        return sorted(self._partitions.assignments.keys() - self._backpressure.resting)

    async def _fetch(
        self, *only: Partition, most: int = POLL_RECORDS, seconds: float = POLL_SECONDS
    ) -> Mapping[Any, Sequence[Any]]:
        return await self.consumer.getmany(*only, timeout_ms=int(seconds * 1000), max_records=most)

    def _give_up(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)

    # When a poll has failed.

    async def _failed(self, error: Exception, failures: int) -> None:
        self.last_poll = time.monotonic()
        self.watch.stir()
        self.reason = f"poll failed: {type(error).__name__}: {error}"
        logger.warning("%s: %s", self._service, self.reason)
        passing = isinstance(error, KafkaError) and error.retriable
        if not self._rewind():
            self._give_up(f"{self.reason}; where a new partition begins was not known yet")
        elif not passing and failures >= HOPELESS_FAILURES:
            self._give_up(self.reason)
        elif not passing and failures >= SAME_FAILURES:
            await self._set_damaged_aside()
        await asyncio.sleep(POLL_BACKOFF.pause(failures))

    def _rewind(self) -> bool:
        """A failed `getmany` loses what it had already taken from other partitions: fetch all of it again.

        Returns:
            Whether the place to go back to is known for all of them.  It is not where a partition became
            ours within the poll that failed; a new client begins at what is committed.
        """
        ours = self.consumer.assignment()
        held = [assignment for assignment in self._partitions.assignments.values() if assignment.partition in ours]
        for assignment in held:
            if (offset := assignment.next_offset) is not None:
                self.consumer.seek(assignment.partition, offset)
        unknown = [assignment for assignment in held if assignment.next_offset is None and not assignment.closed]
        for assignment in unknown:
            # Until the client is gone this loop goes on: nothing that comes may pass what was lost.
            assignment.close()
        return not unknown

    async def _note_starts(self) -> None:
        """Learn where new assignments begin, to have a place to go back to when a poll fails."""
        unknown = [a for a in self._partitions.assignments.values() if a.start is None and not a.closed]
        for assignment in unknown:
            try:
                assignment.start = await bounded(self.consumer.position(assignment.partition), self._answer_seconds)
            except (KafkaError, TimeoutError):
                continue  # not known yet, or no longer ours: asked again at the next poll

    async def _note_positions(self) -> None:
        """Learn how far partitions were fetched, so that markers and aborted messages can be committed (R2).

        Only the task that polls may do this, between two polls: while one is under way, a position may be past records
        that are not registered.  Those of a closing assignment never are, so it is left out.
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
            # The client also moves on past a batch that it cannot take, and says so in a later poll: this one.
            self._take(await self._fetch(partition, most=1, seconds=0.0))
            if (position := await self._position(assignment)) is not None:
                assignment.progress.fetched_to(position, assignment.start or 0)

    async def _position(self, assignment: Assignment) -> int | None:
        """Where the client goes on in it; `None` if that is not known at once: no poll waits for it."""
        if assignment.closed or assignment.damaged or assignment.partition not in self.consumer.assignment():
            return None
        try:
            async with asyncio.timeout(0):
                return await self.consumer.position(assignment.partition)
        except (KafkaError, TimeoutError):
            return None

    async def _set_damaged_aside(self) -> None:
        """A batch that cannot be read fails every poll: find its partition, let it rest, go on with the others (A9)."""
        for partition, assignment in list(self._partitions.assignments.items()):
            if assignment.damaged or assignment.closed or partition not in self.consumer.assignment():
                continue
            try:
                batches = await self._fetch(partition)
            except Exception as error:  # noqa: BLE001  # as above
                if type(error) is KafkaError:
                    return  # the client speaks of itself, not of a message
                if await self._is_damaged(assignment):
                    self._set_aside(assignment, error)
            else:
                self._take(batches)
        self._rewind()

    async def _is_damaged(self, assignment: Assignment) -> bool:
        """Take what precedes the damage, one message at a time; a poll of many hands out nothing if one is damaged.

        The next offset of `assignment` is that of the damage afterwards.

        Returns:
            Whether there still is damage; what a connection has damaged is sound when it is fetched again.
        """
        taken = empty = 0
        while taken < POLL_RECORDS and empty < EMPTY_POLLS and not assignment.closed:
            try:
                batches = await self._fetch(assignment.partition, most=1)
            except Exception:  # noqa: BLE001  # as above
                return True
            self._take(batches)
            taken += len(batches)
            empty += not batches
        return taken < POLL_RECORDS and not assignment.closed

    def _set_aside(self, assignment: Assignment, error: Exception) -> None:
        assignment.damaged = True
        self._observer.count(Signal.PARTITION_DAMAGED)
        logger.error(
            "%s: %s[%d] cannot be read from offset %s on and rests; others go on: %s",
            self._service,
            assignment.partition.topic,
            assignment.partition.partition,
            assignment.next_offset,
            f"{type(error).__name__}: {error}",
        )

    # When messages have come.

    def _take(self, batches: Mapping[Any, Sequence[Any]]) -> None:
        """Note what has come before anything is awaited (R1)."""
        if batches:
            self.watch.stir(fetched=True)
        for partition, records in batches.items():
            assignment = self._partitions.assignments.get(partition)
            if assignment is None or assignment.closed or not records:
                continue  # not ours any more, or not to be begun: it comes again
            expected = assignment.progress.next_offset
            if expected is not None and records[0].offset < expected:
                assignment = self._partitions.begin_anew(assignment, records[0].offset)
            for record in records:
                if assignment.progress.deliver(record.offset):
                    self._put(Delivery(record, assignment))
