"""The k8s worker's command handlers.

Commands wait for room in the cluster in a retry topic, so that they are handled after commands that came later.  This
is harmless: commands of different executions are independent, and those of one execution are in two topics, which have
no common order.  A deletion is remembered in the table of pods, so a create command that comes after it runs nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from integr8s_idem import Attempt, EventRouter, Outgoing
from integr8s_idem.failures import retry_later
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.reconciliation import Answer, Done, NotDone
from services.events import CreatePodCommand, DeletePodCommand
from services.k8s_worker.runner import NoCapacityError
from services.k8s_worker.worker import PodWorker

CAPACITY_DELAY: Final = timedelta(seconds=5)
"""Room appears whenever a script ends."""
_CAPACITY_ATTEMPTS: Final = 1_000
"""Practically no limit: the saga deletes a pod that has not ended in time."""

router = EventRouter()


async def find_pod(
    event: CreatePodCommand,
    pods: FromDishka[PodWorker],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> Answer:
    """Publish the outcome of a pod whose worker died after the pod had ended."""
    outcome = await pods.find(event, attempt)
    if outcome is None:
        return NotDone()
    outgoing.publish(outcome)
    return Done(outcome.event_type)


@router.on(
    CreatePodCommand,
    name="create_pod",
    reconcile=find_pod,
    failures=[retry_later(NoCapacityError, delay=CAPACITY_DELAY, attempts=_CAPACITY_ATTEMPTS)],
    delayed_retries="overtake",
)
async def create_pod(
    event: CreatePodCommand,
    pods: FromDishka[PodWorker],
    attempt: FromDishka[Attempt],
    outgoing: FromDishka[Outgoing],
) -> str:
    outcome = await pods.create(event, attempt)
    outgoing.publish(outcome)
    return outcome.event_type


@router.on(DeletePodCommand, name="delete_pod")
async def delete_pod(
    event: DeletePodCommand, pods: FromDishka[PodWorker], outgoing: FromDishka[Outgoing]
) -> str | None:
    outcome = await pods.delete(event)
    if outcome is None:
        return None
    outgoing.publish(outcome)
    return outcome.event_type
