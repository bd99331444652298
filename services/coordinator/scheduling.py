"""Convert decisions to events, and sweep for overdue executions, which redelivery cannot repair."""

from __future__ import annotations

from collections.abc import Iterator

from integr8s_idem import BaseEvent, EventMetadata, derived_event_id
from services.coordinator.admission import Admitted, Decision, forget_old_decisions, overdue
from services.database import Database
from services.events import ExecutionRejected, ExecutionScheduled
from services.publishing import Publisher
from services.settings import PlatformSection

SERVICE = "coordinator"


def events_of(decision: Decision, rejected_id: str) -> Iterator[BaseEvent]:
    """Return the events of a decision in a stable order, since their ids are derived from it.

    Args:
        rejected_id: The requested execution, for a rejection.
    """
    if decision.rejected is not None:
        yield ExecutionRejected(execution_id=rejected_id, reason=decision.rejected)
    for admitted in decision.scheduled:
        yield ExecutionScheduled(execution_id=admitted.execution_id, metadata=_metadata(admitted))


def _metadata(admitted: Admitted) -> EventMetadata:
    # The event often belongs to another execution than the incoming one, whose end freed the slot.
    return EventMetadata(service_name=SERVICE, correlation_id=admitted.correlation_id, user_id=admitted.user_id or None)


async def repair(database: Database, settings: PlatformSection, publisher: Publisher) -> int:
    """Schedule overdue executions again and delete old decisions; return how many executions were overdue."""
    async with database.transaction() as connection:
        late = await overdue(connection, settings)
        await forget_old_decisions(connection, settings)
    await publisher.publish(*(_reminder(admitted) for admitted in late))
    return len(late)


def _reminder(admitted: Admitted) -> ExecutionScheduled:
    return ExecutionScheduled(
        event_id=derived_event_id(f"{SERVICE}:reminder:{admitted.execution_id}", 0),
        execution_id=admitted.execution_id,
        reason="overdue",
        metadata=_metadata(admitted),
    )
