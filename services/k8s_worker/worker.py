"""Run pods: take ownership, publish their creation, supervise them, and store their outcomes."""

from __future__ import annotations

import asyncio
import hashlib
import logging

from integr8s_idem import Attempt, EventMetadata, derived_event_id
from services.database import Database
from services.events import CreatePodCommand, DeletePodCommand, ExecutionFailed, Outcome, PodCreated
from services.k8s_worker.outcomes import failure, outcome_of
from services.k8s_worker.pods import Ownership, PodTable
from services.k8s_worker.runner import Runner, UnsupportedLanguageError
from services.limits import exceeded_limit
from services.publishing import Publisher
from services.settings import PlatformSection

_log = logging.getLogger(__name__)


def pod_name_of(key: str) -> str:
    """Return the pod's name, which is the same for every run of the same work."""
    return f"exec-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


class PodWorker:
    """The pods of this process."""

    def __init__(self, database: Database, settings: PlatformSection, runner: Runner, publisher: Publisher) -> None:
        self._pods = PodTable(database)
        self._settings = settings
        self._runner = runner
        self._publisher = publisher
        self._running: dict[str, asyncio.Event] = {}

    async def create(self, command: CreatePodCommand, attempt: Attempt) -> Outcome:
        """Run the command's script unless it has already ended.  Returns the stored outcome, not yet published.

        Raises:
            SupersededError: A later attempt runs it.
            PermanentError: Another command runs this execution, or the runner can never run it.
            PublishError: The script was not run.
            NoCapacityError: There is no room for the pod now; a later attempt runs it.
            OSError: The outcome is unknown; a later attempt continues.
        """
        owner = Ownership(command.execution_id, pod_name_of(attempt.key), attempt.number, attempt.fence)
        known = await self._pods.begin(owner, command)
        if known is not None:
            await self._discard(owner.pod_name)
            return known
        if attempt.number > 1:
            _log.warning("execution %s runs again, attempt %d", command.execution_id, attempt.number)
        await self._publisher.publish(_created(command, owner.pod_name, attempt))
        outcome = await self._pods.end(owner, await self._run(command, owner.pod_name, attempt))
        await self._discard(owner.pod_name)
        return outcome

    async def find(self, command: CreatePodCommand, attempt: Attempt) -> Outcome | None:
        """Return the outcome that an earlier attempt has stored, and clean up after it; `None` if it stored none.

        A pod that is running, or was never started, is a matter for `create`, which continues it.

        Raises:
            OSError: The database did not answer.
        """
        known = await self._pods.outcome(command.execution_id)
        if known is not None:
            await self._discard(pod_name_of(attempt.key))
        return known

    async def delete(self, command: DeletePodCommand) -> ExecutionFailed | None:
        """End the pod on any worker.  Returns the outcome to publish if it never ran."""
        outcome = await self._pods.delete(command)
        stop = self._running.get(command.execution_id)
        if stop is not None:
            stop.set()
        return outcome

    async def check(self) -> None:
        """Report the runs of this process as alive, end those to be deleted, and close orphans of dead workers.

        Raises:
            PublishError, OSError: An orphan stays open until the next check.
        """
        for execution_id in await self._pods.report_alive(list(self._running)):
            if execution_id in self._running:
                self._running[execution_id].set()
        for orphan in await self._pods.orphans(self._settings.pod_lost_seconds):
            _log.warning("closing the orphaned pod of deleted execution %s", orphan.outcome.execution_id)
            await self._runner.discard(orphan.pod_name)
            await self._publisher.publish(orphan.outcome)
            await self._pods.close(orphan.outcome)

    async def _discard(self, pod_name: str) -> None:
        """Clean up after the outcome is stored.  A failure does not affect the outcome."""
        try:
            await self._runner.discard(pod_name)
        except OSError as error:
            _log.warning("pod %s is left for the cluster to remove: %s", pod_name, error)

    async def _run(self, command: CreatePodCommand, pod_name: str, attempt: Attempt) -> Outcome:
        event_id = derived_event_id(attempt.key, 0)
        # Checked here as well, since commands may be published without the coordinator.
        if exceeded := exceeded_limit(command, self._settings):
            return _not_run(command, event_id, "limit_exceeded", exceeded)
        stop = asyncio.Event()
        self._running[command.execution_id] = stop
        try:
            run = await self._runner.run(pod_name, command, stop)
        except UnsupportedLanguageError as error:
            return _not_run(command, event_id, "unsupported_language", str(error))
        finally:
            # A later attempt in this process may have replaced it.
            if self._running.get(command.execution_id) is stop:
                del self._running[command.execution_id]
        return outcome_of(run, command, event_id)


def _not_run(command: CreatePodCommand, event_id: str, error_type: str, why: str) -> ExecutionFailed:
    metadata = command.metadata
    return failure(command.execution_id, event_id, error_type, why, metadata.correlation_id, metadata.user_id)


def _created(command: CreatePodCommand, pod_name: str, attempt: Attempt) -> PodCreated:
    metadata = command.metadata
    return PodCreated(
        event_id=derived_event_id(attempt.key_for("pod_created"), 0),
        execution_id=command.execution_id,
        pod_name=pod_name,
        metadata=EventMetadata(
            service_name="k8s-worker", correlation_id=metadata.correlation_id, user_id=metadata.user_id
        ),
    )
