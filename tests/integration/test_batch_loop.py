"""A custom consumer loop with `acquire_batch` and its own commits, on real Kafka and real Redis."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.crashes.ground import BROKER
from tests.support.batch_loop import PLACES
from tests.support.kafka.broker import Kafka

pytestmark = pytest.mark.kafka

FLAKY: Final = {0: 2, 1: 4}
"""The offset, by partition, of a record whose first run fails."""
EACH: Final = 6
"""Number of records per partition; the last is a duplicate of the first."""
PATIENCE: Final = 90.0


@dataclass
class Loop:
    """A topic, the processes that consume it, and the journal of their effects."""

    kafka: Kafka
    topic: str
    redis_url: str
    journal: Path
    admin: Any

    @asynccontextmanager
    async def process(self, place: str = "") -> AsyncIterator[Process]:
        """Start a process that dies at `place`, or is killed at the end of the block."""
        arguments = [self.kafka.bootstrap, self.topic, self.topic, self.redis_url, str(self.journal), place]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.batch_loop", *arguments)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def fill(self) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        await producer.start()
        for partition, flaky in FLAKY.items():
            for offset in range(EACH):
                await producer.send_and_wait(
                    self.topic,
                    b"flaky" if offset == flaky else b"plain",
                    headers=[("event_id", f"{partition}-{offset % (EACH - 1)}".encode())],
                    partition=partition,
                )
        await producer.stop()

    @property
    def effects(self) -> dict[str, list[int]]:
        """The attempts that had an effect, by event."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for line in self.journal.read_text().splitlines() if self.journal.exists() else ():
            event, attempt = line.split()
            found[event].append(int(attempt))
        return dict(found)

    async def committed(self) -> dict[int, int]:
        """Return the committed offsets of the group, by partition."""
        offsets = await self.admin.list_consumer_group_offsets(self.topic, BROKER)
        return {
            partition: offsets[at].offset
            for partition in FLAKY
            if (at := TopicPartition(self.topic, partition)) in offsets
        }

    async def all_committed(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.committed() != dict.fromkeys(FLAKY, EACH):  # noqa: ASYNC110  # the broker sends no notification
                await asyncio.sleep(0.2)


EVENTS: Final = [f"{partition}-{offset}" for partition in FLAKY for offset in range(EACH - 1)]


async def _killed(loop: Loop, place: str) -> tuple[dict[str, list[int]], dict[int, int]]:
    """Let one process die at `place` and another finish; return the effects and commits in between."""
    await loop.kafka.create_topics({loop.topic: len(FLAKY)})
    await loop.fill()
    async with loop.process(place) as first, asyncio.timeout(PATIENCE):
        assert await first.wait() == -signal.SIGKILL
    between = loop.effects, await loop.committed()
    async with loop.process():
        await loop.all_committed()
    return between


@pytest.mark.timeout(240)
async def test_a_batch_loop_commits_settled_records_and_survives_a_crash_at_any_point(
    kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    loops = [Loop(kafka, f"{topic_prefix}{n}", redis_url, tmp_path / f"{n}", admin) for n in range(len(PLACES))]

    observed = await asyncio.gather(*map(_killed, loops, PLACES))
    await admin.close()

    for place, loop, (before, committed) in zip(PLACES, loops, observed, strict=True):
        after = loop.effects
        assert sorted(after) == sorted(EVENTS), place
        confirmed = place in ("before committing", "after the commit")
        for event in before:  # without a stored completion it runs again, as attempt 2
            assert after[event] in ([[1]] if confirmed else [[1, 2]]), (place, event)
        for partition, offset in committed.items():
            assert place == "after the commit"
            assert offset == FLAKY[partition], "committed beyond an unfinished record"
        flaky = [after[f"{partition}-{offset}"] for partition, offset in FLAKY.items()]
        assert all(attempts[0] > 1 and len(attempts) == 1 for attempts in flaky), place
    assert observed[-1][1]
