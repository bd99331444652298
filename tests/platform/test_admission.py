from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

from integr8s_idem.events import EventMetadata
from integr8s_idem.keys.fingerprints import fingerprint_of
from services.coordinator.admission import Admission, Decision, ExecutionState, forget_old_decisions
from services.coordinator.scheduling import events_of, repair
from services.database import Database, decisions, executions
from services.events import ExecutionRejected, ExecutionRequested, ExecutionScheduled
from services.settings import PlatformSection
from tests.platform.conftest import RecordingPublisher

REQUEST = """
import asyncio, sys
from services.coordinator.admission import Admission
from services.database import Database
from services.events import ExecutionRequested
from services.settings import PlatformSection

async def main(url, name):
    settings = PlatformSection(database_url=url, max_running=2)
    database = Database(url)
    await database.open()

    async def request(number):
        event = ExecutionRequested(execution_id=f"{name}{number}", script="1", metadata={"user_id": f"{name}{number}"})
        async with database.transaction() as connection:
            decision = await Admission(connection, settings).request(event.execution_id, event)
        return len(decision.scheduled)

    print(sum(await asyncio.gather(*map(request, range(20)))))
    await database.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Coordinator:
    """Does what the handlers do, with a transaction for each call."""

    def __init__(self, database: Database, settings: PlatformSection) -> None:
        self.database = database
        self.settings = settings

    async def request(self, name: str, *, key: str = "", user: str = "", **fields: object) -> Decision:
        event = ExecutionRequested.model_validate(
            {"execution_id": name, "script": "print()", "metadata": {"user_id": user or name}} | fields
        )
        async with self.database.transaction() as connection:
            return await Admission(connection, self.settings).request(key or f"requested:{name}", event)

    async def end(self, name: str, *, key: str = "", state: ExecutionState = ExecutionState.FINISHED) -> Decision:
        async with self.database.transaction() as connection:
            return await Admission(connection, self.settings).end(key or f"ended:{name}", name, state)

    async def running(self) -> int:
        async with self.database.reading() as connection:
            found = select(func.count()).where(executions.c.state == "running")
            return int((await connection.execute(found)).scalar_one())


@pytest.fixture
def coordinator(database: Database, settings: PlatformSection) -> Coordinator:
    return Coordinator(database, settings)


def names(decision: Decision) -> list[str]:
    return [admitted.execution_id for admitted in decision.scheduled]


async def test_executions_are_scheduled_while_slots_are_free(coordinator: Coordinator) -> None:
    decisions = [await coordinator.request(name) for name in "abc"]

    assert [names(decision) for decision in decisions] == [["a"], ["b"], []]


async def test_an_ended_execution_frees_its_slot_for_the_next(coordinator: Coordinator) -> None:
    for name in "abc":
        await coordinator.request(name)

    assert names(await coordinator.end("a")) == ["c"]


async def test_higher_priority_is_scheduled_first_and_then_older_requests(coordinator: Coordinator) -> None:
    for name, priority in {"x": 0, "y": 0, "low": 1, "old": 5, "young": 5, "high": 9}.items():
        await coordinator.request(name, priority=priority)

    admitted = [names(await coordinator.end(ended)) for ended in ("x", "y", "high", "old")]

    assert admitted == [["high"], ["old"], ["young"], ["low"]]


async def test_one_user_cannot_take_all_slots(coordinator: Coordinator) -> None:
    await coordinator.request("a1", user="ann", priority=9)
    await coordinator.request("a2", user="ann", priority=9)

    decision = await coordinator.request("b1", user="bob", priority=0)

    assert names(decision) == ["b1"]
    assert names(await coordinator.end("a1")) == ["a2"]


async def test_requests_without_a_user_share_one_limit(coordinator: Coordinator) -> None:
    await coordinator.request("a", metadata={})

    assert names(await coordinator.request("b", metadata={})) == []


async def test_the_queue_survives_a_restart(coordinator: Coordinator, settings: PlatformSection) -> None:
    for name in "abc":
        await coordinator.request(name)
    reopened = Database(settings.database_url)
    await reopened.open()

    decision = await Coordinator(reopened, settings).end("a")

    await reopened.close()
    assert names(decision) == ["c"]


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"timeout_seconds": 301}, "timeout_seconds"), ({"memory_limit_mb": 4_096}, "memory"), ({"cpu_limit": 5}, "cpu")],
)
async def test_a_request_beyond_the_limits_is_rejected(
    coordinator: Coordinator, limit: dict[str, Any], reason: str
) -> None:
    decision = await coordinator.request("a", **limit)

    assert decision.rejected is not None
    assert reason in decision.rejected
    assert decision.scheduled == ()
    assert await coordinator.running() == 0


async def test_a_rejected_execution_id_cannot_be_used_again(coordinator: Coordinator) -> None:
    await coordinator.request("a", timeout_seconds=301)

    decision = await coordinator.request("a", key="second")

    assert decision.rejected == "an execution of this id was rejected before"


async def test_a_second_request_for_a_running_execution_changes_nothing(coordinator: Coordinator) -> None:
    await coordinator.request("a")

    decision = await coordinator.request("a", key="second")

    assert decision == Decision()


async def test_a_request_for_a_finished_execution_is_rejected(coordinator: Coordinator) -> None:
    await coordinator.request("a")
    await coordinator.end("a")

    decision = await coordinator.request("a", key="second")

    assert decision.rejected == "an execution of this id has already finished"


async def test_a_cancellation_that_overtakes_its_request_is_not_forgotten(coordinator: Coordinator) -> None:
    await coordinator.end("a", state=ExecutionState.CANCELLED)

    decision = await coordinator.request("a")

    assert decision.rejected == "the execution was cancelled"


async def test_a_cancelled_execution_leaves_the_queue(coordinator: Coordinator) -> None:
    for name in "abcd":
        await coordinator.request(name)
    await coordinator.end("c", state=ExecutionState.CANCELLED)

    assert names(await coordinator.end("a")) == ["d"]


async def test_a_duplicate_end_frees_only_one_slot(coordinator: Coordinator) -> None:
    for name in "abcd":
        await coordinator.request(name)

    first = await coordinator.end("a", key="completed")
    second = await coordinator.end("a", key="failed")

    assert names(first) == ["c"]
    assert names(second) == []
    assert await coordinator.running() == 2


async def test_a_rerun_after_the_commit_publishes_the_same_events(coordinator: Coordinator) -> None:
    """The worker died between the commit and publishing, and other executions ended in the meantime."""
    for name in "abcd":
        await coordinator.request(name)
    lost = await coordinator.end("a")
    await coordinator.end("b")
    await coordinator.end("c")

    again = await coordinator.end("a")

    assert names(again) == ["c"]
    assert again == lost
    assert list(map(fingerprint_of, events_of(again, "a"))) == list(map(fingerprint_of, events_of(lost, "a")))


async def test_a_rerun_of_a_rejected_request_returns_the_same_rejection(coordinator: Coordinator) -> None:
    lost = await coordinator.request("a", timeout_seconds=301)

    assert await coordinator.request("a", timeout_seconds=301) == lost


async def test_a_rerun_after_a_rollback_makes_a_new_decision(
    coordinator: Coordinator, database: Database, settings: PlatformSection
) -> None:
    event = ExecutionRequested(execution_id="a", script="print()")

    async def decide_and_die() -> None:
        async with database.transaction() as connection:
            await Admission(connection, settings).request("requested:a", event)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await decide_and_die()

    assert await coordinator.running() == 0
    assert names(await coordinator.request("a")) == ["a"]


async def test_concurrent_coordinators_never_assign_a_slot_twice(
    coordinator: Coordinator, settings: PlatformSection
) -> None:
    others = [Database(settings.database_url) for _ in range(2)]
    racing = [coordinator, *(Coordinator(other, settings) for other in others)]

    decided = await asyncio.gather(*(racing[number % 3].request(f"e{number}") for number in range(24)))

    for other in others:
        await other.close()
    assert sum(len(decision.scheduled) for decision in decided) == settings.max_running
    assert await coordinator.running() == settings.max_running


async def test_coordinators_in_two_processes_never_assign_a_slot_twice(
    coordinator: Coordinator, settings: PlatformSection
) -> None:
    command = [sys.executable, "-W", "error", "-c", REQUEST, settings.database_url]
    here = Path(__file__).parents[2]

    processes = [
        await asyncio.create_subprocess_exec(*command, name, cwd=here, stdout=asyncio.subprocess.PIPE) for name in "ab"
    ]
    counts = [(await process.communicate())[0] for process in processes]

    assert sum(map(int, counts)) == settings.max_running
    assert await coordinator.running() == settings.max_running


async def test_every_execution_is_scheduled_once_in_any_order_of_ends(coordinator: Coordinator) -> None:
    scheduled = [name for number in range(20) for name in names(await coordinator.request(f"e{number}"))]

    for name in scheduled:
        scheduled.extend(names(await coordinator.end(name)))

    assert sorted(scheduled) == sorted(f"e{number}" for number in range(20))


def test_a_scheduled_event_has_the_metadata_of_its_request() -> None:
    scheduled = Decision.model_validate(
        {"scheduled": [{"execution_id": "a", "user_id": "ann", "correlation_id": "c1"}], "rejected": "no"}
    )

    rejection, event = events_of(scheduled, "r")

    assert isinstance(rejection, ExecutionRejected)
    assert rejection.execution_id == "r"
    assert isinstance(event, ExecutionScheduled)
    assert event.metadata == EventMetadata(service_name="coordinator", correlation_id="c1", user_id="ann")


async def test_an_overdue_execution_is_scheduled_again_once(
    coordinator: Coordinator, database: Database, settings: PlatformSection, publisher: RecordingPublisher
) -> None:
    for name in "abc":
        await coordinator.request(name)
    async with database.transaction() as connection:
        await connection.execute(update(executions).where(executions.c.execution_id == "a").values(remind_at=0))

    counts = [await repair(database, settings, publisher) for _ in range(2)]

    assert counts == [1, 0]
    assert [event.aggregate_id for event in publisher.events] == ["a"]


async def test_old_decisions_are_deleted(
    coordinator: Coordinator, database: Database, settings: PlatformSection
) -> None:
    await coordinator.request("a")
    await coordinator.request("b")
    async with database.transaction() as connection:
        await connection.execute(update(decisions).where(decisions.c.key == "requested:a").values(decided_at=0))
        forgotten = await forget_old_decisions(connection, settings)

    async with database.reading() as connection:
        left = (await connection.execute(select(decisions.c.key))).scalars().all()
    assert forgotten == 1
    assert left == ["requested:b"]
