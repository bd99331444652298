from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from sqlalchemy import select, update

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import PermanentError, PublishError
from integr8s_idem.keys.fingerprints import fingerprint_of
from services.database import Database, pods
from services.events import (
    CreatePodCommand,
    DeletePodCommand,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionTimeout,
    Outcome,
    ResourceUsage,
)
from services.k8s_worker.outcomes import outcome_of
from services.k8s_worker.pods import SupersededError
from services.k8s_worker.runner import Run, RunEnd, UnsupportedLanguageError
from services.k8s_worker.worker import PodWorker, pod_name_of
from services.settings import PlatformSection
from tests.platform.conftest import RecordingPublisher

CREATE = CreatePodCommand(execution_id="e1", saga_id="s1", script="print()", timeout_seconds=5)
DELETE = DeletePodCommand(execution_id="e1", saga_id="s1", reason="cancelled by ann")
FIRST = Attempt("idempotency:k8s-worker:create:1", 1, 10, float("inf"))
SECOND = replace(FIRST, number=2, fence=11)


class FakeRunner:
    """Ends runs when stopped, or immediately."""

    def __init__(self) -> None:
        self.runs = 0
        self.discarded: list[str] = []
        self.cannot_discard = False
        self.at_once = True
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        self.runs += 1
        self.started.set()
        if command.language != "python":
            raise UnsupportedLanguageError(command.language, ("python",))
        if self.at_once:
            return Run(RunEnd.EXITED, stdout=f"run {self.runs}")
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop, self.may_end)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waiting:
                wait.cancel()
        return Run(RunEnd.STOPPED if stop.is_set() else RunEnd.EXITED, stdout=f"run {self.runs}")

    async def discard(self, pod_name: str) -> None:
        if self.cannot_discard:
            raise ConnectionError("the cluster is down")
        self.discarded.append(pod_name)


@dataclass
class Worker:
    """The k8s worker of one process."""

    pods: PodWorker
    runner: FakeRunner
    publisher: RecordingPublisher
    database: Database

    async def begin(self, attempt: Attempt = FIRST) -> asyncio.Task[Outcome]:
        """Create the pod and return while its script runs."""
        self.runner.at_once = False
        task = asyncio.create_task(self.pods.create(CREATE, attempt))
        await self.runner.started.wait()
        return task

    async def row(self) -> tuple[str, int]:
        async with self.database.reading() as connection:
            row = (await connection.execute(select(pods.c.state, pods.c.attempt))).one()
            return row.state, row.attempt

    async def let_heartbeat_lapse(self) -> None:
        async with self.database.transaction() as connection:
            await connection.execute(update(pods).values(seen_at=0))


@pytest.fixture
def worker(database: Database, settings: PlatformSection, publisher: RecordingPublisher) -> Worker:
    runner = FakeRunner()
    return Worker(PodWorker(database, settings, runner, publisher), runner, publisher, database)


@pytest.fixture
def another(database: Database, settings: PlatformSection, publisher: RecordingPublisher) -> Worker:
    runner = FakeRunner()
    return Worker(PodWorker(database, settings, runner, publisher), runner, publisher, database)


async def cancelled(task: asyncio.Task[Outcome]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_a_pod_is_announced_before_it_runs(worker: Worker) -> None:
    running = await worker.begin()

    (created,) = worker.publisher.events
    assert created.event_type == "pod_created"
    assert created.model_dump()["pod_name"] == pod_name_of(FIRST.key)
    worker.runner.may_end.set()
    await running


async def test_a_rerun_after_a_crash_runs_the_script_again_and_logs_it(
    worker: Worker, another: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    await cancelled(await worker.begin())

    outcome = await another.pods.create(CREATE, SECOND)

    assert isinstance(outcome, ExecutionCompleted)
    assert another.runner.runs == 1
    assert await another.row() == ("ended", 2)
    assert "runs again, attempt 2" in caplog.text


async def test_a_rerun_after_the_run_publishes_the_same_outcome_without_running(
    worker: Worker, another: Worker
) -> None:
    """The worker died after the script ended, before it published the outcome."""
    lost = await worker.pods.create(CREATE, FIRST)

    again = await another.pods.create(CREATE, SECOND)

    assert another.runner.runs == 0
    assert again == lost
    assert fingerprint_of(again) == fingerprint_of(lost)


async def test_both_attempts_announce_the_same_pod(worker: Worker, another: Worker) -> None:
    await cancelled(await worker.begin())

    await another.pods.create(CREATE, SECOND)

    first, second = worker.publisher.events
    assert (first.event_id, fingerprint_of(first)) == (second.event_id, fingerprint_of(second))


async def test_no_script_runs_while_the_broker_is_down(worker: Worker) -> None:
    worker.publisher.broken = True

    with pytest.raises(PublishError):
        await worker.pods.create(CREATE, FIRST)

    assert worker.runner.runs == 0


async def test_the_outcome_of_a_superseded_attempt_is_ignored(worker: Worker, another: Worker) -> None:
    """It stalled beyond its lease, and another worker has taken over the pod."""
    stalled = await worker.begin(FIRST)
    running = await another.begin(SECOND)

    worker.runner.may_end.set()
    with pytest.raises(SupersededError):
        await stalled

    another.runner.may_end.set()
    await running
    assert await worker.row() == ("ended", 2)


async def test_an_outdated_attempt_does_not_start(worker: Worker, another: Worker) -> None:
    running = await worker.begin(SECOND)

    with pytest.raises(SupersededError):
        await another.pods.create(CREATE, FIRST)

    assert another.runner.runs == 0
    worker.runner.may_end.set()
    await running


async def test_an_execution_cannot_have_a_second_pod(worker: Worker, another: Worker) -> None:
    running = await worker.begin()

    with pytest.raises(PermanentError, match="run by pod"):
        await another.pods.create(CREATE, replace(SECOND, key="idempotency:k8s-worker:create:2"))

    worker.runner.may_end.set()
    await running


async def test_deleting_a_pod_ends_its_run(worker: Worker) -> None:
    running = await worker.begin()

    assert await worker.pods.delete(DELETE) is None

    outcome = await running
    assert isinstance(outcome, ExecutionFailed)
    assert (outcome.error_type, outcome.stdout) == ("deleted", "run 1")


async def test_deleting_a_pod_ends_its_run_in_another_worker(worker: Worker, another: Worker) -> None:
    running = await worker.begin()

    await another.pods.delete(DELETE)
    await worker.pods.check()

    outcome = await running
    assert isinstance(outcome, ExecutionFailed)
    assert outcome.error_type == "deleted"


async def test_an_execution_deleted_first_never_runs_and_both_return_the_same_outcome(worker: Worker) -> None:
    deleted = await worker.pods.delete(DELETE)
    created = await worker.pods.create(CREATE, FIRST)

    assert worker.runner.runs == 0
    assert deleted is not None
    assert (deleted.event_id, fingerprint_of(deleted)) == (created.event_id, fingerprint_of(created))


async def test_deleting_twice_returns_the_same_outcome(worker: Worker, another: Worker) -> None:
    """The worker died between the commit and publishing."""
    lost = await worker.pods.delete(DELETE)

    assert await another.pods.delete(DELETE) == lost


async def test_deleting_an_ended_pod_has_no_effect(worker: Worker) -> None:
    outcome = await worker.pods.create(CREATE, FIRST)

    assert await worker.pods.delete(DELETE) is None
    assert await worker.pods.create(CREATE, SECOND) == outcome


async def test_a_rerun_of_a_deleted_execution_does_not_run(worker: Worker, another: Worker) -> None:
    await cancelled(await worker.begin())
    await another.pods.delete(DELETE)

    outcome = await another.pods.create(CREATE, SECOND)

    assert another.runner.runs == 0
    assert isinstance(outcome, ExecutionFailed)
    assert outcome.stderr == DELETE.reason


async def test_an_orphaned_deleted_pod_is_closed(worker: Worker, another: Worker) -> None:
    """Its worker has died and its command is not redelivered."""
    await cancelled(await worker.begin())
    await another.pods.delete(DELETE)
    await another.let_heartbeat_lapse()

    await another.pods.check()
    await another.pods.check()

    assert worker.publisher.types == ["pod_created", "execution_failed"]
    assert await another.row() == ("ended", 1)


async def test_an_orphan_stays_open_until_its_outcome_is_published(worker: Worker, another: Worker) -> None:
    await cancelled(await worker.begin())
    await another.pods.delete(DELETE)
    await another.let_heartbeat_lapse()
    another.publisher.broken = True

    with pytest.raises(PublishError):
        await another.pods.check()

    assert await another.row() == ("running", 1)


async def test_a_deleted_pod_with_a_live_worker_is_left_to_it(worker: Worker, another: Worker) -> None:
    running = await worker.begin()
    await worker.let_heartbeat_lapse()
    await worker.pods.check()
    await another.pods.delete(DELETE)

    await another.pods.check()

    assert await another.row() == ("running", 1)
    worker.runner.may_end.set()
    await running


async def test_the_resources_of_a_run_are_discarded_after_its_outcome_is_stored(worker: Worker) -> None:
    running = await worker.begin()
    assert worker.runner.discarded == []
    worker.runner.may_end.set()
    await running

    assert worker.runner.discarded == [pod_name_of(FIRST.key)]
    assert await worker.row() == ("ended", 1)


async def test_an_outcome_is_kept_if_discarding_fails(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.runner.cannot_discard = True

    outcome = await worker.pods.create(CREATE, FIRST)

    assert isinstance(outcome, ExecutionCompleted)
    assert "is left for the cluster to remove: the cluster is down" in caplog.text


async def test_a_rerun_discards_the_resources_of_a_dead_worker(worker: Worker, another: Worker) -> None:
    worker.runner.cannot_discard = True
    await worker.pods.create(CREATE, FIRST)

    await another.pods.create(CREATE, SECOND)

    assert (another.runner.runs, another.runner.discarded) == (0, [pod_name_of(FIRST.key)])


async def test_an_outcome_that_a_dead_worker_has_stored_is_found_and_its_resources_are_discarded(
    worker: Worker, another: Worker
) -> None:
    worker.runner.cannot_discard = True
    lost = await worker.pods.create(CREATE, FIRST)

    assert await another.pods.find(CREATE, SECOND) == lost
    assert (another.runner.runs, another.runner.discarded) == (0, [pod_name_of(FIRST.key)])


async def test_no_outcome_of_a_pod_is_found_before_it_has_ended(worker: Worker, another: Worker) -> None:
    assert await another.pods.find(CREATE, FIRST) is None
    running = await worker.begin()

    assert await another.pods.find(CREATE, SECOND) is None
    assert another.runner.discarded == []
    worker.runner.may_end.set()
    await running


async def test_the_outcome_of_a_pod_that_was_deleted_before_it_ran_is_found(worker: Worker) -> None:
    deleted = await worker.pods.delete(DELETE)

    assert await worker.pods.find(CREATE, SECOND) == deleted


async def test_a_superseded_attempt_discards_nothing(worker: Worker, another: Worker) -> None:
    """Another worker continues with its resources."""
    stalled = await worker.begin(FIRST)
    running = await another.begin(SECOND)
    worker.runner.may_end.set()
    with pytest.raises(SupersededError):
        await stalled

    assert worker.runner.discarded == []
    another.runner.may_end.set()
    await running


async def test_a_cancelled_run_discards_nothing(worker: Worker) -> None:
    await cancelled(await worker.begin())

    assert worker.runner.discarded == []


async def test_an_orphaned_deleted_pod_is_discarded_before_it_is_closed(worker: Worker, another: Worker) -> None:
    await cancelled(await worker.begin())
    await another.pods.delete(DELETE)
    await another.let_heartbeat_lapse()
    another.runner.cannot_discard = True

    with pytest.raises(ConnectionError):
        await another.pods.check()
    assert await another.row() == ("running", 1)

    another.runner.cannot_discard = False
    await another.pods.check()
    assert another.runner.discarded == [pod_name_of(FIRST.key)]
    assert await another.row() == ("ended", 1)


async def test_an_unsupported_language_fails_the_execution(worker: Worker) -> None:
    command = CREATE.model_copy(update={"language": "cobol"})

    outcome = await worker.pods.create(command, FIRST)

    assert isinstance(outcome, ExecutionFailed)
    assert outcome.error_type == "unsupported_language"


@pytest.mark.parametrize(
    ("run", "error_type"),
    [
        (Run(RunEnd.EXITED, 1, stderr="Traceback\nValueError: no"), "script_error"),
        (Run(RunEnd.EXITED, 1, stderr="Traceback\nMemoryError\n"), "memory_limit"),
        (Run(RunEnd.EXITED, -24), "cpu_limit"),
        (Run(RunEnd.EXITED, -11), "signal"),
        (Run(RunEnd.FLOODED, -9), "output_limit"),
        (Run(RunEnd.STOPPED, -9), "deleted"),
        (Run(RunEnd.OUT_OF_MEMORY, -9), "memory_limit"),
        (Run(RunEnd.EVICTED, -9), "evicted"),
        (Run(RunEnd.NOT_STARTED, -9), "not_started"),
        (Run(RunEnd.LOST, -9), "supervisor_lost"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_failure_has_an_error_type(run: Run, error_type: str) -> None:
    outcome = outcome_of(run, CREATE, "id")

    assert isinstance(outcome, ExecutionFailed)
    assert outcome.error_type == error_type


def test_a_timeout_contains_the_time_limit() -> None:
    outcome = outcome_of(Run(RunEnd.TIMED_OUT, -9, usage=ResourceUsage(wall_seconds=5)), CREATE, "id")

    assert isinstance(outcome, ExecutionTimeout)
    assert (outcome.timeout_seconds, outcome.resource_usage.wall_seconds) == (5, 5)
