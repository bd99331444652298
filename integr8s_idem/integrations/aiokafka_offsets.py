"""The offsets of an aiokafka loop: what it fetches again, and what it commits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError

from integr8s_idem.integrations.kafka_loops import take_over

logger = logging.getLogger(__name__)


class _Delivery(Protocol):
    @property
    def record(self) -> ConsumerRecord[Any, Any]: ...
    @property
    def settled(self) -> bool: ...


class Offsets:
    """The offsets of one loop: of the records in progress, and of settled records to commit."""

    def __init__(self, consumer: AIOKafkaConsumer, interval: float) -> None:
        self._consumer = consumer
        self._interval = interval
        self._due = self._positions_due = asyncio.get_running_loop().time() + interval
        self._delivery: tuple[TopicPartition, _Delivery] | None = None
        self._unsettled: dict[TopicPartition, int] = {}
        """Where fetched records that are not settled begin."""
        self._settled: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    async def open(self) -> None:
        """Close the offsets of the consumer's previous loop, if that is not closed yet."""
        previous = take_over(self._consumer, self)
        if previous is not None:
            await previous.close()

    def note_fetched(self, fetched: Mapping[TopicPartition, Sequence[ConsumerRecord[Any, Any]]]) -> None:
        self._unsettled = {partition: records[0].offset for partition, records in fetched.items() if records}

    def begin(self, partition: TopicPartition, delivery: _Delivery) -> None:
        self._delivery = partition, delivery

    def end(self) -> None:
        """Settle the record of the delivery in progress if it is settled."""
        if self._delivery is None:
            return
        partition, delivery = self._delivery
        if delivery.settled:
            self._settled[partition] = self._unsettled[partition] = delivery.record.offset + 1
        self._delivery = None

    def seek_back(self, partition: TopicPartition) -> None:
        """Fetch the unsettled records of `partition` again, unless they are fetched by another worker."""
        offset = self._unsettled.pop(partition, None)
        if offset is not None and partition in self._consumer.assignment():
            self._consumer.seek(partition, offset)

    def forget(self, partition: TopicPartition) -> None:
        """Note that no fetched record of `partition` is left to settle."""
        self._unsettled.pop(partition, None)

    async def note_positions(self) -> None:
        """Settle transaction markers and aborted messages, which advance the consumer's position without a record.

        Call it only after all fetched records have been processed: each of them is settled, or the consumer has sought
        back to it.
        """
        now = asyncio.get_running_loop().time()
        if now < self._positions_due:
            return
        self._positions_due = now + self._interval
        for partition in self._consumer.assignment():
            if await self._position(partition) <= max(
                self._settled.get(partition, 0), self._committed.get(partition, 0)
            ):
                continue
            # The client also skips a batch that it cannot read, and raises only in the next poll: poll once here.
            fetched = await self._consumer.getmany(partition, timeout_ms=0, max_records=1)
            if records := fetched.get(partition):
                self._consumer.seek(partition, records[0].offset)
            if position := await self._position(partition):
                self._settled[partition] = position

    async def _position(self, partition: TopicPartition) -> int:
        """Return the consumer's position, or 0 if it is not known immediately."""
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
        # The next owner of a revoked partition commits its offsets.
        assigned = self._consumer.assignment()
        self._settled = {partition: offset for partition, offset in self._settled.items() if partition in assigned}
        if not self._settled:
            return
        try:
            await self._consumer.commit(self._settled)
        except KafkaError as error:
            logger.warning("offsets were not committed: %s", error)
            if isinstance(error, CommitFailedError):
                # The group rebalances: the records are redelivered, here or to the next owner, and recognized as
                # duplicates.  Another commit meanwhile would make the client rejoin the group once more.
                self._settled.clear()
        else:
            self._committed.update(self._settled)
            self._settled.clear()

    async def close(self) -> None:
        """Leave each partition at its first record that is not settled, for the next loop, and commit."""
        self.end()
        for partition in tuple(self._unsettled):
            self.seek_back(partition)
        await self.commit()
