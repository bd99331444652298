"""Workers as processes: killed, stalled, terminated, scraped."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from integr8s_idem import EventPublisher
from integr8s_idem.config import KafkaSettings
from integr8s_idem.events import encode_event
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.processes import ServiceProcess
from tests.support.shop import OrderPlaced, journal_of
from tests.support.workers import kafka_settings

pytestmark = pytest.mark.kafka

LEASE = 4.0

SLOW_MACHINE = 2.0
"""Seconds that a busy machine may add to a measured time."""


@dataclass
class Setting:
    """The folder, settings and publisher of one test."""

    folder: Path
    publisher: EventPublisher
    kafka: KafkaSettings

    @property
    def journal(self) -> list[tuple[str, str, int, int]]:
        return journal_of(self.folder / "journal")

    def worker(self, name: str, mode: str = "enforce") -> ServiceProcess:
        return ServiceProcess(
            "tests.support.shop:platform",
            "--settings",
            str(self.folder / "settings.toml"),
            "--json",
            log=self.folder / f"{name}.log",
            env={"SHOP_JOURNAL": str(self.folder / "journal"), "INTEGR8S_IDEM_SERVICES__BILLING__MODE": mode},
        )

    def times(self, what: str) -> dict[str, int]:
        """Return how often each order began or ended."""
        counted: dict[str, int] = {}
        for noted, order, _, _ in self.journal:
            if noted == what:
                counted[order] = counted.get(order, 0) + 1
        return counted


@pytest.fixture
async def setting(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Setting]:
    await kafka.create_topics({f"{topic_prefix}order_placed": 2, f"{topic_prefix}order_paid": 1})
    settings = kafka_settings(kafka, topic_prefix)
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
processing_timeout_seconds = {LEASE}
default_ttl_seconds = 3600
[services.billing]
group_id = "{topic_prefix}billing"
ordering = "none"
commit_interval_seconds = 0.2
retry_max_seconds = 1
drain_timeout_seconds = 10
[telemetry]
metrics_port = 0
keys_active_interval_seconds = 0.2
"""
    )
    publisher = EventPublisher(settings)
    yield Setting(tmp_path, publisher, settings)
    await publisher.close()


@pytest.mark.scenario(20)
async def test_a_worker_killed_in_its_handler_is_taken_over_within_a_lease(setting: Setting) -> None:
    events = [OrderPlaced(order_id=str(number), seconds=2.0) for number in range(6)]
    with setting.worker("first") as first:
        first.wait_for_line("metrics and health")
        await setting.publisher.publish(*events)
        await eventually(lambda: len(setting.times("begin")) == 6)
        first.kill()
        killed_at = time.monotonic()

        with setting.worker("second") as second:
            await eventually(lambda: len(setting.times("end")) == 6, state=lambda: second.output)
            took = time.monotonic() - killed_at
            second.terminate()
            assert second.wait() == 0

    assert setting.times("end") == {str(number): 1 for number in range(6)}
    assert {attempt for what, _, attempt, _ in setting.journal if what == "end"} == {2}
    # Kafka's session timeout, the rest of the lease, the handler, and a margin for a busy machine.
    assert took < 6 + LEASE + 2 + 15


async def test_what_a_killed_observer_was_handling_is_handled_and_then_guarded(setting: Setting) -> None:
    events = [OrderPlaced(order_id=str(number), seconds=1.0) for number in range(6)]
    with setting.worker("first", "observe") as first:
        first.wait_for_line("metrics and health")
        await setting.publisher.publish(*events)
        await eventually(lambda: len(setting.times("begin")) == 6)
        first.kill()
        with setting.worker("second", "observe") as second:
            await eventually(lambda: len(setting.times("end")) == 6, state=lambda: second.output)
            second.terminate()
            assert second.wait() == 0
    ended = setting.times("end")

    with setting.worker("third") as third:
        await setting.publisher.publish(*events)
        address = _address(third)
        await eventually(lambda: _metric(address, "idempotency_duplicates_blocked_total") >= 6)
        third.terminate()
        assert third.wait() == 0

    assert setting.times("end") == ended
    assert "only observes" in second.output
    assert "only observes" not in third.output


async def test_a_worker_too_many_says_that_it_has_no_partitions(setting: Setting) -> None:
    with setting.worker("first") as first, setting.worker("second") as second, setting.worker("third") as third:
        workers = (first, second, third)
        await eventually(
            lambda: any("this worker has no partitions" in worker.output for worker in workers),
            state=lambda: "\n".join(worker.output for worker in workers),
        )


@pytest.mark.scenario(3)
async def test_a_waiting_duplicate_takes_over_within_a_lease_and_a_second(setting: Setting) -> None:
    """No rebalance is needed: the other worker already has the event and waits for the lease to end."""
    with setting.worker("first") as first, setting.worker("second") as second:
        for worker in (first, second):
            worker.wait_for_line("assigned partitions: 1")
        event = OrderPlaced(order_id="0", seconds=2.0)
        await deliver(setting, event, partition=0)
        await eventually(lambda: setting.times("begin") == {"0": 1})
        await deliver(setting, event, partition=1)
        holder, other = (first, second) if setting.journal[0][3] == first.pid else (second, first)
        await asyncio.to_thread(_wait_until_it_waits, other)
        holder.kill()
        killed_at = time.monotonic()
        await eventually(lambda: setting.times("begin") == {"0": 2}, state=lambda: other.output)
        took = time.monotonic() - killed_at
        await eventually(lambda: setting.times("end") == {"0": 1})

    assert [(attempt, pid) for what, _, attempt, pid in setting.journal if what == "end"] == [(2, other.pid)]
    assert took < LEASE + 1 + SLOW_MACHINE


async def deliver(setting: Setting, event: OrderPlaced, *, partition: int) -> None:
    """Publish a duplicate of `event` to a partition."""
    producer = AIOKafkaProducer(bootstrap_servers=setting.kafka.bootstrap_servers)
    await producer.start()
    topic = setting.publisher.topic_of(event.event_type)
    await producer.send_and_wait(topic, encode_event(event), partition=partition)
    await producer.stop()


def _wait_until_it_waits(worker: ServiceProcess) -> None:
    address = _address(worker)
    give_up_at = time.monotonic() + 30
    while _metric(address, "idempotency_waits_total") == 0:
        assert time.monotonic() < give_up_at, worker.output
        time.sleep(0.05)


@pytest.mark.scenario(33)
async def test_a_stalled_worker_that_resumes_after_its_lease_changes_nothing(setting: Setting) -> None:
    """It is stopped beyond lease and session, another worker finishes, and its own completion is refused."""
    with setting.worker("first") as first, setting.worker("second") as second:
        first.wait_for_line("metrics and health")
        second.wait_for_line("metrics and health")
        await setting.publisher.publish(OrderPlaced(order_id="0", seconds=3.0))
        await eventually(lambda: setting.times("begin") == {"0": 1})
        holder, other = (first, second) if setting.journal[0][3] == first.pid else (second, first)
        holder.stop_signal()
        await eventually(lambda: setting.times("end") == {"0": 1}, state=lambda: other.output)
        holder.continue_signal()
        holder.wait_for_line("lost the reservation")

        await setting.publisher.publish(OrderPlaced(order_id="1"))
        await eventually(lambda: setting.times("end").get("1") == 1)

    [(attempt, pid)] = [
        (attempt, pid) for what, order, attempt, pid in setting.journal if what == "end" and order == "0"
    ]
    assert pid == other.pid
    assert attempt >= 2, "more, if a busy machine prevented a start"


async def test_sigterm_waits_for_running_handlers_and_the_next_worker_repeats_none(setting: Setting) -> None:
    events = [OrderPlaced(order_id=str(number), seconds=1.0) for number in range(8)]
    with setting.worker("first") as first:
        first.wait_for_line("metrics and health")
        await setting.publisher.publish(*events)
        await eventually(lambda: len(setting.times("begin")) == 8)
        first.terminate()
        assert first.wait() == 0
    assert setting.times("end") == {str(number): 1 for number in range(8)}

    with setting.worker("second") as second:
        await setting.publisher.publish(OrderPlaced(order_id="last"))
        await eventually(lambda: setting.times("end").get("last") == 1, state=lambda: second.output)

    assert set(setting.times("begin").values()) == {1}


@pytest.mark.scenario(32)
@pytest.mark.parametrize("how", [{"seconds": -1.0}, {"thread_seconds": 120.0}], ids=["a task", "a thread"])
async def test_a_handler_that_cannot_be_cancelled_does_not_keep_the_process_alive(
    setting: Setting, how: dict[str, float]
) -> None:
    with setting.worker("only") as worker:
        worker.wait_for_line("metrics and health")
        await setting.publisher.publish(OrderPlaced.model_validate({"order_id": "0", **how}))
        await eventually(lambda: setting.times("begin"))
        worker.terminate()
        worker.wait_for_line("draining")
        worker.terminate()

        assert await asyncio.to_thread(worker.wait, 60) == 1
        assert "exiting with handlers that are still running" in worker.output


async def test_a_running_worker_updates_its_metrics_and_serves_its_health(setting: Setting) -> None:
    event = OrderPlaced(order_id="0", seconds=1.0)
    with setting.worker("only") as worker:
        address = _address(worker)
        await setting.publisher.publish(event)
        await eventually(lambda: _metric(address, "idempotency_keys_active") == 1.0)
        assert _get(f"{address}/readyz")[0] == 200
        await eventually(lambda: setting.times("end"))
        await eventually(lambda: _metric(address, "idempotency_keys_active") == 0.0)
        await setting.publisher.publish(event)
        await eventually(lambda: _metric(address, "idempotency_duplicates_blocked_total") == 1.0)

        assert _metric(address, "idempotency_cache_misses_total") == 1.0
        assert _metric(address, "idempotency_cache_hits_total") == 1.0
        assert _get(f"{address}/healthz")[0] == 200


def _address(worker: ServiceProcess) -> str:
    line = worker.wait_for_line("metrics and health")
    return next(word for word in line.replace('"', " ").split() if word.startswith("http://"))


def _get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status, answer.read().decode()


def _metric(address: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    lines = _get(f"{address}/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
