"""The saga orchestrator's event handlers.  Its dispatcher is plain: the state of a saga shows which events are new."""

from __future__ import annotations

from integr8s_idem import EventRouter
from integr8s_idem.integrations.dishka import FromDishka
from services.events import (
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionRequested,
    ExecutionScheduled,
    ExecutionTimeout,
)
from services.saga_orchestrator.saga import Sagas
from services.saga_orchestrator.states import SagaState

router = EventRouter()


@router.on(ExecutionRequested, name="create")
async def create(event: ExecutionRequested, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.request(event)


@router.on(ExecutionScheduled, name="schedule")
async def schedule(event: ExecutionScheduled, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.move(event, event.execution_id, SagaState.SCHEDULED)


@router.on(ExecutionCompleted, name="complete")
async def complete(event: ExecutionCompleted, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.move(event, event.execution_id, SagaState.COMPLETED)


@router.on(ExecutionFailed, name="fail")
async def fail(event: ExecutionFailed, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.move(event, event.execution_id, SagaState.FAILED, event.error_type)


@router.on(ExecutionTimeout, name="time_out")
async def time_out(event: ExecutionTimeout, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.move(event, event.execution_id, SagaState.TIMED_OUT)


@router.on(ExecutionCancelled, name="cancel")
async def cancel(event: ExecutionCancelled, sagas: FromDishka[Sagas]) -> SagaState:
    return await sagas.move(event, event.execution_id, SagaState.CANCELLED, event.reason or "cancelled")
