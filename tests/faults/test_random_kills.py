"""Workers that are killed at random moments, get two SIGTERMs, or are killed by a message, on real servers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from redis.asyncio import Redis

from integr8s_idem import EventPublisher, IdempotencyRecord, IdempotencyStatus
from integr8s_idem.engine.work import SUSPECT_AFTER
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.campaigns.figures import ViolationError
from tests.crashes import random_kills, soak
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, open_servers
from tests.crashes.jobs import Job
from tests.crashes.worker_group import WorkerGroup
from tests.kafka_faults import servers
from tests.kafka_faults.application import TaskGiven
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.kafka.broker import Kafka
from tests.support.processes import ServiceProcess
from tests.support.workers import header, kafka_settings

pytestmark = pytest.mark.kafka

HEALTHY = float(os.environ.get("INTEGR8S_IDEM_TEST_HEALTHY_SECONDS", "0.5"))
"""Duration of handlers that run next to one that kills its process after a fifth of that time."""
ATTEMPTS = 3
LEASE = 2.0
LONG = 300.0
"""Duration of a handler that never finishes within a test."""
GRACE = 2.0
"""Drain timeout in seconds."""
EXIT_TIMEOUT = 8.0
"""Seconds that an immediate exit may take on a busy machine."""


@pytest.fixture
async def crash_servers() -> AsyncIterator[Servers]:
    need_kafka(own=True)
    async with open_servers() as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(63)
def test_workers_killed_at_random_moments_lose_nothing_and_keep_the_order_of_each_key() -> None:
    need_kafka(own=True)

    figures = random_kills.run(0, random_kills.CAMPAIGN.in_test)

    assert figures["kills"] == random_kills.CAMPAIGN.in_test
    assert figures["lost"] == figures["fenced_repeats"] == 0
    assert figures["completed"] >= figures["completed_before_the_end"] > 0


@pytest.mark.slow
@pytest.mark.scenario(30)
async def test_a_message_that_kills_every_worker_is_dead_lettered_and_its_partition_moves_on(
    crash_servers: Servers,
) -> None:
    async with (
        ForkServer() as fork_server,
        WorkerGroup.open(crash_servers, fork_server, "deadly", random.Random(0), size=0) as worker_group,
    ):
        deadly = Job(work="killer", kind="deadly", aggregate_id="one")
        following = Job(work="following", aggregate_id="one")
        await worker_group.topics.publish([deadly, following])
        for _ in range(SUSPECT_AFTER + ATTEMPTS):
            worker = await worker_group.start(ordering="partition", max_attempts=ATTEMPTS)
            assert await asyncio.wait_for(asyncio.shield(worker.ended), 60) == -signal.SIGKILL

        worker_group.workers.append(await worker_group.start(ordering="partition", max_attempts=ATTEMPTS))
        await worker_group.wait_until_settled()

        (dead_letter,) = await worker_group.topics.messages("job.dlq")
        assert header(dead_letter, "error-class") == "CrashedTooOftenError"
        assert header(dead_letter, "attempts") == str(SUSPECT_AFTER + ATTEMPTS + 1)
        runs = Counter(line.work for line in worker_group.effects.lines() if line.what == "begin")
        assert runs == {"killer": SUSPECT_AFTER + ATTEMPTS, "following": 1}
        assert await worker_group.workers[0].end(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(30)
async def test_thirty_events_next_to_a_poison_event_are_handled(crash_servers: Servers) -> None:
    async with (
        ForkServer() as fork_server,
        WorkerGroup.open(crash_servers, fork_server, "neighbors", random.Random(0), size=0) as worker_group,
    ):
        deadly = Job(work="killer", kind="deadly", seconds=HEALTHY / 5, aggregate_id="killer")
        healthy = [Job(work=f"healthy-{number}", seconds=HEALTHY, aggregate_id=f"{number}") for number in range(30)]
        await worker_group.topics.publish([*healthy[:15], deadly, *healthy[15:]])
        crashes = 0
        while not await worker_group.topics.settled(worker_group.order.group):
            worker = await worker_group.start(ordering="none", max_attempts=5)
            settled = asyncio.create_task(worker_group.wait_until_settled())
            either: set[asyncio.Future[Any]] = {settled, worker.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
            if worker.ended.done():
                crashes += 1
            else:
                assert await worker.end(signal.SIGTERM) == 0

        dead_letters = await worker_group.topics.messages("job.dlq")
        assert [header(dead_letter, "error-class") for dead_letter in dead_letters] == ["CrashedTooOftenError"]
        done = {line.work for line in worker_group.effects.lines() if line.what == "effect"}
        assert done == {job.work for job in healthy}
        assert crashes <= SUSPECT_AFTER + 5


@dataclass
class Tasks:
    """Processes that handle tasks, and the effects and records of their work."""

    bootstrap: str
    folder: Path
    group: str
    publisher: EventPublisher
    store: RedisIdempotencyRepository
    effects: Effects

    def service(self, name: str) -> ServiceProcess:
        return ServiceProcess(
            "tests.kafka_faults.application:platform",
            "--settings",
            str(self.folder / "settings.toml"),
            "--json",
            log=self.folder / f"{name}.log",
            env={"FAULTS_EFFECTS": str(self.folder)},
        )

    def started(self, work: str) -> list[int]:
        """Return the attempts that were started."""
        return [line.attempt for line in self.effects.lines() if (line.what, line.work) == ("begin", work)]

    async def records(self) -> dict[str, IdempotencyRecord]:
        """Return the records by event id."""
        records = [record async for record in self.store.scan("idempotency:")]
        return {record.key.rpartition(":")[2]: record for record in records}

    async def completed(self, task: TaskGiven) -> bool:
        record = (await self.records()).get(task.event_id)
        return record is not None and record.status is IdempotencyStatus.COMPLETED

    async def settled(self, *tasks: TaskGiven) -> None:
        """Wait until the group has committed all tasks, and check that each was done and completed once."""
        async with asyncio.timeout(60):
            while sum((await self._offsets()).values()) < len(tasks):  # noqa: ASYNC110  # the broker sends no notification
                await asyncio.sleep(0.1)
        self.effects.judge({task.work for task in tasks})
        assert self.effects.judge_records((await self.records()).values())["completed"] == len(tasks)

    async def _offsets(self) -> dict[TopicPartition, int]:
        return await servers.committed(self.bootstrap, self.group)


@pytest.fixture
async def tasks(
    kafka: Kafka, topic_prefix: str, redis_url: str, redis_client: Redis, tmp_path: Path
) -> AsyncIterator[Tasks]:
    await kafka.create_topics({f"{topic_prefix}task_given": 1})
    effects = Effects(tmp_path)
    effects.prepare()
    publisher = EventPublisher(kafka_settings(kafka, topic_prefix))
    store = RedisIdempotencyRepository(redis_client)
    yield Tasks(kafka.bootstrap, tmp_path, f"{topic_prefix}tasks", publisher, store, effects)
    await publisher.close()


@pytest.mark.scenario(29)
async def test_a_second_sigterm_ends_the_drain_and_the_next_worker_handles_the_rest_once(
    tasks: Tasks, topic_prefix: str, redis_url: str
) -> None:
    write_settings(tasks, topic_prefix, redis_url, drain=LONG)
    long, short = TaskGiven(work="long", before=LONG), TaskGiven(work="short")
    with tasks.service("first") as first:
        await tasks.publisher.publish(long, short)
        async with asyncio.timeout(60):
            while not (tasks.started("long") and await tasks.completed(short)):  # noqa: ASYNC110  # neither does Redis
                await asyncio.sleep(0.05)
        first.terminate()
        await asyncio.to_thread(first.wait_for_line, "draining: waiting for running handlers")
        first.terminate()
        assert await asyncio.to_thread(first.wait, EXIT_TIMEOUT) == 1

    with tasks.service("second"):
        await tasks.settled(long, short)

    assert (tasks.started("long"), tasks.started("short")) == ([1, 2], [1])
    assert "Traceback" not in first.output


@pytest.mark.scenario(29)
async def test_handlers_get_the_drain_timeout_after_a_sigterm(tasks: Tasks, topic_prefix: str, redis_url: str) -> None:
    write_settings(tasks, topic_prefix, redis_url, drain=GRACE)
    long, brief = TaskGiven(work="long", before=LONG), TaskGiven(work="brief", before=GRACE / 2)
    with tasks.service("first") as first:
        await tasks.publisher.publish(long, brief)
        await eventually(lambda: tasks.started("long") and tasks.started("brief"), state=lambda: first.output)
        signalled_at = time.monotonic()
        first.terminate()
        assert await asyncio.to_thread(first.wait, GRACE + EXIT_TIMEOUT) == 0
        assert time.monotonic() - signalled_at > GRACE - 0.5

    with tasks.service("second"):
        await tasks.settled(long, brief)

    assert (tasks.started("long"), tasks.started("brief")) == ([1, 2], [1])
    assert "Traceback" not in first.output


def test_a_leak_of_two_megabytes_per_hour_is_detected_in_half_an_hour_of_noisy_samples(tmp_path: Path) -> None:
    """The noise is larger than in a soak: a tenth of a megabyte, and steps of half a megabyte."""
    steady, leaking = tmp_path / "steady", tmp_path / "leaking"
    write_samples(steady, bytes_per_hour=0)
    write_samples(leaking, bytes_per_hour=2 * 2**20)

    assert abs(soak.judge_samples(steady, judged=True)["rss_kib_an_hour"]) < 512
    with pytest.raises(ViolationError, match="memory grows"):
        soak.judge_samples(leaking, judged=True)


def write_samples(path: Path, *, bytes_per_hour: float) -> None:
    rng = random.Random(3)
    seconds = range(0, 1800, 2)
    lines = [
        [at, 90 * 2**20 + bytes_per_hour * at / 3600 + rng.gauss(0, 2**20 / 10) + (at // 60 % 2) * 2**19, 10**6, 20, 15]
        for at in seconds
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_settings(tasks: Tasks, prefix: str, redis_url: str, *, drain: float) -> None:
    (tasks.folder / "settings.toml").write_text(f"""
[kafka]
bootstrap_servers = "{tasks.bootstrap}"
topic_prefix = "{prefix}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 0.5
rebalance_timeout_seconds = 400
[store]
url = "{redis_url}"
timeout_seconds = 0.6
[idempotency]
processing_timeout_seconds = {LEASE}
[services.tasks]
group_id = "{tasks.group}"
ordering = "none"
drain_timeout_seconds = {drain}
commit_interval_seconds = 0.2
[telemetry]
metrics_port = 0
""")
