"""Kill workers between any two steps of a delayed retry."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from integr8s_idem import BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem._util.context_vars import RUN
from integr8s_idem.config import KafkaSettings, RedisStoreSettings, ServiceSettings
from integr8s_idem.errors import RetryAfter
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint, crashing_consumer, kill_myself
from integr8s_idem.worker import EventPublisher, ServiceWorker
from integr8s_idem.worker.publisher import Placement
from tests.crashes.worker import exit_with
from tests.support.kafka.broker import Kafka

SERVICE: Final = "billing"
EVENTS: Final = 12
PARTITIONS: Final = 2
TIERS: Final = ("1s", "3s")
DELAYS: Final = (0.5, 2.0, 4.0)
"""Seconds: less than the first tier, between the two, and more than both."""
PATIENCE: Final = 90.0
"""Seconds after which an event counts as lost or stuck."""

COPY_POINTS: Final = ("before_copy", "after_copy")
POINTS: Final = (
    *COPY_POINTS,
    *(f"{when}_{verb}" for verb in ("reserve", "release", "commit") for when in ("before", "in", "after")),
)


class Ordered(BaseEvent):
    event_type: Literal["ordered"] = "ordered"
    number: int


class CopyingPublisher(EventPublisher):
    """Dies at the n-th copy for a retry topic."""

    def __init__(self, settings: KafkaSettings, point: str, occurrence: int) -> None:
        super().__init__(settings)
        self._point = point
        self._left = occurrence

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Placement | None:
        if ".retry." in topic:
            self._reached("before_copy")
        placement = await super().send(topic, key, value, headers)
        if ".retry." in topic:
            self._reached("after_copy")
        return placement

    def _reached(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if not self._left:
                kill_myself()


def planned_failures(number: int) -> int:
    return number % 3


class Handler:
    """Writes what it does to a file that survives the process."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal

    async def handle(self, event: Ordered) -> None:
        run = RUN.get()
        assert run is not None
        failed = sum(line.startswith(f"failed {event.number} ") for line in read_lines(self._journal))
        fails = failed < planned_failures(event.number)
        what = "failed" if fails else "done"
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(f"{what} {event.number} {run.attempt.number}\n")
        if fails:
            raise RetryAfter(timedelta(seconds=DELAYS[(event.number + failed) % len(DELAYS)]))


def read_lines(journal: Path) -> list[str]:
    return journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []


def kafka_settings(bootstrap: str, prefix: str) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=bootstrap,
        topic_prefix=prefix,
        session_timeout_seconds=6,
        heartbeat_interval_seconds=0.5,
        rebalance_timeout_seconds=10,
        metadata_max_age_seconds=1,
    )


async def work(order: dict[str, Any]) -> None:
    """Run the worker of a trial until SIGTERM."""
    point, occurrence = order["point"], order["occurrence"]
    plan = CrashPlan(CrashPoint(point) if point and point not in COPY_POINTS else None, occurrence)
    settings = kafka_settings(order["bootstrap"], order["prefix"])
    client = redis_client(RedisStoreSettings(url=order["redis"]))
    store = CrashingStore(RedisIdempotencyRepository(client), plan)
    config = IdempotencyConfig(processing_timeout_seconds=3, key_prefix=order["prefix"].rstrip("."))
    manager = IdempotencyManager(config, store, scope=SERVICE)
    publisher = CopyingPublisher(settings, point, occurrence)
    router = EventRouter()
    router.on(Ordered, delayed_retries="overtake")(Handler(Path(order["journal"])).handle)
    service = ServiceSettings(
        commit_interval_seconds=0.1, retry_topics=TIERS, ordering=order["ordering"], drain_timeout_seconds=5
    )
    worker = ServiceWorker(
        SERVICE,
        IdempotentEventDispatcher(router, manager, publisher=publisher),
        publisher,
        settings,
        service,
        group=group_of(order["prefix"]),
        consumer=crashing_consumer(plan),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    watching = asyncio.create_task(exit_with(order["parent"]))
    await worker.run()
    watching.cancel()
    await manager.close()
    await publisher.close()
    await client.aclose()


def group_of(prefix: str) -> str:
    return f"{prefix}{SERVICE}"


class Trial:
    """Events with planned failures, a worker that is killed at a point, and another one that ends the work."""

    def __init__(self, kafka: Kafka, redis_url: str, number: int) -> None:
        chosen = random.Random(number)  # repeatable, not secret
        self._kafka = kafka
        self._redis = redis_url
        self.point = POINTS[number % len(POINTS)]
        self.occurrence = chosen.randint(1, 6)
        self.ordering = chosen.choice(["partition", "key", "none"])
        self.prefix = f"r{uuid.uuid4().hex[:8]}."

    async def run(self) -> dict[str, int]:
        """Run the trial, and return how many kills, lost events and silent repeats there were.

        Raises:
            AssertionError: An event was lost, silently repeated, retried too often or dead-lettered.
        """
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            await self._publish()
            first = await self._start(journal, self.point)
            await self._until_done(journal, first)
            killed = first.returncode == -signal.SIGKILL
            if killed:
                second = await self._start(journal, "")
                await self._until_done(journal, second)
                await self._stop(second)
            else:
                await self._stop(first)
            self._judge(read_lines(journal))
        return {"kills": int(killed), "lost": 0, "repeats": 0}

    async def _publish(self) -> None:
        topic, group = f"{self.prefix}ordered", group_of(self.prefix)
        names = [topic, *(f"{topic}.{group}.retry.{tier}" for tier in TIERS)]
        await self._kafka.create_topics({**dict.fromkeys(names, PARTITIONS), f"{topic}.dlq": 1})
        publisher = EventPublisher(kafka_settings(self._kafka.bootstrap, self.prefix))
        for number in range(EVENTS):
            event = Ordered(number=number)
            await publisher.send(topic, str(number).encode(), encode_event(event), event_headers(event))
        await publisher.close()

    async def _start(self, journal: Path, point: str) -> asyncio.subprocess.Process:
        order = {
            "point": point,
            "occurrence": self.occurrence,
            "bootstrap": self._kafka.bootstrap,
            "prefix": self.prefix,
            "redis": self._redis,
            "journal": str(journal),
            "ordering": self.ordering,
            "parent": os.getpid(),
        }
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.crashes.retrying", json.dumps(order), stderr=asyncio.subprocess.DEVNULL
        )

    async def _until_done(self, journal: Path, process: asyncio.subprocess.Process) -> None:
        """Return when the process has died, or when every event is done."""
        deadline = time.monotonic() + PATIENCE
        while process.returncode is None and len(self._done(read_lines(journal))) < EVENTS:
            assert time.monotonic() < deadline, f"{self}: lost or stuck: {sorted(self._missing(read_lines(journal)))}"
            await asyncio.sleep(0.1)

    @staticmethod
    async def _stop(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)

    @staticmethod
    def _done(lines: Sequence[str]) -> Counter[int]:
        return Counter(int(line.split()[1]) for line in lines if line.startswith("done"))

    def _missing(self, lines: Sequence[str]) -> set[int]:
        return set(range(EVENTS)) - self._done(lines).keys()

    def _judge(self, lines: Sequence[str]) -> None:
        assert not self._missing(lines), f"{self}: lost {self._missing(lines)}"
        by_attempt = Counter(tuple(line.split()[1:]) for line in lines)
        silent = {run: count for run, count in by_attempt.items() if count > 1}
        assert not silent, f"{self}: runs of one event with the same attempt number: {silent}"
        # Each kill adds at most one run of each event that was running or reserved.
        attempts = Counter(int(line.split()[1]) for line in lines)
        most = {number: count for number, count in attempts.items() if count > planned_failures(number) + 2}
        assert not most, f"{self}: retried too often: {most}"

    def __str__(self) -> str:
        return f"{self.point} (occurrence {self.occurrence}), ordering {self.ordering}, prefix {self.prefix}"


if __name__ == "__main__":
    asyncio.run(work(json.loads(sys.argv[1])))
