"""From decisions to events, and the sweep that repairs what redelivery cannot."""

from __future__ import annotations

from collections.abc import Iterator

from integr8s_idem.events import BaseEvent, EventMetadata, derived_event_id
from services.coordinator.admission import Admitted, Decision, forget_old_decisions, overdue
from services.database import Database
from services.events import ExecutionRejected, ExecutionScheduled
from services.publishing import Publisher
from services.settings import PlatformSection

SERVICE = "coordinator"


def events_of(decision: Decision, rejected_id: str) -> Iterator[BaseEvent]:
    """The events of a decision, always in the same order: their ids are derived from it.

    Args:
        rejected_id: The execution that was asked for, should it be rejected.
    """
    if decision.rejected is not None:
        yield ExecutionRejected(execution_id=rejected_id, reason=decision.rejected)
    for admitted in decision.scheduled:
        yield ExecutionScheduled(execution_id=admitted.execution_id, metadata=_metadata(admitted))


def _metadata(admitted: Admitted) -> EventMetadata:
    # Often it is another execution's end that makes room: the chain of events is not the incoming one's.
    return EventMetadata(service_name=SERVICE, correlation_id=admitted.correlation_id, user_id=admitted.user_id or None)


async def repair(database: Database, settings: PlatformSection, publisher: Publisher) -> int:
    """One sweep: schedule overdue executions once more, forget old decisions.  How many were overdue."""
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
