"""Put the dead letters of one topic back, each for the handler that gave it up.

    python -m examples.replay_dead_letters order_placed.dlq [--settings settings.toml] [--dry-run]

It begins at the oldest letter every time.  That is harmless: a letter that was put back twice is one generation, which
is handled once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from aiokafka import AIOKafkaConsumer

from integr8s_idem import EventPublisher, Settings, load_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.worker import replay_of
from integr8s_idem.worker.kafka_protocols import Record


async def letters(settings: Settings, topic: str) -> AsyncIterator[Record]:
    """All that stand in `topic` now; read without a group, so that nobody's offsets move."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=settings.kafka.bootstrap_servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    await consumer.start()
    try:
        partitions = consumer.assignment()
        begins, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
        left = {partition for partition in partitions if begins[partition] < ends[partition]}
        while left:
            for partition, records in (await consumer.getmany(*left, timeout_ms=1_000)).items():
                for record in records:
                    if record.offset < ends[partition]:
                        yield record
            left -= {partition for partition in left if await consumer.position(partition) >= ends[partition]}
    finally:
        await consumer.stop()


async def replay(settings: Settings, topic: str, *, dry_run: bool = False) -> tuple[int, int]:
    """How many letters were put back, and how many cannot be."""
    publisher, replayed, refused = EventPublisher(settings.kafka), 0, 0
    try:
        async for letter in letters(settings, topic):
            try:
                message = replay_of(letter, settings)
            except ApplicationError as error:
                print(f"left there: {error}")
                refused += 1
                continue
            if not dry_run:
                await publisher.send(*message)
            replayed += 1
    finally:
        await publisher.close()
    return replayed, refused


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the dead letters of one topic back.")
    parser.add_argument("topic", help="the dead-letter topic, such as order_placed.dlq")
    parser.add_argument("--settings", type=Path, help="the settings of the service")
    parser.add_argument("--dry-run", action="store_true", help="count them only")
    asked = parser.parse_args()
    replayed, refused = asyncio.run(replay(load_settings(asked.settings), asked.topic, dry_run=asked.dry_run))
    print(f"{replayed} {'to put' if asked.dry_run else 'put'} back, {refused} left there")


if __name__ == "__main__":
    main()
