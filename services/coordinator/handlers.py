"""The coordinator's event handlers."""

from __future__ import annotations

from integr8s_idem import Attempt, EventRouter, Outgoing
from integr8s_idem.integrations.dishka import FromDishka
from services.coordinator.admission import Admission, Decision, ExecutionState
from services.coordinator.scheduling import events_of
from services.events import (
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionRequested,
    ExecutionTimeout,
)

router = EventRouter()


@router.on(ExecutionRequested, name="admit")
async def admit(
    event: ExecutionRequested,
    admission: FromDishka[Admission],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> Decision:
    decision = await admission.request(attempt.key, event)
    return _publish(decision, event.execution_id, outgoing)


@router.on(ExecutionCompleted, ExecutionFailed, ExecutionTimeout, name="finish")
async def finish(
    event: ExecutionCompleted | ExecutionFailed | ExecutionTimeout,
    admission: FromDishka[Admission],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> Decision:
    decision = await admission.end(attempt.key, event.execution_id, ExecutionState.FINISHED)
    return _publish(decision, event.execution_id, outgoing)


@router.on(ExecutionCancelled, name="cancel")
async def cancel(
    event: ExecutionCancelled,
    admission: FromDishka[Admission],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> Decision:
    decision = await admission.end(attempt.key, event.execution_id, ExecutionState.CANCELLED)
    return _publish(decision, event.execution_id, outgoing)


def _publish(decision: Decision, execution_id: str, outgoing: Outgoing) -> Decision:
    for follow_up in events_of(decision, execution_id):
        outgoing.publish(follow_up)
    return decision
