"""Read dead-letter topics without a consumer group, so that no offsets are committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import ApplicationError, BrokerUnavailableError
from integr8s_idem.operations.dead_letters import Place, StoredDeadLetter
from integr8s_idem.worker.broker_facts import unavailable
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.client_stop import bounded_stop
from integr8s_idem.worker.kafka_protocols import Partition

T = TypeVar("T")

PAGE_SIZE: Final = 500
"""Maximum number of messages in a page."""

FETCH_BYTES: Final = 1_048_576
"""Maximum bytes of one partition in a fetch response; a larger message is returned on its own."""

MAX_PARTITIONS: Final = 8
"""Number of partitions to read concurrently: each may have a response buffered here."""

_FETCH_WAIT_MS: Final = 50
"""How long a broker waits for more data before it responds.  The wait delays the next partitions."""

_POLL_MS: Final = 500
_CLOSE_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets of one partition from `begin` to `end`, excluding `end`."""

    partition: Partition
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Number of offsets.  There may be fewer messages, since some offsets contain none."""
        return max(self.end - self.begin, 0)


@dataclass(frozen=True, slots=True)
class Page:
    """Some dead letters, and the number of offsets that were read for them."""

    dead_letters: Sequence[StoredDeadLetter]
    offsets_read: int


class DeadLetterReader:
    """Reads the dead-letter topics of a cluster.

    All methods raise `BrokerUnavailableError` if a request fails or times out.
    """

    def __init__(self, kafka: KafkaSettings, consumer: Any) -> None:
        self._kafka = kafka
        self._consumer = consumer
        self._timeout = 2 * kafka.request_timeout_seconds

    async def partitions(self) -> Mapping[str, Sequence[int]]:
        """Return the partitions of every visible topic.  Requesting topics by name could create them."""
        client: Any = AIOKafkaClient(**connection_options(self._kafka))
        try:
            await self._call(client.bootstrap())
            cluster = await self._call(self._cluster(client))
        finally:
            await _close(bounded(client.close(), _CLOSE_SECONDS))
        return {topic: sorted(cluster.partitions_for_topic(topic) or ()) for topic in cluster.topics()}

    async def _cluster(self, client: Any) -> Any:
        # A broker that stalled or has just started responds with an empty list of brokers until the controller
        # receives its heartbeat.
        until = time.monotonic() + self._timeout - _RETRY_SECONDS
        while True:
            try:
                return await client.fetch_all_metadata()
            except KafkaError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def offset_ranges(
        self, partitions: Sequence[Partition], since: datetime | None = None
    ) -> tuple[OffsetRange, ...]:
        """Return the current offsets of `partitions`, starting at `since`."""
        ends = await self._call(self._consumer.end_offsets(partitions))
        begins = dict(await self._call(self._consumer.beginning_offsets(partitions)))
        if since is not None:
            milliseconds = max(int(since.timestamp() * 1000), 0)
            found = await self._call(self._consumer.offsets_for_times(dict.fromkeys(partitions, milliseconds)))
            first = await self._call(self._consumer.offsets_for_times(dict.fromkeys(partitions, 0)))
            # A broker that finds no offset for timestamp 0, such as the embedded Kafka, has no time index: read all.
            for each in (one for one in partitions if first[one] is not None):
                begins[each] = ends[each] if found[each] is None else found[each].offset
        return tuple(OffsetRange(each, begins[each], ends[each]) for each in partitions)

    async def offset_ranges_of(
        self, places: Sequence[Place], existing: Mapping[str, Collection[int]]
    ) -> tuple[OffsetRange, ...]:
        """Return one range for each place.

        Args:
            places: Places of messages.
            existing: All partitions by topic.

        Raises:
            ApplicationError: A place does not exist.
        """
        for place in places:
            if place.partition not in existing.get(place.topic, ()):
                raise ApplicationError(
                    f"no dead letter at {place}: partition {place.partition} of topic {place.topic} not found on "
                    f"{self._kafka.bootstrap_servers}",
                    is_missing=True,
                )
        partitions = list({place.at for place in places})
        ranges = {each.partition: each for each in await self.offset_ranges(partitions)}
        for place in places:
            offset_range = ranges[place.at]
            if not offset_range.begin <= place.offset < offset_range.end:
                content = f"contains offsets {offset_range.begin} to {offset_range.end - 1}"
                if not offset_range.length:
                    content = "is empty"
                raise ApplicationError(f"no dead letter at {place}: the partition {content}", is_missing=True)
        return tuple(replace(ranges[place.at], begin=place.offset, end=place.offset + 1) for place in places)

    async def pages(self, offset_ranges: Iterable[OffsetRange]) -> AsyncGenerator[Page, None]:
        """Yield every message once; messages of a partition are in order."""
        for group in _groups([one for one in offset_ranges if one.length]):
            async for page in self._pages(group):
                yield page

    async def _pages(self, ranges: Mapping[Partition, OffsetRange]) -> AsyncGenerator[Page, None]:
        self._consumer.assign(list(ranges))
        for partition, offset_range in ranges.items():
            self._consumer.seek(partition, offset_range.begin)
        positions = {partition: offset_range.begin for partition, offset_range in ranges.items()}
        unfinished, last_progress = set(ranges), time.monotonic()
        while unfinished:
            fetched = await self._call(self._consumer.getmany(*unfinished, timeout_ms=_POLL_MS, max_records=PAGE_SIZE))
            dead_letters = [
                StoredDeadLetter(record)
                for partition, records in fetched.items()
                for record in records
                if record.offset < ranges[partition].end
            ]
            offsets_read = 0
            for partition in list(unfinished):
                end = ranges[partition].end
                position = min(await self._call(self._consumer.position(partition)), end)
                offsets_read += max(position - positions[partition], 0)
                positions[partition] = position
                if position >= end:
                    unfinished.discard(partition)
                    self._consumer.pause(partition)
            if dead_letters or offsets_read:
                yield Page(dead_letters, offsets_read)
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self._timeout:
                topics = ", ".join(sorted({each.topic for each in unfinished}))
                reason = f"received no messages of {topics} within {self._timeout:g} s"
                raise BrokerUnavailableError(self._kafka.bootstrap_servers, reason)

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await bounded(call, self._timeout)
        except (KafkaError, OSError, TimeoutError) as error:
            raise unavailable(self._kafka, error) from error


@asynccontextmanager
async def open_dead_letter_reader(kafka: KafkaSettings) -> AsyncIterator[DeadLetterReader]:
    """Open a connected reader.

    Raises:
        BrokerUnavailableError: No broker answers.
    """
    consumer: Any = AIOKafkaConsumer(
        **connection_options(kafka),
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # if messages expire while they are read, continue with the next
        isolation_level="read_committed",
        fetch_max_wait_ms=_FETCH_WAIT_MS,
        fetch_max_bytes=MAX_PARTITIONS * FETCH_BYTES,
        max_partition_fetch_bytes=FETCH_BYTES,
    )
    reader = DeadLetterReader(kafka, consumer)
    try:
        await reader._call(consumer.start())  # noqa: SLF001  # this function is the constructor
        yield reader
    finally:
        await _close(bounded_stop(consumer, _CLOSE_SECONDS))


async def _close(closing: Coroutine[Any, Any, None]) -> None:
    try:
        await closing
    except (KafkaError, OSError, TimeoutError):
        return  # nothing is left to send


def _groups(offset_ranges: Sequence[OffsetRange]) -> Iterator[Mapping[Partition, OffsetRange]]:
    """Split ranges into groups of few, distinct partitions."""
    group: dict[Partition, OffsetRange] = {}
    for offset_range in offset_ranges:
        if len(group) >= MAX_PARTITIONS or offset_range.partition in group:
            yield group
            group = {}
        group[offset_range.partition] = offset_range
    if group:
        yield group
