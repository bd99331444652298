"""The k8s worker's table of pods in the platform's database: one row per execution.

    running ─► ended        with its outcome, stored before it is published

The outcome is stored because a second run would end differently: if a worker dies between the end of the script and the
publishing, another worker publishes the same outcome without a second run.  The row of an execution that is deleted
before it ran is `ended` from the start, and create commands no longer run it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import Row, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import derived_event_id
from integr8s_idem.errors import PermanentError
from services.database import Database, insert, now, pods
from services.events import CreatePodCommand, DeletePodCommand, ExecutionFailed, Outcome
from services.k8s_worker.outcomes import failure, outcome_from_json, outcome_to_json

DELETED = "deleted"


class PodState(str, Enum):
    RUNNING = "running"
    ENDED = "ended"


class SupersededError(Exception):
    """A later attempt has taken the pod over; the result of this one is discarded."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of a pod.  Writes of earlier owners are refused."""

    execution_id: str
    pod_name: str
    attempt: int
    fence: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """A pod to be deleted that has not been reported alive for a long time."""

    pod_name: str
    outcome: ExecutionFailed


class PodTable:
    """The pods of all k8s workers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, owner: Ownership, command: CreatePodCommand) -> Outcome | None:
        """Take ownership of the pod, from an earlier attempt if necessary.

        Returns:
            `None` if the script must be run, or the outcome of the completed run.

        Raises:
            SupersededError: A later attempt owns the pod.
            PermanentError: Another command runs this execution.
        """
        async with self._database.transaction() as connection:
            row = await _take(connection, owner, command)
        if row is not None and row.delete_reason is not None:
            return await self.end(owner, deletion(row))
        if row is not None:
            return None
        async with self._database.reading() as connection:
            row = await _row(connection, owner.execution_id)
        if row.state == PodState.ENDED.value:
            return outcome_from_json(row.outcome)
        if row.pod_name != owner.pod_name:
            raise PermanentError(f"execution {owner.execution_id} is run by pod {row.pod_name} already")
        raise SupersededError(owner.execution_id)

    async def end(self, owner: Ownership, outcome: Outcome) -> Outcome:
        """Store the outcome of the run.  Returns the first outcome that was stored.

        Raises:
            SupersededError: A later attempt owns the pod.
        """
        mine = update(pods).where(
            pods.c.execution_id == owner.execution_id,
            pods.c.state == PodState.RUNNING.value,
            pods.c.pod_name == owner.pod_name,
            pods.c.fence == owner.fence,
            pods.c.attempt == owner.attempt,
        )
        values = {"state": PodState.ENDED.value, "outcome": outcome_to_json(outcome)}
        async with self._database.transaction() as connection:
            await connection.execute(mine.values(**values))
            row = await _row(connection, owner.execution_id)
        if row.state != PodState.ENDED.value:
            raise SupersededError(owner.execution_id)
        return outcome_from_json(row.outcome)

    async def outcome(self, execution_id: str) -> Outcome | None:
        """Return the stored outcome of an execution; `None` if its pod is running, or there is none."""
        found = select(pods.c.outcome).where(pods.c.execution_id == execution_id)
        found = found.where(pods.c.state == PodState.ENDED.value)
        async with self._database.reading() as connection:
            stored = (await connection.execute(found)).scalar_one_or_none()
        return None if stored is None else outcome_from_json(stored)

    async def delete(self, command: DeletePodCommand) -> ExecutionFailed | None:
        """Request the deletion of the pod.  Idempotent.

        Returns:
            The outcome of a pod that will never run; `None` if it is running, or its outcome is published.
        """
        async with self._database.transaction() as connection:
            never_ran = insert(connection, pods).values(**_deleted_row(command), seen_at=now())
            await connection.execute(never_ran.on_conflict_do_nothing())
            running = update(pods).where(
                pods.c.execution_id == command.execution_id,
                pods.c.state == PodState.RUNNING.value,
                pods.c.delete_reason.is_(None),
            )
            await connection.execute(running.values(delete_reason=command.reason))
            row = await _row(connection, command.execution_id)
        outcome = None if row.outcome is None else outcome_from_json(row.outcome)
        # After a crash between commit and publishing, the own outcome is found again.
        if isinstance(outcome, ExecutionFailed) and outcome.event_id == _deletion_id(row.execution_id):
            return outcome
        return None

    async def report_alive(self, running: Collection[str]) -> Sequence[str]:
        """Record that these executions run here, and return those to be deleted."""
        if not running:
            return []
        alive = update(pods).where(pods.c.execution_id.in_(running), pods.c.state == PodState.RUNNING.value)
        returned = alive.values(seen_at=now()).returning(pods.c.execution_id, pods.c.delete_reason)
        async with self._database.transaction() as connection:
            return [row.execution_id for row in await connection.execute(returned) if row.delete_reason is not None]

    async def orphans(self, lost_after: float) -> list[Orphan]:
        """Return pods to be deleted that have not been reported alive for `lost_after` seconds."""
        found = select(pods).where(
            pods.c.state == PodState.RUNNING.value,
            pods.c.delete_reason.is_not(None),
            pods.c.seen_at < now() - literal(lost_after),
        )
        async with self._database.reading() as connection:
            return [Orphan(row.pod_name, deletion(row)) for row in await connection.execute(found)]

    async def close(self, outcome: ExecutionFailed) -> None:
        """Store the outcome of an orphan after it is published."""
        orphan = update(pods).where(pods.c.execution_id == outcome.execution_id)
        orphan = orphan.where(pods.c.state == PodState.RUNNING.value)
        async with self._database.transaction() as connection:
            await connection.execute(orphan.values(state=PodState.ENDED.value, outcome=outcome_to_json(outcome)))


def deletion(row: Row[Any]) -> ExecutionFailed:
    """Return the outcome of a pod that was deleted before its outcome was known."""
    event_id = _deletion_id(row.execution_id)
    return failure(row.execution_id, event_id, DELETED, row.delete_reason, row.correlation_id, row.user_id)


def _deletion_id(execution_id: str) -> str:
    return derived_event_id(f"k8s-worker:{DELETED}:{execution_id}", 0)


async def _take(connection: AsyncConnection, owner: Ownership, command: CreatePodCommand) -> Row[Any] | None:
    run = {"attempt": owner.attempt, "fence": owner.fence, "seen_at": now()}
    fresh = insert(connection, pods).values(
        execution_id=owner.execution_id,
        pod_name=owner.pod_name,
        state=PodState.RUNNING.value,
        user_id=command.metadata.user_id,
        correlation_id=command.metadata.correlation_id,
        **run,
    )
    take = fresh.on_conflict_do_update(
        index_elements=["execution_id"],
        set_=run,
        where=(pods.c.state == PodState.RUNNING.value)
        & (pods.c.pod_name == owner.pod_name)
        & (pods.c.fence <= owner.fence),
    )
    row: Row[Any] | None = (await connection.execute(take.returning(pods))).one_or_none()
    return row


async def _row(connection: AsyncConnection, execution_id: str) -> Row[Any]:
    return (await connection.execute(select(pods).where(pods.c.execution_id == execution_id))).one()


def _deleted_row(command: DeletePodCommand) -> dict[str, Any]:
    metadata, event_id = command.metadata, _deletion_id(command.execution_id)
    outcome = failure(
        command.execution_id, event_id, DELETED, command.reason, metadata.correlation_id, metadata.user_id
    )
    return {
        "execution_id": command.execution_id,
        "pod_name": "",
        "state": PodState.ENDED.value,
        "attempt": 0,
        "fence": 0,
        "delete_reason": command.reason,
        "outcome": outcome_to_json(outcome),
        "user_id": metadata.user_id,
        "correlation_id": metadata.correlation_id,
    }
