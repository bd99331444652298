"""Workers that die at random moments, are told to end twice, or are killed by a message; on real servers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from integr8s_idem import EventPublisher
from tests.campaigns.figures import ViolationError
from tests.crashes import random_kills, soak
from tests.crashes.crew import Crew
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, open_ground
from tests.crashes.jobs import Job
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.processes import ServiceProcess
from tests.support.shop import OrderPlaced, journal_of
from tests.support.workers import header, kafka_settings

pytestmark = pytest.mark.kafka

ATTEMPTS = 3
LEASE = 2.0
LONG = 300.0
"""Seconds of a handler that nobody waits for."""


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    need_kafka(own=True)
    async with open_ground() as ground:
        yield ground


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(63)
def test_workers_killed_at_random_moments_lose_nothing_and_keep_the_order_of_each_key() -> None:
    need_kafka(own=True)

    figures = random_kills.run(0, random_kills.CAMPAIGN.in_test)

    assert figures["kills"] == random_kills.CAMPAIGN.in_test
    assert figures["lost"] == figures["fenced_repeats"] == 0


@pytest.mark.slow
@pytest.mark.scenario(30)
async def test_a_message_that_kills_every_worker_is_dead_lettered_and_its_partition_moves_on(ground: Ground) -> None:
    async with Nursery() as nursery, Crew.hired(ground, nursery, "deadly", random.Random(0), size=0) as crew:
        deadly = Job(work="killer", kind="deadly", aggregate_id="one")
        behind = Job(work="behind", aggregate_id="one")
        await crew.topics.publish([deadly, behind])
        for _ in range(ATTEMPTS):
            worker = await crew.start(ordering="partition", max_attempts=ATTEMPTS)
            assert await asyncio.wait_for(asyncio.shield(worker.ended), 60) == -signal.SIGKILL

        crew.workers.append(await crew.start(ordering="partition", max_attempts=ATTEMPTS))
        await crew.quiet()

        (letter,) = await crew.topics.messages("job.dlq")
        assert header(letter, "error-class") == "CrashedTooOftenError"
        assert header(letter, "attempts") == str(ATTEMPTS + 1)
        runs = Counter(line.work for line in crew.effects.lines() if line.what == "begin")
        assert runs == {"killer": ATTEMPTS, "behind": 1}
        assert await crew.workers[0].end(signal.SIGTERM) == 0


@pytest.mark.scenario(29)
async def test_a_second_sigterm_ends_the_drain_and_the_next_worker_does_the_rest_once(
    kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    await kafka.create_topics({f"{topic_prefix}order_placed": 1, f"{topic_prefix}order_paid": 1})
    (tmp_path / "settings.toml").write_text(settings_of(kafka, topic_prefix, redis_url))
    publisher = EventPublisher(kafka_settings(kafka, topic_prefix))
    journal = tmp_path / "journal"
    with service(tmp_path, "first") as first:
        await publisher.publish(OrderPlaced(order_id="long", seconds=LONG), OrderPlaced(order_id="short"))
        await eventually(
            lambda: ended(journal) == {"short": 1} and len(journal_of(journal)) == 3, state=lambda: first.output
        )
        first.terminate()
        await asyncio.to_thread(first.wait_for_line, "stopping: running handlers may end")
        first.terminate()
        assert await asyncio.to_thread(first.wait, 30) == 1

    with service(tmp_path, "second") as second:
        await eventually(lambda: len(begun(journal)["long"]) == 2, state=lambda: second.output)

    await publisher.close()
    runs = begun(journal)
    assert runs["long"] == [1, 2]
    # Its handler had ended; whether its completion was written before the second signal, the machine decides.
    assert runs["short"] in ([1], [1, 2])
    assert "Traceback" not in first.output


def test_a_leak_of_two_megabytes_an_hour_is_found_in_half_an_hour_of_noise(tmp_path: Path) -> None:
    """The noise is larger than what a soak showed: a tenth of a megabyte around, and steps of half of one."""
    steady, leaking = tmp_path / "steady", tmp_path / "leaking"
    write_samples(steady, bytes_an_hour=0)
    write_samples(leaking, bytes_an_hour=2 * 2**20)

    assert abs(soak.weighed(steady, judged=True)["rss_kib_an_hour"]) < 512
    with pytest.raises(ViolationError, match="memory grows"):
        soak.weighed(leaking, judged=True)


def write_samples(path: Path, *, bytes_an_hour: float) -> None:
    dice = random.Random(3)
    seconds = range(0, 1800, 2)
    lines = [
        [at, 90 * 2**20 + bytes_an_hour * at / 3600 + dice.gauss(0, 2**20 / 10) + (at // 60 % 2) * 2**19, 10**6, 20, 15]
        for at in seconds
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def settings_of(kafka: Kafka, prefix: str, redis_url: str) -> str:
    return f"""
[kafka]
bootstrap_servers = "{kafka.bootstrap}"
topic_prefix = "{prefix}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 0.5
rebalance_timeout_seconds = 400
[store]
url = "{redis_url}"
timeout_seconds = 0.6
[idempotency]
processing_timeout_seconds = {LEASE}
[services.billing]
group_id = "{prefix}billing"
ordering = "none"
drain_timeout_seconds = {LONG}
commit_interval_seconds = 0.2
[telemetry]
metrics_port = 0
"""


def service(folder: Path, name: str) -> ServiceProcess:
    return ServiceProcess(
        "tests.support.shop:platform",
        "--settings",
        str(folder / "settings.toml"),
        "--json",
        log=folder / f"{name}.log",
        env={"SHOP_JOURNAL": str(folder / "journal")},
    )


def begun(journal: Path) -> dict[str, list[int]]:
    """By order: the attempts that began."""
    found: dict[str, list[int]] = {"long": [], "short": []}
    for what, order, attempt, _ in journal_of(journal):
        if what == "begin":
            found[order].append(attempt)
    return found


def ended(journal: Path) -> Counter[str]:
    return Counter(order for what, order, _, _ in journal_of(journal) if what == "end")
