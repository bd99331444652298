"""Replay the dead letters of a topic, each for the handler that failed.

    python -m examples.replay_dead_letters order_placed.dlq [--settings settings.toml] [--dry-run]

It starts at the oldest dead letter every time.  That is harmless: replaying a dead letter twice creates the same
generation, which is handled once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from aiokafka import AIOKafkaConsumer

from integr8s_idem import EventPublisher, Settings, load_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.worker import Record, replay_of


async def dead_letters(settings: Settings, topic: str) -> AsyncIterator[Record]:
    """Yield the messages that are in `topic` now, without a consumer group, so that no offsets are committed."""
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
        unfinished = {partition for partition in partitions if begins[partition] < ends[partition]}
        while unfinished:
            for partition, records in (await consumer.getmany(*unfinished, timeout_ms=1_000)).items():
                for record in records:
                    if record.offset < ends[partition]:
                        yield record
            unfinished -= {
                partition for partition in unfinished if await consumer.position(partition) >= ends[partition]
            }
    finally:
        await consumer.stop()


async def replay(settings: Settings, topic: str, *, dry_run: bool = False) -> tuple[int, int]:
    """Replay the dead letters of `topic`; return how many were replayed and how many were skipped."""
    publisher, replayed, skipped = EventPublisher(settings.kafka), 0, 0
    try:
        async for dead_letter in dead_letters(settings, topic):
            try:
                message = replay_of(dead_letter, settings)
            except ApplicationError as error:
                print(f"skipped: {error}")
                skipped += 1
                continue
            if not dry_run:
                await publisher.send(*message)
            replayed += 1
    finally:
        await publisher.close()
    return replayed, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay the dead letters of a topic.")
    parser.add_argument("topic", help="the dead-letter topic, such as order_placed.dlq")
    parser.add_argument("--settings", type=Path, help="the settings of the service")
    parser.add_argument("--dry-run", action="store_true", help="count only")
    options = parser.parse_args()
    replayed, skipped = asyncio.run(replay(load_settings(options.settings), options.topic, dry_run=options.dry_run))
    print(f"{replayed} {'to replay' if options.dry_run else 'replayed'}, {skipped} skipped")


if __name__ == "__main__":
    main()
