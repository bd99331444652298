"""Dead-letter topics, read from outside any consumer group: nobody's offsets move."""

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
from integr8s_idem.operations.dead_letters import Letter, Place
from integr8s_idem.worker.broker_facts import unavailable
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.kafka_protocols import Partition

T = TypeVar("T")

PAGE: Final = 500
"""Most letters that are in hand at once."""

FETCH_BYTES: Final = 1_048_576
"""Of one partition in one answer; a message that is larger comes alone."""

AT_ONCE: Final = 8
"""Partitions that are read side by side: each may have an answer of its own waiting here."""

_WAIT_MS: Final = 50
"""How long a broker holds an answer back for more: it holds up the next partitions."""

_POLL_MS: Final = 500
_CLOSE_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets of one partition, from `begin` up to, and without, `end`."""

    partition: Partition
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Offsets, which may be more than messages: some hold none."""
        return max(self.end - self.begin, 0)


@dataclass(frozen=True, slots=True)
class Page:
    """Some letters, and how many offsets were passed for them."""

    letters: Sequence[Letter]
    passed: int


class DeadLetterReader:
    """The dead-letter topics of a cluster.  All methods raise `BrokerUnavailableError` for no answer, or a refusal."""

    def __init__(self, kafka: KafkaSettings, consumer: Any) -> None:
        self._kafka = kafka
        self._consumer = consumer
        self._patience = 2 * kafka.request_timeout_seconds

    async def partitions(self) -> Mapping[str, Sequence[int]]:
        """The partitions of every topic that we may see.  Makes no topic, as asking for one by its name would."""
        client: Any = AIOKafkaClient(**connection_options(self._kafka))
        try:
            await self._asked(client.bootstrap())
            known = await self._asked(self._cluster(client))
        finally:
            await _closed(client.close())
        return {topic: sorted(known.partitions_for_topic(topic) or ()) for topic in known.topics()}

    async def _cluster(self, client: Any) -> Any:
        # A broker that stalled, or has just begun, answers and names no broker, itself included, until the
        # controller has heard from it again.
        until = time.monotonic() + self._patience - _AGAIN_SECONDS
        while True:
            try:
                return await client.fetch_all_metadata()
            except KafkaError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)

    async def stretches(
        self, partitions: Sequence[Partition], since: datetime | None = None
    ) -> tuple[OffsetRange, ...]:
        """What stands in `partitions` now, from `since` on.  What comes later is not in it."""
        ends = await self._asked(self._consumer.end_offsets(partitions))
        begins = dict(await self._asked(self._consumer.beginning_offsets(partitions)))
        if since is not None:
            milliseconds = max(int(since.timestamp() * 1000), 0)
            found = await self._asked(self._consumer.offsets_for_times(dict.fromkeys(partitions, milliseconds)))
            first = await self._asked(self._consumer.offsets_for_times(dict.fromkeys(partitions, 0)))
            # Who finds nothing for the oldest of all times knows none, as the embedded Kafka: then all is read.
            for each in (one for one in partitions if first[one] is not None):
                begins[each] = ends[each] if found[each] is None else found[each].offset
        return tuple(OffsetRange(each, begins[each], ends[each]) for each in partitions)

    async def stretches_of(
        self, places: Sequence[Place], there: Mapping[str, Collection[int]]
    ) -> tuple[OffsetRange, ...]:
        """One for each place.  `there`: all partitions, by topic.

        Raises:
            ApplicationError: There is none.
        """
        for place in places:
            if place.partition not in there.get(place.topic, ()):
                raise ApplicationError(
                    f"there is no letter at {place}: {self._kafka.bootstrap_servers} have no partition "
                    f"{place.partition} of a topic {place.topic}",
                    is_missing=True,
                )
        held = {one.partition: one for one in await self.stretches(list({place.at for place in places}))}
        for place in places:
            stretch = held[place.at]
            if not stretch.begin <= place.offset < stretch.end:
                told = f"holds offsets {stretch.begin} to {stretch.end - 1}" if stretch.length else "is empty"
                raise ApplicationError(f"there is no letter at {place}: its partition {told}", is_missing=True)
        return tuple(replace(held[place.at], begin=place.offset, end=place.offset + 1) for place in places)

    async def pages(self, stretches: Iterable[OffsetRange]) -> AsyncGenerator[Page, None]:
        """Every message there is, once; those of one partition in their order."""
        for group in _side_by_side([one for one in stretches if one.length]):
            async for page in self._pages(group):
                yield page

    async def _pages(self, ends: Mapping[Partition, OffsetRange]) -> AsyncGenerator[Page, None]:
        self._consumer.assign(list(ends))
        for partition, stretch in ends.items():
            self._consumer.seek(partition, stretch.begin)
        at = {partition: stretch.begin for partition, stretch in ends.items()}
        left, heard = set(ends), time.monotonic()
        while left:
            fetched = await self._asked(self._consumer.getmany(*left, timeout_ms=_POLL_MS, max_records=PAGE))
            letters = [
                Letter(record)
                for partition, records in fetched.items()
                for record in records
                if record.offset < ends[partition].end
            ]
            passed = 0
            for partition in list(left):
                position = min(await self._asked(self._consumer.position(partition)), ends[partition].end)
                passed, at[partition] = passed + max(position - at[partition], 0), position
                if position >= ends[partition].end:
                    left.discard(partition)
                    self._consumer.pause(partition)
            if letters or passed:
                heard = time.monotonic()
                yield Page(letters, passed)
                heard = time.monotonic()
            elif time.monotonic() - heard > self._patience:
                topics = ", ".join(sorted({each.topic for each in left}))
                reason = f"nothing of what {topics} holds came within {self._patience:g} s"
                raise BrokerUnavailableError(self._kafka.bootstrap_servers, reason)

    async def _asked(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await bounded(call, self._patience)
        except (KafkaError, OSError, TimeoutError) as error:
            raise unavailable(self._kafka, error) from error


@asynccontextmanager
async def open_letter_box(kafka: KafkaSettings) -> AsyncIterator[DeadLetterReader]:
    """Connected; closed at the end of the block.

    Raises:
        BrokerUnavailableError: No broker answers.
    """
    consumer: Any = AIOKafkaConsumer(
        **connection_options(kafka),
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # of letters that expire while they are read, those that are left
        isolation_level="read_committed",
        fetch_max_wait_ms=_WAIT_MS,
        fetch_max_bytes=AT_ONCE * FETCH_BYTES,
        max_partition_fetch_bytes=FETCH_BYTES,
    )
    box = DeadLetterReader(kafka, consumer)
    try:
        await box._asked(consumer.start())  # noqa: SLF001  # its own maker
        yield box
    finally:
        await _closed(consumer.stop())


async def _closed(closing: Coroutine[Any, Any, None]) -> None:
    try:
        await bounded(closing, _CLOSE_SECONDS)
    except (KafkaError, OSError, TimeoutError):
        return  # it had nothing to tell any more, and its connections end with it


def _side_by_side(stretches: Sequence[OffsetRange]) -> Iterator[Mapping[Partition, OffsetRange]]:
    """Groups of few partitions, none of them twice."""
    group: dict[Partition, OffsetRange] = {}
    for stretch in stretches:
        if len(group) >= AT_ONCE or stretch.partition in group:
            yield group
            group = {}
        group[stretch.partition] = stretch
    if group:
        yield group
