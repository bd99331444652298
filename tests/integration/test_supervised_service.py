"""`integr8s-idem run --processes 2` on a real Kafka and a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integr8s_idem import EventPublisher
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.shop import OrderPlaced, journal_of
from tests.support.supervised import SupervisedProcess, gone, supervised
from tests.support.workers import kafka_settings

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PARTITIONS = 4


@dataclass
class Setting:
    """The folder and the publisher of one test."""

    folder: Path
    publisher: EventPublisher

    def arguments(self) -> list[str]:
        settings = str(self.folder / "settings.toml")
        return ["tests.support.shop:platform", "--settings", settings, "--json", "--processes", "2"]

    @property
    def environment(self) -> dict[str, str]:
        return {"SHOP_JOURNAL": str(self.folder / "journal")}

    def times(self, what: str) -> Counter[str]:
        """Return how often each order began or ended."""
        return Counter(order for noted, order, _, _ in journal_of(self.folder / "journal") if noted == what)

    def pids(self) -> set[int]:
        """Return the processes that ended an order."""
        return {pid for what, _, _, pid in journal_of(self.folder / "journal") if what == "end"}

    async def publish(self, *orders: int, seconds: float = 0.0) -> None:
        events = [OrderPlaced(order_id=str(each), aggregate_id=str(each), seconds=seconds) for each in orders]
        await self.publisher.publish(*events)


@pytest.fixture
async def setting(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Setting]:
    await kafka.create_topics({f"{topic_prefix}order_placed": PARTITIONS, f"{topic_prefix}order_paid": 1})
    (tmp_path / "settings.toml").write_text(
        f"""
[kafka]
bootstrap_servers = "{kafka.bootstrap}"
topic_prefix = "{topic_prefix}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 0.5
metadata_max_age_seconds = 1
[store]
url = "{redis_url}"
timeout_seconds = 1
[idempotency]
processing_timeout_seconds = 4
default_ttl_seconds = 3600
[services.billing]
group_id = "{topic_prefix}billing"
ordering = "none"
commit_interval_seconds = 0.2
retry_max_seconds = 1
drain_timeout_seconds = 10
[telemetry]
metrics_port = 0
"""
    )
    publisher = EventPublisher(kafka_settings(kafka, topic_prefix))
    yield Setting(tmp_path, publisher)
    await publisher.close()


async def until_shared(process: SupervisedProcess) -> None:
    """Wait until each of two workers has half of the partitions."""

    def is_shared() -> bool:
        assert process.running, process.output
        half = [line for line in process.output.splitlines() if f"assigned partitions: {PARTITIONS // 2}" in line]
        return all(f'"worker_process": {number}' in "".join(half) for number in (1, 2))

    await eventually(is_shared, state=lambda: process.output)
    await eventually(lambda: process.get("/readyz")[0] == 200, state=lambda: process.output)


async def test_two_processes_share_a_topic_and_are_reported_as_one(setting: Setting) -> None:
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await until_shared(process)
        await setting.publish(*range(60))
        await eventually(lambda: len(setting.times("end")) == 60, state=lambda: process.output)
        await eventually(lambda: process.metric("idempotency_consumer_lag") == 0, state=lambda: process.output)
        health = process.health("/healthz")

        assert process.metric("idempotency_events_handled_total") == 60
        assert process.metric("idempotency_handler_failures_total") == 0
        assert process.metric("idempotency_store_up") == 1
        assert process.metric("idempotency_worker_processes") == 2
        assert health["live"] is True
        assert {each["pid"] for each in health["worker_processes"]} == setting.pids()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0, process.output

    assert set(setting.times("begin").values()) == {1}


async def test_events_of_a_killed_process_are_all_handled_and_it_is_started_again(setting: Setting) -> None:
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await until_shared(process)
        await setting.publish(*range(40))
        await eventually(lambda: len(setting.times("end")) == 40, state=lambda: process.output)
        await eventually(lambda: process.metric("idempotency_events_handled_total") == 40)
        await setting.publish(*range(40, 80), seconds=2)
        await eventually(lambda: len(setting.times("begin")) == 80, state=lambda: process.output)
        process.workers[2].kill()
        await eventually(lambda: len(setting.times("end")) == 80, state=lambda: process.output)
        await eventually(lambda: process.get("/readyz")[0] == 200, state=lambda: process.output)
        await setting.publish(*range(80, 120))
        await eventually(lambda: len(setting.times("end")) == 120, state=lambda: process.output)
        await eventually(lambda: process.metric("idempotency_consumer_lag") == 0, state=lambda: process.output)
        handled = process.metric("idempotency_events_handled_total")
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0, process.output

    assert set(setting.times("end").values()) == {1}
    assert len(setting.pids()) == 3
    # What the process handled until the last scrape still counts; what came after it died with the process.
    assert 100 <= handled <= 120


async def test_events_that_kill_their_processes_do_not_end_the_supervisor(setting: Setting) -> None:
    orders = [OrderPlaced(order_id=str(each), aggregate_id=str(each), kills=each % 2 == 0) for each in range(12)]
    await setting.publisher.publish(*orders)
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await eventually(lambda: process.output.count("killed by SIGKILL") >= 8 or not process.running)

        assert process.running, process.output
        assert "restarting it would not help" not in process.output


async def test_sigterm_waits_for_the_handlers_of_all_processes(setting: Setting) -> None:
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await until_shared(process)
        await setting.publish(*range(20), seconds=2)
        await eventually(lambda: len(setting.times("begin")) == 20, state=lambda: process.output)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0, process.output

    assert setting.times("end") == {str(each): 1 for each in range(20)}


async def test_handlers_finish_when_the_supervisor_is_killed(setting: Setting) -> None:
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await until_shared(process)
        await setting.publish(*range(20), seconds=2)
        await eventually(lambda: len(setting.times("begin")) == 20, state=lambda: process.output)
        workers = list(process.workers.values())
        process.kill()
        await asyncio.to_thread(gone, workers)

    assert setting.times("end") == {str(each): 1 for each in range(20)}


async def test_a_second_signal_stops_the_handlers_of_all_processes(setting: Setting) -> None:
    with supervised(*setting.arguments(), log=setting.folder / "log", env=setting.environment) as process:
        await until_shared(process)
        await setting.publish(*range(10), seconds=100)
        await eventually(lambda: len(setting.times("begin")) == 10, state=lambda: process.output)
        process.terminate()
        process.wait_for_line("draining: waiting for running handlers")
        process.terminate()

        assert await asyncio.to_thread(process.wait, 60) == 1, process.output
    assert not setting.times("end")


async def test_each_process_is_a_static_member_with_an_id_of_its_own(setting: Setting) -> None:
    environment = {**setting.environment, "INTEGR8S_IDEM_KAFKA__GROUP_INSTANCE_ID": "{hostname}"}
    with supervised(*setting.arguments(), log=setting.folder / "log", env=environment) as process:
        await until_shared(process)
        before = process.output.count("assigned partitions")
        process.workers[1].kill()
        await setting.publish(*range(40))
        await eventually(lambda: len(setting.times("end")) == 40, state=lambda: process.output)

        assert process.output.count("assigned partitions") == before + 1, "the other process kept its partitions"
        assert "MemberFencedError" not in process.output
