from __future__ import annotations

import asyncio
from itertools import permutations

import pytest
from sqlalchemy import select, update

from integr8s_idem.errors import PublishError
from integr8s_idem.events import BaseEvent
from integr8s_idem.keys.fingerprints import content_hash
from services.database import Database, sagas
from services.events import (
    CreatePodCommand,
    DeletePodCommand,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionRequested,
    ExecutionScheduled,
    ExecutionTimeout,
)
from services.saga_orchestrator.saga import Sagas, saga_id_of
from services.saga_orchestrator.states import AFTER_PUBLISHING, Command, SagaState, moved, owed
from services.settings import PlatformSection
from tests.platform.conftest import RecordingPublisher

REQUESTED = ExecutionRequested(execution_id="e1", script="print(1)", timeout_seconds=7, priority=3)
SCHEDULED = ExecutionScheduled(execution_id="e1")
CANCELLED = ExecutionCancelled(execution_id="e1", cancelled_by="ann", reason="not needed")
COMPLETED = ExecutionCompleted(execution_id="e1")
FAILED = ExecutionFailed(execution_id="e1", exit_code=1, error_type="script_error")
TIMEOUT = ExecutionTimeout(execution_id="e1", timeout_seconds=7)

TARGETS: dict[BaseEvent, SagaState] = {
    SCHEDULED: SagaState.SCHEDULED,
    CANCELLED: SagaState.CANCELLED,
    COMPLETED: SagaState.COMPLETED,
    FAILED: SagaState.FAILED,
    TIMEOUT: SagaState.TIMED_OUT,
}


class Orchestrator:
    """Does what the handlers do."""

    def __init__(self, database: Database, settings: PlatformSection, publisher: RecordingPublisher) -> None:
        self.database = database
        self.publisher = publisher
        self.sagas = Sagas(database, settings, publisher)

    async def handle(self, event: BaseEvent) -> SagaState:
        if isinstance(event, ExecutionRequested):
            return await self.sagas.request(event)
        return await self.sagas.move(event, "e1", TARGETS[event], "why")

    async def state(self) -> SagaState:
        async with self.database.reading() as connection:
            return SagaState((await connection.execute(select(sagas.c.state))).scalar_one())

    async def exceed_deadline(self) -> None:
        async with self.database.transaction() as connection:
            await connection.execute(update(sagas).where(sagas.c.deadline.is_not(None)).values(deadline=0))


@pytest.fixture
def orchestrator(database: Database, settings: PlatformSection, publisher: RecordingPublisher) -> Orchestrator:
    return Orchestrator(database, settings, publisher)


async def test_a_scheduled_execution_gets_its_pod(orchestrator: Orchestrator) -> None:
    await orchestrator.handle(REQUESTED)
    await orchestrator.handle(SCHEDULED)

    (command,) = orchestrator.publisher.events
    assert isinstance(command, CreatePodCommand)
    assert (command.script, command.timeout_seconds, command.priority) == ("print(1)", 7, 3)
    assert command.saga_id == saga_id_of("e1")
    assert command.metadata.correlation_id == REQUESTED.event_id


async def test_no_command_is_published_before_the_execution_is_scheduled(orchestrator: Orchestrator) -> None:
    assert await orchestrator.handle(REQUESTED) is SagaState.CREATED
    assert orchestrator.publisher.events == []


@pytest.mark.parametrize("events", list(permutations([REQUESTED, SCHEDULED])), ids=["in order", "overtaken"])
async def test_request_and_schedule_can_arrive_in_any_order(
    orchestrator: Orchestrator, events: tuple[BaseEvent, ...]
) -> None:
    for event in events:
        await orchestrator.handle(event)

    assert orchestrator.publisher.types == ["create_pod_command"]
    assert await orchestrator.state() is SagaState.COMMANDED


@pytest.mark.parametrize("end", [COMPLETED, FAILED, TIMEOUT], ids=lambda event: event.event_type)
async def test_an_ended_execution_ends_its_saga(orchestrator: Orchestrator, end: BaseEvent) -> None:
    for event in (REQUESTED, SCHEDULED, end):
        await orchestrator.handle(event)

    assert await orchestrator.state() is TARGETS[end]
    assert orchestrator.publisher.types == ["create_pod_command"]


async def test_the_pod_of_a_cancelled_execution_is_deleted(orchestrator: Orchestrator) -> None:
    for event in (REQUESTED, SCHEDULED, CANCELLED):
        await orchestrator.handle(event)

    create, delete = orchestrator.publisher.events
    assert isinstance(delete, DeletePodCommand)
    assert delete.reason == "why"
    assert delete.event_id != create.event_id
    assert await orchestrator.state() is SagaState.CANCELLED


async def test_an_execution_cancelled_before_scheduling_never_runs(orchestrator: Orchestrator) -> None:
    for event in (CANCELLED, REQUESTED, SCHEDULED):
        await orchestrator.handle(event)

    assert orchestrator.publisher.events == []
    assert await orchestrator.state() is SagaState.CANCELLED


@pytest.mark.parametrize(
    ("path", "again"),
    [
        pytest.param(path[: reached + 1], again, id=f"{again.event_type} after {path[reached].event_type}")
        for path in ([REQUESTED, SCHEDULED, CANCELLED, FAILED], [REQUESTED, SCHEDULED, COMPLETED])
        for reached in range(len(path))
        for again in path[: reached + 1]
    ],
)
async def test_any_event_can_be_redelivered_in_any_state(
    orchestrator: Orchestrator, path: list[BaseEvent], again: BaseEvent
) -> None:
    for event in path:
        await orchestrator.handle(event)
    state, published = await orchestrator.state(), list(orchestrator.publisher.events)

    await orchestrator.handle(again)

    assert await orchestrator.state() is state
    assert orchestrator.publisher.events == published


@pytest.mark.parametrize("path", [[REQUESTED, SCHEDULED], [REQUESTED, SCHEDULED, CANCELLED]], ids=["create", "delete"])
@pytest.mark.parametrize("repair", ["redelivery", "sweep"])
async def test_a_pending_command_is_published_later(
    orchestrator: Orchestrator, path: list[BaseEvent], repair: str
) -> None:
    """The saga has changed its state, the broker is down, and the worker dies."""
    for event in path[:-1]:
        await orchestrator.handle(event)
    before = len(orchestrator.publisher.events)
    orchestrator.publisher.broken = True
    with pytest.raises(PublishError):
        await orchestrator.handle(path[-1])
    orchestrator.publisher.broken = False

    await (orchestrator.handle(path[-1]) if repair == "redelivery" else orchestrator.sagas.sweep())

    assert len(orchestrator.publisher.events) == before + 1
    assert await orchestrator.state() in AFTER_PUBLISHING.values()


async def test_a_command_published_twice_is_the_same_event(orchestrator: Orchestrator, database: Database) -> None:
    """The worker died after publishing, before it stored that the command is published."""
    await orchestrator.handle(REQUESTED)
    await orchestrator.handle(SCHEDULED)
    async with database.transaction() as connection:
        await connection.execute(update(sagas).values(state="scheduled"))

    await orchestrator.sagas.sweep()

    first, second = orchestrator.publisher.events
    assert first.event_id == second.event_id
    assert content_hash(first) == content_hash(second)


async def test_an_overdue_saga_expires_and_its_pod_is_deleted(orchestrator: Orchestrator) -> None:
    await orchestrator.handle(REQUESTED)
    await orchestrator.handle(SCHEDULED)
    await orchestrator.exceed_deadline()

    counts = [await orchestrator.sagas.sweep() for _ in range(2)]

    assert counts == [1, 0]
    assert orchestrator.publisher.types == ["create_pod_command", "delete_pod_command"]
    assert await orchestrator.state() is SagaState.EXPIRED


async def test_a_saga_before_its_deadline_is_unchanged(orchestrator: Orchestrator) -> None:
    await orchestrator.handle(REQUESTED)
    await orchestrator.handle(SCHEDULED)

    assert await orchestrator.sagas.sweep() == 0
    assert await orchestrator.state() is SagaState.COMMANDED


async def test_a_saga_that_waits_for_a_slot_does_not_expire(orchestrator: Orchestrator) -> None:
    await orchestrator.handle(REQUESTED)
    await orchestrator.exceed_deadline()

    assert await orchestrator.sagas.sweep() == 0
    assert await orchestrator.state() is SagaState.CREATED


async def test_an_ended_saga_does_not_expire(orchestrator: Orchestrator) -> None:
    for event in (REQUESTED, SCHEDULED, COMPLETED):
        await orchestrator.handle(event)
    await orchestrator.exceed_deadline()

    assert await orchestrator.sagas.sweep() == 0
    assert await orchestrator.state() is SagaState.COMPLETED


async def test_the_second_script_of_one_execution_is_ignored(orchestrator: Orchestrator) -> None:
    await orchestrator.handle(REQUESTED)
    await orchestrator.handle(ExecutionRequested(execution_id="e1", script="print(2)"))
    await orchestrator.handle(SCHEDULED)

    (command,) = orchestrator.publisher.events
    assert isinstance(command, CreatePodCommand)
    assert command.script == "print(1)"


async def test_concurrent_workers_create_one_saga(orchestrator: Orchestrator) -> None:
    await asyncio.gather(*(orchestrator.handle(event) for event in [REQUESTED, SCHEDULED] * 8))

    assert await orchestrator.state() is SagaState.COMMANDED
    assert set(orchestrator.publisher.types) == {"create_pod_command"}
    assert len({event.event_id for event in orchestrator.publisher.events}) == 1


@pytest.mark.parametrize("target", SagaState)
@pytest.mark.parametrize("state", SagaState)
def test_a_saga_only_moves_forward(state: SagaState, target: SagaState) -> None:
    order = list(SagaState)

    after = moved(state, target)

    assert order.index(after) >= order.index(state)


@pytest.mark.parametrize("state", SagaState)
def test_the_pending_command_follows_from_the_state(state: SagaState) -> None:
    command = owed(state, has_request=True)

    assert (command is not None) == (state in AFTER_PUBLISHING)
    assert (command is Command.CREATE) == (state is SagaState.SCHEDULED)


@pytest.mark.parametrize(
    "state", [SagaState.COMPLETED, SagaState.FAILED, SagaState.TIMED_OUT, SagaState.CANCELLED, SagaState.EXPIRED]
)
def test_the_end_of_a_saga_is_final(state: SagaState) -> None:
    assert {moved(state, target) for target in SagaState} == {state}
