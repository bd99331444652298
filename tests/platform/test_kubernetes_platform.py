"""The platform with `runner = "kubernetes"`, on a stand-in for the API server instead of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select, update

from integr8s_idem import EventPublisher
from integr8s_idem.config import KafkaSettings
from integr8s_idem.embedded import embedded
from integr8s_idem.engine.work import Attempt
from services.database import Database, pods, results
from services.events import (
    CreatePodCommand,
    DeletePodCommand,
    ExecutionCancelled,
    ExecutionFailed,
    ExecutionRequested,
)
from services.k8s_worker.runners import chosen_runner
from services.k8s_worker.worker import PodWorker, pod_name_of
from services.settings import PlatformSection
from tests.platform.conftest import RecordingPublisher
from tests.support.conditions import eventually
from tests.support.kubernetes.running import Gate
from tests.support.kubernetes.server import KubernetesStandIn
from tests.support.processes import ServiceProcess

ROOT = Path(__file__).parents[2]
LEASE = 3.0

SETTINGS = """
[kafka]
bootstrap_servers = "{kafka}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 1
metadata_max_age_seconds = 1
retention_check = "off"
[store]
kind = "redis"
url = "{redis}"
timeout_seconds = 0.9
[idempotency]
processing_timeout_seconds = {lease}
[telemetry]
metrics_port = 0
[services.k8s-worker]
retry_max_seconds = 1
ordering = "key"
[platform]
database_url = "{database}"
runner = "kubernetes"
[platform.kubernetes]
kubeconfig = "{kubeconfig}"
ttl_seconds = 60
"""


@dataclass
class Setting:
    """Servers and the processes of the platform that use them."""

    folder: Path
    kafka: KafkaSettings
    database: Database

    def process(self, name: str, *services: str) -> ServiceProcess:
        chosen = [part for service in services for part in ("--service", service)]
        file = str(self.folder / "settings.toml")
        arguments = ("providers:platform", *chosen, "--settings", file, "--json")
        return ServiceProcess(*arguments, log=self.folder / f"{name}.log", folder=ROOT)

    async def results(self) -> list[tuple[str, str]]:
        async with self.database.reading() as connection:
            return [tuple(row) for row in await connection.execute(select(results.c.status, results.c.stdout))]

    def has_results(self) -> bool:
        return bool(self.rows("SELECT 1 FROM results"))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(connect(self.folder / "platform.db")) as database:
            return database.execute(query).fetchall()

    async def attempts(self) -> list[int]:
        async with self.database.reading() as connection:
            return list((await connection.execute(select(pods.c.attempt))).scalars())


@pytest.fixture
async def setting(cluster: KubernetesStandIn, tmp_path: Path) -> AsyncIterator[Setting]:
    url = f"sqlite+aiosqlite:///{tmp_path}/platform.db"
    database = Database(url)
    await database.open()
    async with embedded() as servers:
        kafka, redis = servers.bootstrap_servers, servers.redis_url
        text = SETTINGS.format(kafka=kafka, redis=redis, lease=LEASE, database=url, kubeconfig=cluster.kubeconfig)
        (tmp_path / "settings.toml").write_text(text)
        yield Setting(tmp_path, KafkaSettings(bootstrap_servers=kafka), database)
    await database.close()


async def test_the_next_worker_continues_with_the_job_of_a_killed_worker(
    setting: Setting, cluster: KubernetesStandIn, gate: Gate
) -> None:
    """Two workers run the execution, but the journal shows that the script ran once."""
    publisher = EventPublisher(setting.kafka)
    with (
        setting.process("others", "coordinator", "saga-orchestrator", "result-processor") as others,
        setting.process("first", "k8s-worker") as first,
    ):
        for process in (others, first):
            await asyncio.to_thread(process.wait_for_line, "metrics and health")
        await publisher.publish(ExecutionRequested(execution_id="e1", script=gate.script, timeout_seconds=90))
        await gate.begun()
        first.kill()
        with setting.process("second", "k8s-worker") as second:
            await eventually(lambda: cluster.requests.count(("create", "jobs")) == 2, state=lambda: second.output)
            gate.open()
            await eventually(lambda: cluster.deletions, state=lambda: second.output)
            await eventually(setting.has_results, state=lambda: others.output)
            assert "runs again, attempt 2" in second.output
            assert "already exists: continuing with it" in second.output
    await publisher.close()

    assert await setting.results() == [("completed", "begun\nended\n")]
    assert await setting.attempts() == [2]
    assert gate.journal == ["begin", "end"]
    assert len(cluster.made) == len(cluster.kubelet.started) == 1
    assert cluster.deletions == [(cluster.made[0], "Background")]
    await eventually(lambda: not cluster.objects.pods)


async def test_commands_wait_in_a_retry_topic_for_room_in_the_cluster(
    setting: Setting, cluster: KubernetesStandIn, gate: Gate
) -> None:
    """The quota allows one Job.  `e2` waits until `e1` has ended; `e3` is cancelled meanwhile, and never runs."""
    cluster.most_jobs = 1
    publisher = EventPublisher(setting.kafka)
    with setting.process("all", "coordinator", "saga-orchestrator", "result-processor", "k8s-worker") as platform:
        await asyncio.to_thread(platform.wait_for_line, "metrics and health")
        await publisher.publish(ExecutionRequested(execution_id="e1", script=gate.script, timeout_seconds=90))
        await gate.begun()
        for execution in ("e2", "e3"):
            script = f"print({execution!r})"
            await publisher.publish(ExecutionRequested(execution_id=execution, script=script))
        waiting = "SELECT execution_id FROM pods WHERE state = 'running'"
        await eventually(lambda: len(setting.rows(waiting)) == 3, state=lambda: platform.output)
        await publisher.publish(ExecutionCancelled(execution_id="e3", reason="changed my mind", cancelled_by="ann"))
        ended = "SELECT execution_id, status FROM results ORDER BY execution_id"
        await eventually(lambda: setting.rows(ended) == [("e3", "failed")], state=lambda: platform.output)
        gate.open()
        await eventually(lambda: len(setting.rows(ended)) == 3, state=lambda: platform.output)
    await publisher.close()

    assert setting.rows(ended) == [("e1", "completed"), ("e2", "completed"), ("e3", "failed")]
    assert sorted(await setting.results())[1:] == [("completed", "e2\n"), ("failed", "")]
    assert '"topic": "create_pod_command.k8s-worker.retry.5s"' in platform.output
    # Neither was a Job made for `e3`, nor two for `e2`.
    assert len(cluster.made) == len(cluster.kubelet.started) == 2


FIRST = Attempt("idempotency:k8s-worker:create:1", 1, 10, float("inf"))
DELETE = DeletePodCommand(execution_id="e1", saga_id="s1", reason="cancelled by ann")


@pytest.fixture
async def worker(database: Database, cluster: KubernetesStandIn) -> AsyncIterator[PodWorker]:
    section: dict[str, Any] = {"runner": "kubernetes", "kubernetes": {"kubeconfig": str(cluster.kubeconfig)}}
    settings = PlatformSection.model_validate(section)
    async with chosen_runner(settings) as runner:
        yield PodWorker(database, settings, runner, RecordingPublisher())


def creating(worker: PodWorker, gate: Gate, attempt: Attempt = FIRST) -> asyncio.Task[Any]:
    command = CreatePodCommand(execution_id="e1", saga_id="s1", script=gate.script, timeout_seconds=60)
    return asyncio.create_task(worker.create(command, attempt))


async def test_deleting_the_pod_ends_the_job(worker: PodWorker, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = creating(worker, gate)
    await gate.begun()

    await worker.delete(DELETE)
    outcome = await running

    assert isinstance(outcome, ExecutionFailed)
    assert (outcome.error_type, outcome.stdout) == ("deleted", "begun\n")
    assert not cluster.objects.jobs
    assert not cluster.objects.pods


@pytest.mark.parametrize("way", ["by the next attempt", "by a check"])
async def test_the_job_of_a_dead_worker_ends_when_its_pod_is_deleted(
    worker: PodWorker, cluster: KubernetesStandIn, database: Database, gate: Gate, way: str
) -> None:
    running = creating(worker, gate)
    await gate.begun()
    running.cancel()
    await asyncio.wait([running])
    assert list(cluster.objects.jobs) == [pod_name_of(FIRST.key)]

    await worker.delete(DELETE)
    if way == "by a check":
        async with database.transaction() as connection:
            await connection.execute(update(pods).values(seen_at=0))
        await worker.check()
    else:
        outcome = await creating(worker, gate, replace(FIRST, number=2, fence=11))
        assert outcome.error_type == "deleted"

    assert not cluster.objects.jobs
    await eventually(lambda: not cluster.objects.pods)
    gate.open()
    assert gate.journal == ["begin"]
