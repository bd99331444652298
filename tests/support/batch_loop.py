"""A custom consumer loop for batches, in a process that can be killed at a named place.

    python -m tests.support.batch_loop BOOTSTRAP TOPIC GROUP REDIS_URL JOURNAL [PLACE]

`one_batch` is the loop in docs/how-to/handle-batches.md. Each effect appends a line to JOURNAL.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from integr8s_idem import IdempotencyConfig, IdempotencyManager, committable_offsets
from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.records import Completed, Reserved
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.testing.crash_points import kill_myself

LEASE = 2.0
PLACES = ("within the effects", "before confirming", "before committing", "after the commit")


async def one_batch(consumer: Any, manager: IdempotencyManager, index: Callable[[Any, Reserved], Any]) -> None:
    fetched = await consumer.getmany(timeout_ms=500, max_records=100)
    records = [record for batch in fetched.values() for record in batch]
    verdicts = await manager.acquire_batch(map(event_id, records))
    reserved = {key: verdict for key, verdict in verdicts.items() if isinstance(verdict, Reserved)}

    work = {event_id(record): record for record in records if event_id(record) in reserved}
    done: list[str] = []
    try:
        for key, record in work.items():
            if await manager.may_start(reserved[key]) and await index(record, reserved[key]):
                done.append(key)
    finally:  # even after an error, so that other workers do not have to wait for the leases to end
        confirmed = await manager.confirm_batch(reserved[key] for key in done)
        await manager.release_batch(reserved[key] for key in reserved if key not in done)

    settled = {key for key, is_kept in zip(done, confirmed, strict=True) if is_kept}
    settled |= {key for key, verdict in verdicts.items() if isinstance(verdict, Completed)}
    unsettled = {position_of(record) for record in records if event_id(record) not in settled}
    offsets = committable_offsets(records, unsettled)
    await consumer.commit({TopicPartition(*partition): offset for partition, offset in offsets.items()})
    for topic, partition, offset in sorted(unsettled, reverse=True):  # the first offset last
        consumer.seek(TopicPartition(topic, partition), offset)


def event_id(record: Any) -> str:
    return str(dict(record.headers)["event_id"], "ascii")


def position_of(record: Any) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


class Index:
    """Does the work, and kills the process at the given place."""

    def __init__(self, journal: Path, place: str) -> None:
        self._journal = journal
        self._place = place
        self._done = 0

    def reached(self, place: str) -> None:
        if place == self._place:
            kill_myself()

    async def __call__(self, record: Any, reserved: Reserved) -> bool:
        """Return whether the record was indexed."""
        if self._done == 3:
            self.reached("within the effects")
        if record.value == b"flaky" and reserved.attempt == 1:
            return False
        journal = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(journal, f"{event_id(record)} {reserved.attempt}\n".encode())
        os.close(journal)
        self._done += 1
        return True


class DyingManager(IdempotencyManager):
    """A manager that can kill the process before the first confirmation."""

    index: Index

    async def confirm_batch(self, done: Any, *, ttl: Any = None) -> list[bool]:
        confirmed = list(done)
        if confirmed:
            self.index.reached("before confirming")
        return await super().confirm_batch(confirmed, ttl=ttl)


class DyingConsumer:
    """A consumer that can kill the process before or after the first commit."""

    def __init__(self, consumer: Any, index: Index) -> None:
        self._consumer = consumer
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if not offsets:
            return
        self._index.reached("before committing")
        await self._consumer.commit(offsets)
        self._index.reached("after the commit")


async def main(bootstrap: str, topic: str, group: str, redis_url: str, journal: str, place: str = "") -> None:
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=1500,
        heartbeat_interval_ms=300,
    )
    client = redis_client(RedisStoreSettings(url=redis_url))
    config = IdempotencyConfig(processing_timeout_seconds=LEASE, key_prefix=group)
    manager = DyingManager(config, RedisIdempotencyRepository(client), scope="search")
    index = manager.index = Index(Path(journal), place)
    await consumer.start()
    while True:
        await one_batch(DyingConsumer(consumer, index), manager, index)
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
