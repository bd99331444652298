"""The k8s worker's command handlers."""

from __future__ import annotations

from integr8s_idem import Attempt, EventRouter, Outgoing
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.reconciliation import Answer, Done, NotDone
from services.events import CreatePodCommand, DeletePodCommand
from services.k8s_worker.worker import PodWorker

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


@router.on(CreatePodCommand, name="create_pod", reconcile=find_pod)
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
