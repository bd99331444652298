"""Sagas in the platform's database: one per execution and name, under a unique constraint.

Each step moves the saga in a transaction, publishes the pending command, and marks it as published, which is the next
transition.  A crash in between is repaired by the next delivery or by the sweep.  A command that is published twice is
the same event: its id and content are derived from the saga and the step.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, and_, literal, null, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import BaseEvent, EventMetadata, derived_event_id
from services.database import Database, insert, now, sagas
from services.events import CreatePodCommand, DeletePodCommand, ExecutionRequested, ScriptRequest
from services.publishing import Publisher
from services.saga_orchestrator.states import AFTER_PUBLISHING, Command, SagaState, moved, owed
from services.settings import PlatformSection

SERVICE: Final = "saga-orchestrator"
EXECUTION_SAGA: Final = "execution"
_SAGA_IDS: Final = uuid.UUID("0a1c6a0e-8f2b-5c55-9d2e-5a55c7b0f6d1")
_SWEPT_AT_ONCE: Final = 100

_log = logging.getLogger(__name__)


def saga_id_of(execution_id: str, name: str = EXECUTION_SAGA) -> str:
    """Return the deterministic id of a saga, so that concurrent workers create the same saga."""
    return str(uuid.uuid5(_SAGA_IDS, f"{name}:{execution_id}"))


@dataclass(frozen=True, slots=True)
class Saga:
    """A stored saga."""

    saga_id: str
    execution_id: str
    state: SagaState
    request: ScriptRequest | None
    reason: str
    user_id: str | None
    correlation_id: str

    @property
    def owes(self) -> Command | None:
        return owed(self.state, has_request=self.request is not None)

    def command(self) -> BaseEvent:
        """Return the pending command, with a deterministic id and content."""
        owes = self.owes
        assert owes is not None
        fields: dict[str, Any] = {
            "event_id": derived_event_id(f"{self.saga_id}:{owes.value}", 0),
            "saga_id": self.saga_id,
            "execution_id": self.execution_id,
            "metadata": EventMetadata(service_name=SERVICE, correlation_id=self.correlation_id, user_id=self.user_id),
        }
        if owes is Command.CREATE:
            assert self.request is not None
            return CreatePodCommand(**fields, **self.request.model_dump())
        return DeletePodCommand(**fields, reason=self.reason)


class Sagas:
    """The sagas of all executions."""

    def __init__(self, database: Database, settings: PlatformSection, publisher: Publisher) -> None:
        self._database = database
        self._settings = settings
        self._publisher = publisher

    async def request(self, event: ExecutionRequested) -> SagaState:
        """Store the request, and continue a saga that has been waiting for it.

        A second request for the same execution changes nothing.
        """
        request = event.model_dump(mode="json", include=set(ScriptRequest.model_fields))
        async with self._database.transaction() as connection:
            saga = await self._find_or_create(connection, event)
            if saga.request is None:
                values: dict[str, Any] = {
                    "request": request,
                    "user_id": event.metadata.user_id,
                    "correlation_id": event.metadata.correlation_id or event.event_id,
                }
                if saga.state is SagaState.SCHEDULED:
                    values["deadline"] = self._deadline(event.timeout_seconds)
                saga = await _change(connection, saga.saga_id, values)
        return await self._settle(saga)

    async def move(self, event: BaseEvent, execution_id: str, target: SagaState, reason: str = "") -> SagaState:
        """Move to `target` if allowed, publish the pending command, and return the state."""
        async with self._database.transaction() as connection:
            saga = await self._find_or_create(connection, event, execution_id)
            state = moved(saga.state, target)
            if state is not saga.state:
                values: dict[str, Any] = {"state": state.value, "reason": reason}
                if state is SagaState.SCHEDULED:
                    values["deadline"] = self._deadline(saga.request.timeout_seconds if saga.request else 0.0)
                saga = await _change(connection, saga.saga_id, values)
        return await self._settle(saga)

    async def sweep(self) -> int:
        """Expire overdue sagas and publish pending commands.  Returns the number of commands.

        Raises:
            PublishError: The broker did not confirm; the command stays pending.
        """
        async with self._database.transaction() as connection:
            expired = await _expire(connection)
        for execution_id in expired:
            _log.warning("the saga of execution %s took too long; its pod is deleted", execution_id)
        async with self._database.reading() as connection:
            indebted = await _indebted(connection)
        for saga in indebted:
            await self._settle(saga)
        return len(indebted)

    async def _settle(self, saga: Saga) -> SagaState:
        """Publish the pending command, and only then mark it as published, since publishing it twice is harmless."""
        if saga.owes is None:
            return saga.state
        await self._publisher.publish(saga.command())
        target = AFTER_PUBLISHING[saga.state]
        async with self._database.transaction() as connection:
            # Only if its state is unchanged, since the execution may have ended in the meantime.
            here = update(sagas).where(sagas.c.saga_id == saga.saga_id, sagas.c.state == saga.state.value)
            await connection.execute(here.values(state=target.value))
        return target

    async def _find_or_create(
        self, connection: AsyncConnection, event: BaseEvent, execution_id: str | None = None
    ) -> Saga:
        execution_id = execution_id or str(event.aggregate_id)
        saga_id = saga_id_of(execution_id)
        fresh = insert(connection, sagas).values(
            saga_id=saga_id,
            execution_id=execution_id,
            name=EXECUTION_SAGA,
            state=SagaState.CREATED.value,
            reason="",
            correlation_id=event.metadata.correlation_id or event.event_id,
        )
        await connection.execute(fresh.on_conflict_do_nothing())
        found = select(sagas).where(sagas.c.saga_id == saga_id).with_for_update()
        return _saga((await connection.execute(found)).one())

    def _deadline(self, timeout_seconds: float) -> ColumnElement[float]:
        return now() + literal(timeout_seconds + self._settings.saga_timeout_seconds)


async def _change(connection: AsyncConnection, saga_id: str, values: dict[str, Any]) -> Saga:
    change = update(sagas).where(sagas.c.saga_id == saga_id).values(**values).returning(sagas)
    return _saga((await connection.execute(change)).one())


async def _expire(connection: AsyncConnection) -> list[str]:
    """Return the deadline.  A saga that waits for a slot has none; the coordinator limits the time in the queue."""
    started = (SagaState.SCHEDULED.value, SagaState.COMMANDED.value)
    late = update(sagas).where(sagas.c.state.in_(started), sagas.c.deadline < now())
    change = late.values(state=SagaState.EXPIRING.value, reason="the execution took too long")
    return list((await connection.execute(change.returning(sagas.c.execution_id))).scalars())


async def _indebted(connection: AsyncConnection) -> list[Saga]:
    compensating = (SagaState.CANCELLING.value, SagaState.EXPIRING.value)
    scheduled = and_(sagas.c.state == SagaState.SCHEDULED.value, sagas.c.request.is_not(null()))
    found = select(sagas).where(or_(sagas.c.state.in_(compensating), scheduled))
    return list(map(_saga, await connection.execute(found.order_by(sagas.c.deadline).limit(_SWEPT_AT_ONCE))))


def _saga(row: Row[Any]) -> Saga:
    return Saga(
        saga_id=row.saga_id,
        execution_id=row.execution_id,
        state=SagaState(row.state),
        request=None if row.request is None else ScriptRequest.model_validate(row.request),
        reason=row.reason,
        user_id=row.user_id,
        correlation_id=row.correlation_id,
    )
