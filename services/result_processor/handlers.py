"""The result processor's event handlers."""

from __future__ import annotations

from integr8s_idem import Attempt, EventRouter, Outgoing
from integr8s_idem.integrations.dishka import FromDishka
from services.events import ExecutionCompleted, ExecutionFailed, ExecutionTimeout, ResultStored
from services.result_processor.results import Results, Status

router = EventRouter()


@router.on(ExecutionCompleted, ExecutionFailed, ExecutionTimeout, name="store_result")
async def store_result(
    event: ExecutionCompleted | ExecutionFailed | ExecutionTimeout,
    results: FromDishka[Results],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> Status | None:
    status = await results.store(attempt.key, event)
    if status is not None:
        outgoing.publish(ResultStored(execution_id=event.execution_id, status=status))
    return status
