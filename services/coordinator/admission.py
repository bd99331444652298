"""The coordinator's queue and its decisions, in the platform's database.

A decision is stored under the key of the event that caused it, in the transaction that changes the queue.  If a worker
dies between the commit and the publishing, the redelivery finds the decision and publishes the same events again.

A decision first increments a row, which serves as the lock: of two coordinators one waits, and then sees the other's
decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Row, delete, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.database import decisions, executions, insert, now, turns
from services.events import ExecutionRequested
from services.limits import exceeded_limit
from services.settings import PlatformSection

_TURN = "admission"
_PRUNED_AT_ONCE = 1_000


class ExecutionState(str, Enum):
    """State of an execution in the coordinator.  The last four states are final and need no slot."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


_WHY_NOT_AGAIN = {
    ExecutionState.FINISHED: "an execution of this id has already finished",
    ExecutionState.CANCELLED: "the execution was cancelled",
    ExecutionState.REJECTED: "an execution of this id was rejected before",
}


class Admitted(BaseModel):
    """An execution that got a slot, with the properties of its request for the event."""

    model_config = ConfigDict(frozen=True)

    execution_id: str
    user_id: str = ""
    correlation_id: str = ""


class Decision(BaseModel):
    """The consequences of one event."""

    model_config = ConfigDict(frozen=True)

    rejected: str | None = None
    """Why the request was rejected; `None` if it was not, or for other events."""
    scheduled: tuple[Admitted, ...] = ()
    """Executions that got a slot, in the order of their admission."""


class Admission:
    """Decides within the caller's transaction."""

    def __init__(self, connection: AsyncConnection, settings: PlatformSection) -> None:
        self._connection = connection
        self._settings = settings

    async def request(self, key: str, event: ExecutionRequested) -> Decision:
        """Queue or reject the execution, and admit as many executions as there are slots.

        Args:
            key: Identifies the work, at most 255 characters; the same key gets the same decision.
        """
        turn = await self._take_turn()
        decided = await self._decided(key)
        if decided is not None:
            return decided
        rejected = await self._enter(event, turn)
        return await self._decide(key, rejected)

    async def end(self, key: str, execution_id: str, state: ExecutionState) -> Decision:
        """Free the execution's slot or its place in the queue, and admit as many executions as there are slots.

        An unknown execution is recorded as ended, since its request may arrive later.
        """
        turn = await self._take_turn()
        decided = await self._decided(key)
        if decided is not None:
            return decided
        known = await self._state_of(execution_id)
        if known is None:
            await self._add(_row(execution_id, state, turn))
        elif known in (ExecutionState.QUEUED, ExecutionState.RUNNING):
            change = update(executions).where(executions.c.execution_id == execution_id)
            await self._connection.execute(change.values(state=state.value, remind_at=None))
        return await self._decide(key, None)

    async def _take_turn(self) -> int:
        """Return the number of this decision, once every earlier decision is committed."""
        first = insert(self._connection, turns).values(name=_TURN, number=1)
        count = first.on_conflict_do_update(index_elements=["name"], set_={"number": turns.c.number + 1})
        return int((await self._connection.execute(count.returning(turns.c.number))).scalar_one())

    async def _decided(self, key: str) -> Decision | None:
        stored = await self._connection.execute(select(decisions.c.decision).where(decisions.c.key == key))
        row = stored.one_or_none()
        return None if row is None else Decision.model_validate(row.decision)

    async def _decide(self, key: str, rejected: str | None) -> Decision:
        decision = Decision(rejected=rejected, scheduled=tuple(await self._admit()))
        row = {"key": key, "decision": decision.model_dump(mode="json"), "decided_at": now()}
        await self._connection.execute(decisions.insert().values(**row))
        return decision

    async def _enter(self, event: ExecutionRequested, turn: int) -> str | None:
        """Queue the execution, or return the reason for rejecting it."""
        known = await self._state_of(event.execution_id)
        if known is not None:
            return _WHY_NOT_AGAIN.get(known)
        mistake = exceeded_limit(event, self._settings)
        state = ExecutionState.REJECTED if mistake else ExecutionState.QUEUED
        await self._add(_row(event.execution_id, state, turn, event))
        return mistake

    async def _state_of(self, execution_id: str) -> ExecutionState | None:
        found = select(executions.c.state).where(executions.c.execution_id == execution_id)
        state = (await self._connection.execute(found)).scalar_one_or_none()
        return None if state is None else ExecutionState(state)

    async def _add(self, row: dict[str, object]) -> None:
        await self._connection.execute(executions.insert().values(**row))

    async def _admit(self) -> list[Admitted]:
        """Assign the free slots."""
        count = select(func.count()).where(executions.c.state == ExecutionState.RUNNING.value)
        running = (await self._connection.execute(count)).scalar_one()
        admitted: list[Admitted] = []
        while running + len(admitted) < self._settings.max_running:
            following = await self._admit_next()
            if following is None:
                break
            admitted.append(following)
        return admitted

    async def _admit_next(self) -> Admitted | None:
        chosen = select(executions.c.execution_id).where(executions.c.state == ExecutionState.QUEUED.value)
        chosen = chosen.where(self._user_has_room())
        chosen = chosen.order_by(executions.c.priority.desc(), executions.c.position).limit(1)
        change = update(executions).where(executions.c.execution_id == chosen.scalar_subquery())
        change = change.values(state=ExecutionState.RUNNING.value, remind_at=self._reminder())
        row = (await self._connection.execute(change.returning(*_NAMED))).one_or_none()
        return None if row is None else _admitted(row)

    def _user_has_room(self) -> ColumnElement[bool]:
        others = executions.alias("others")
        running_of_user = select(func.count()).where(
            others.c.state == ExecutionState.RUNNING.value, others.c.user_id == executions.c.user_id
        )
        return running_of_user.correlate(executions).scalar_subquery() < self._settings.max_running_per_user

    def _reminder(self) -> ColumnElement[float]:
        return now() + executions.c.timeout_seconds + literal(self._settings.slot_reminder_seconds)


_NAMED = (executions.c.execution_id, executions.c.user_id, executions.c.correlation_id)


def _admitted(row: Row[Any]) -> Admitted:
    return Admitted(execution_id=row.execution_id, user_id=row.user_id, correlation_id=row.correlation_id)


def _row(
    execution_id: str, state: ExecutionState, turn: int, event: ExecutionRequested | None = None
) -> dict[str, object]:
    return {
        "execution_id": execution_id,
        "state": state.value,
        "position": turn,
        "priority": event.priority if event else 0,
        "timeout_seconds": event.timeout_seconds if event else 0.0,
        "user_id": (event.metadata.user_id if event else None) or "",
        "correlation_id": (event.metadata.correlation_id or event.event_id) if event else "",
    }


async def overdue(connection: AsyncConnection, settings: PlatformSection) -> Sequence[Admitted]:
    """Return running executions that are overdue, each once per `slot_reminder_seconds`.

    Scheduling them again repairs the effects of a dead-lettered event; the saga ignores a repeated event.
    """
    pause = now() + literal(settings.slot_reminder_seconds)
    due = update(executions).where(executions.c.state == ExecutionState.RUNNING.value, executions.c.remind_at < now())
    rows = await connection.execute(due.values(remind_at=pause).returning(*_NAMED))
    return [_admitted(row) for row in rows]


async def forget_old_decisions(connection: AsyncConnection, settings: PlatformSection) -> int:
    """Delete some decisions that no redelivery can need any more, and return their number."""
    old = decisions.c.decided_at < now() - literal(settings.decision_retention_seconds)
    some = select(decisions.c.key).where(old).limit(_PRUNED_AT_ONCE).scalar_subquery()
    return (await connection.execute(delete(decisions).where(decisions.c.key.in_(some)))).rowcount
