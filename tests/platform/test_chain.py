"""All four services on an in-memory broker that delivers duplicates and fails to publish on purpose."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from dishka import AsyncContainer, Provider, Scope
from sqlalchemy import select

from integr8s_idem import EventDispatcher, EventPublisher
from integr8s_idem.engine.work import HandlerFailed
from integr8s_idem.errors import PublishError
from integr8s_idem.events import BaseEvent
from integr8s_idem.runtime import make_container
from providers import platform
from providers.settings import PlatformSettings
from services.database import Database, executions, results, sagas
from services.events import ExecutionCancelled, ExecutionRequested
from services.saga_orchestrator.saga import Sagas

MOST_TRIES = 4


class Broker:
    """Delivers every event to every service, in order, until it is handled."""

    def __init__(self, *, copies: int = 1) -> None:
        self.published: list[BaseEvent] = []
        self.fail_at = -1
        self.fails_after_sending = False
        self.dispatchers: list[EventDispatcher] = []
        self._copies = copies
        self.calls = 0
        self._waiting: deque[BaseEvent] = deque()

    async def publish(self, *events: BaseEvent) -> None:
        self.calls += 1
        failing = self.calls == self.fail_at
        if not failing or self.fails_after_sending:
            self.published.extend(events)
            self._waiting.extend(event for event in events for _ in range(self._copies))
        if failing:
            raise PublishError("a topic", "the broker is down")

    async def deliver_all(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            for dispatcher in self.dispatchers:
                await self._deliver(dispatcher, event)

    async def _deliver(self, dispatcher: EventDispatcher, event: BaseEvent) -> None:
        for _ in range(MOST_TRIES):
            outcomes = await dispatcher.dispatch(event)
            failures = [outcome.error for outcome in outcomes if isinstance(outcome, HandlerFailed)]
            if not failures:
                return
            assert all(isinstance(error, PublishError) for error in failures), failures
        raise AssertionError(f"{event.event_type} was never handled")

    def ids(self, event_type: str) -> list[str]:
        return [event.event_id for event in self.published if event.event_type == event_type]


class Chain:
    """The platform with its own containers on the in-memory broker."""

    def __init__(self, broker: Broker, services: dict[str, AsyncContainer]) -> None:
        self.broker = broker
        self.services = services

    async def request(self, *scripts: str, **fields: object) -> None:
        for number, script in enumerate(scripts):
            event = {"execution_id": f"e{number}", "script": script} | fields
            await self.broker.publish(ExecutionRequested.model_validate(event))
        await self.broker.deliver_all()

    async def statuses(self) -> list[str]:
        database = await self.services["result-processor"].get(Database)
        async with database.reading() as connection:
            found = select(results.c.status).order_by(results.c.execution_id)
            return list((await connection.execute(found)).scalars())

    async def states(self) -> tuple[list[str], list[str]]:
        """Return the states of all executions in the coordinator and in the saga orchestrator."""
        database = await self.services["coordinator"].get(Database)
        async with database.reading() as connection:
            admitted = select(executions.c.state).order_by(executions.c.execution_id)
            led = select(sagas.c.state).order_by(sagas.c.execution_id)
            return (
                list((await connection.execute(admitted)).scalars()),
                list((await connection.execute(led)).scalars()),
            )


@pytest.fixture(params=[1, 2], ids=["once", "twice"])
def broker(request: pytest.FixtureRequest) -> Broker:
    return Broker(copies=request.param)


@pytest.fixture
async def chain(broker: Broker, tmp_path: Path, database_url: str) -> AsyncIterator[Chain]:
    def broker_provider() -> Provider:
        provider = Provider(scope=Scope.APP)
        provider.provide(lambda: broker, provides=EventPublisher)
        return provider

    settings = PlatformSettings.model_validate(
        {
            "store": {"kind": "memory"},
            "platform": {
                "database_url": database_url,
                "runner": "subprocess",
                "scripts_as_root": True,
                "work_folder": str(tmp_path),
                "max_running": 2,
                "max_running_per_user": 2,
            },
        }
    )
    async with AsyncExitStack() as stack:
        services = {
            name: make_container(service.with_providers(broker_provider()), settings)
            for name, service in platform.services.items()
        }
        for container in services.values():
            stack.push_async_callback(container.close)
            broker.dispatchers.append(await container.get(EventDispatcher))
        yield Chain(broker, services)


def journal_script(journal: Path) -> str:
    return f"open({str(journal)!r}, 'a').write('run\\n')"


async def test_a_script_runs_and_its_result_is_stored(chain: Chain, tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    await chain.request(journal_script(journal))

    assert journal.read_text() == "run\n"
    assert await chain.statuses() == ["completed"]
    assert await chain.states() == (["finished"], ["completed"])


async def test_every_outcome_is_stored_as_one_result(chain: Chain) -> None:
    await chain.request("print()", "raise SystemExit(1)", "import time; time.sleep(600)", timeout_seconds=1)

    assert await chain.statuses() == ["completed", "failed", "timeout"]
    assert await chain.states() == (["finished"] * 3, ["completed", "failed", "timed_out"])


async def test_all_requests_run_if_there_are_more_than_slots(chain: Chain, tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    await chain.request(*([journal_script(journal)] * 6))

    assert journal.read_text() == "run\n" * 6
    assert await chain.statuses() == ["completed"] * 6


@pytest.mark.parametrize("fails_after_sending", [False, True], ids=["not sent", "answer lost"])
@pytest.mark.parametrize("fail_at", range(2, 7))
async def test_the_script_runs_once_if_any_publish_fails(
    chain: Chain, tmp_path: Path, fail_at: int, fails_after_sending: bool
) -> None:
    """Call 1 publishes the request; then come scheduled, create command, pod created, completed, result stored."""
    chain.broker.fail_at, chain.broker.fails_after_sending = fail_at, fails_after_sending
    journal = tmp_path / "journal"

    await chain.broker.publish(ExecutionRequested(execution_id="e0", script=journal_script(journal)))
    await chain.broker.deliver_all()

    assert chain.broker.calls > fail_at
    assert journal.read_text() == "run\n"
    assert await chain.statuses() == ["completed"]
    assert await chain.states() == (["finished"], ["completed"])
    for event in chain.broker.published:
        assert len(set(chain.broker.ids(event.event_type))) == 1


async def test_a_cancelled_execution_has_at_most_one_result(chain: Chain) -> None:
    await chain.broker.publish(
        ExecutionRequested(execution_id="e0", script="print()"),
        ExecutionCancelled(execution_id="e0", cancelled_by="ann"),
    )
    await chain.broker.deliver_all()

    assert len(await chain.statuses()) <= 1
    (admitted,), (led,) = await chain.states()
    assert admitted in {"cancelled", "finished"}
    assert led in {"cancelled", "completed", "failed"}


async def test_a_rejected_request_has_no_result_and_takes_no_slot(chain: Chain) -> None:
    await chain.request("print()", timeout_seconds=86_400)

    assert set(chain.broker.ids("execution_rejected"))
    assert await chain.statuses() == []
    assert (await chain.states())[0] == ["rejected"]


async def test_the_events_of_one_request_share_its_correlation_id(chain: Chain) -> None:
    await chain.request(*(["print()"] * 3))

    for number in range(3):
        mine = [event for event in chain.broker.published if event.aggregate_id == f"e{number}"]
        later = {event.metadata.correlation_id for event in mine if event.event_type != "execution_requested"}
        assert later == {mine[0].event_id}


async def test_a_sweep_during_the_handlers_publishes_nothing_new(chain: Chain) -> None:
    orchestrator = await chain.services["saga-orchestrator"].get(Sagas)

    await asyncio.gather(chain.request("print()", "print()"), orchestrator.sweep())
    await orchestrator.sweep()
    await chain.broker.deliver_all()

    assert await chain.statuses() == ["completed"] * 2
    assert len(set(chain.broker.ids("create_pod_command"))) == 2
