"""Batch handlers: several events in one call, each with its own key, lease and outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import pytest
from dishka import FromDishka, Provider, Scope, make_async_container, provide

from integr8s_idem import BaseEvent, EventRouter
from integr8s_idem.config import Settings
from integr8s_idem.config.store_sections import MemoryStoreSettings
from integr8s_idem.engine.work import Attempt, Executed, HandlerFailed, Outcome
from integr8s_idem.errors import ApplicationError, PartialFailureError, PermanentError
from integr8s_idem.handlers.batch_collector import BatchCollector, Member
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import (
    Batch,
    BatchCall,
    BatchSize,
    HandlerCall,
    RegisteredHandler,
    call_with_event,
)
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import Completed, Failed
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Guarded, guarded
from tests.support.stalling import ManualClock


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


class OrderIndexed(BaseEvent):
    event_type: Literal["order_indexed"] = "order_indexed"
    order_id: str


class Index:
    """A batch handler that can fail."""

    def __init__(self, size: int = 100, wait: float = 1.0) -> None:
        self.batches: list[list[str]] = []
        self.fails: dict[str, Exception] = {}
        self.all_fail: list[Exception] = []
        self.router = EventRouter()
        self.router.on_batch(OrderPlaced, max_size=size, max_wait=timedelta(seconds=wait))(self.index)

    async def index(self, events: Sequence[OrderPlaced]) -> list[str]:
        names = [event.order_id for event in events]
        self.batches.append(names)
        await asyncio.sleep(0.1)
        if self.all_fail:
            raise self.all_fail.pop()
        failures = {number: self.fails[name] for number, name in enumerate(names) if name in self.fails}
        results = [name.upper() for name in names]
        if failures:
            raise PartialFailureError(failures, results)
        return results


def _events(*names: str) -> list[OrderPlaced]:
    return [OrderPlaced(event_id=f"id-{name}", order_id=name) for name in names]


async def _attempts(here: Guarded, index: Index, events: Sequence[OrderPlaced]) -> list[Outcome[Any]]:
    dispatcher = IdempotentEventDispatcher(index.router, here.manager)
    executions = [execution for event in events for execution in dispatcher.executions(event)]
    return list(await asyncio.gather(*(execution.attempt() for execution in executions)))


def _begun(here: Guarded, router: EventRouter, *names: str) -> list[asyncio.Task[Outcome[Any]]]:
    """Begin an attempt of each event."""
    dispatcher = IdempotentEventDispatcher(router, here.manager)
    return [asyncio.create_task(dispatcher.executions(event)[0].attempt()) for event in _events(*names)]


@virtual_time
async def test_concurrent_events_are_handled_in_one_batch_and_each_has_its_result() -> None:
    here, index = guarded(), Index()
    assert await _attempts(here, index, _events("a", "b", "c")) == [
        Executed("A", 1),
        Executed("B", 1),
        Executed("C", 1),
    ]
    assert index.batches == [["a", "b", "c"]]
    assert (here.store.calls["reserve"], here.store.calls["complete"]) == (1, 1)


@virtual_time
async def test_a_batch_starts_at_its_maximum_size_or_after_its_maximum_wait() -> None:
    here, index = guarded(), Index(size=2, wait=5)
    await _attempts(here, index, _events("a", "b", "c"))
    assert index.batches == [["a", "b"], ["c"]]
    assert asyncio.get_running_loop().time() == pytest.approx(5.1)


@virtual_time
async def test_duplicates_never_reach_the_handler() -> None:
    here, index = guarded(), Index()
    await _attempts(here, index, _events("a"))
    again = await _attempts(here, index, _events("a", "b"))
    assert isinstance(again[0], Completed)
    assert index.batches == [["a"], ["b"]]


@virtual_time
async def test_a_partial_failure_fails_only_the_events_that_it_names() -> None:
    here, index = guarded(), Index()
    index.fails["b"] = OSError("no")
    outcomes = await _attempts(here, index, _events("a", "b", "c"))
    assert [type(outcome) for outcome in outcomes] == [Executed, HandlerFailed, Executed]
    assert isinstance(outcomes[1], HandlerFailed)
    assert str(outcomes[1].error) == "no"

    index.fails.clear()
    again = await _attempts(here, index, _events("a", "b", "c"))
    assert [type(outcome) for outcome in again] == [Completed, Executed, Completed]


@virtual_time
async def test_events_of_a_failed_batch_are_retried_individually() -> None:
    here, index = guarded(), Index()
    index.all_fail.append(OSError("all"))
    index.fails["b"] = OSError("no")
    first = await _attempts(here, index, _events("a", "b", "c"))
    assert {type(outcome) for outcome in first} == {HandlerFailed}
    again = await _attempts(here, index, _events("a", "b", "c"))
    assert [type(outcome) for outcome in again] == [Executed, HandlerFailed, Executed]
    assert index.batches[1:] == [["a"], ["b"], ["c"]]


@virtual_time
async def test_a_result_that_does_not_match_the_events_fails_all_of_them() -> None:
    router = EventRouter()

    @router.on_batch(OrderPlaced)
    async def wrong(events: Sequence[OrderPlaced]) -> list[int]:
        return [1]

    dispatcher = IdempotentEventDispatcher(router, guarded().manager)
    executions = [execution for event in _events("a", "b") for execution in dispatcher.executions(event)]
    outcomes = await asyncio.gather(*(execution.attempt() for execution in executions))
    for outcome in outcomes:
        assert isinstance(outcome, HandlerFailed)
        assert "received 2 events and returned an invalid result of type list" in str(outcome.error)


@virtual_time
@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (PartialFailureError({2: OSError("no")}), "received 2 events and raised PartialFailureError"),
        (PartialFailureError({-1: OSError("no")}), "invalid failures: -1"),
        (PartialFailureError({"id-b": OSError("no")}), "invalid failures: id-b"),  # type: ignore[dict-item]
        (PartialFailureError({1: "no such product"}), "invalid failures: 1"),  # type: ignore[dict-item]
        (PartialFailureError({1: OSError}), "invalid failures: 1"),  # type: ignore[dict-item]
        (PartialFailureError({1: OSError("no")}, ["A"]), "received 2 events and returned an invalid result"),
    ],
)
async def test_an_invalid_partial_failure_fails_all_events(raised: PartialFailureError, why: str) -> None:
    router = EventRouter()

    @router.on_batch(OrderPlaced)
    async def wrong(events: Sequence[OrderPlaced]) -> None:
        raise raised

    dispatcher = IdempotentEventDispatcher(router, guarded().manager)
    executions = [execution for event in _events("a", "b") for execution in dispatcher.executions(event)]
    async with asyncio.timeout(3600):
        outcomes = await asyncio.gather(*(execution.attempt() for execution in executions))
    for outcome in outcomes:
        assert isinstance(outcome, HandlerFailed)
        assert why in str(outcome.error)


@virtual_time
async def test_a_cancelled_event_does_not_affect_the_rest_of_its_batch() -> None:
    here, index = guarded(), Index()
    dispatcher = IdempotentEventDispatcher(index.router, here.manager)
    tasks = [asyncio.create_task(dispatcher.executions(event)[0].attempt()) for event in _events("a", "b", "c")]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    await asyncio.sleep(0.55)
    tasks[1].cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert ends[1] == Executed("B", 1), "the handler has indexed it"
    assert ends[2] == Executed("C", 1)
    assert index.batches == [["b", "c"]]


@virtual_time
async def test_a_batch_is_cancelled_when_all_its_events_are() -> None:
    here, ended = guarded(), list[str]()
    router = EventRouter()

    @router.on_batch(OrderPlaced, max_size=2)
    async def slow(events: Sequence[OrderPlaced]) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("stopped")

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    tasks = [asyncio.create_task(dispatcher.executions(event)[0].attempt()) for event in _events("a", "b")]
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert ended == ["stopped"]


@virtual_time
async def test_a_batch_that_is_cancelled_keeps_its_keys_until_its_handler_has_ended() -> None:
    here, router = guarded(), EventRouter()

    @router.on_batch(OrderPlaced, max_size=2)
    async def slow(events: Sequence[OrderPlaced]) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(5)  # stopping takes a while

    tasks = _begun(here, router, "a", "b")
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(4)

    assert await here.manager.count_active() == 2
    await asyncio.wait(tasks)
    await here.manager.close()
    assert await here.manager.count_active() == 0
    assert all(task.cancelled() for task in tasks)


@virtual_time
async def test_a_batch_handler_that_catches_its_cancellation_has_succeeded() -> None:
    here, router = guarded(), EventRouter()

    @router.on_batch(OrderPlaced, max_size=2)
    async def stubborn(events: Sequence[OrderPlaced]) -> list[str]:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return [event.order_id.upper() for event in events]
        raise AssertionError

    tasks = _begun(here, router, "a", "b")
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()

    assert await asyncio.gather(*tasks) == [Executed("A", 1), Executed("B", 1)]


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
@pytest.mark.parametrize("steps", range(25))
@virtual_time
async def test_events_cancelled_at_any_step_are_settled_if_their_handler_has_ended(steps: int, fails: bool) -> None:
    here, router, indexed = guarded(), EventRouter(), list[str]()

    @router.on_batch(OrderPlaced, max_size=3)
    async def index(events: Sequence[OrderPlaced]) -> None:
        await asyncio.sleep(0)
        indexed.extend(event.order_id for event in events)
        if fails:
            raise PermanentError("the index is full")

    tasks = _begun(here, router, "a", "b", "c")
    for _ in range(steps):
        await asyncio.sleep(0)
    for task in tasks[: steps % 3 + 1]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait(tasks)
        await here.manager.close()

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    for event in _events("a", "b", "c"):
        was_indexed = event.order_id in indexed
        outcome = await dispatcher.executions(event)[0].attempt()
        assert isinstance(outcome, Failed if fails else Completed) == was_indexed
    assert sorted(indexed) == ["a", "b", "c"], "none is handled twice"


@virtual_time
async def test_an_event_without_a_lease_is_handled_if_the_lease_of_another_one_is_late() -> None:
    clock, stalls = ManualClock(), [True]
    here, router, indexed = guarded(clock=clock, on_store_error="open"), EventRouter(), list[str]()

    async def stalled(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        if stalls:
            stalls.clear()
            clock.leap()
        return await call_with_event(handler, call)

    @router.on_batch(OrderPlaced, max_size=2)
    async def index(events: Sequence[OrderPlaced]) -> None:
        indexed.extend(event.order_id for event in events)

    dispatcher = IdempotentEventDispatcher(router, here.manager, invoke=stalled)
    guarded_one, unguarded = (dispatcher.executions(event)[0] for event in _events("a", "b"))
    first = asyncio.create_task(guarded_one.attempt())
    await asyncio.sleep(0.01)
    here.store.down = {"reserve"}
    second = asyncio.create_task(unguarded.attempt())
    await asyncio.sleep(0.01)
    here.store.down = set()

    assert isinstance(await first, Executed)
    assert isinstance(await second, Executed)
    assert sorted(indexed) == ["a", "b"]


@virtual_time
async def test_an_unguarded_dispatcher_supports_batches() -> None:
    index = Index()
    dispatcher = EventDispatcher(index.router)
    executions = [execution for event in _events("a", "b") for execution in dispatcher.executions(event)]
    assert await asyncio.gather(*(execution.attempt() for execution in executions)) == [
        Executed("A", 1),
        Executed("B", 1),
    ]
    assert index.batches == [["a", "b"]]


def test_invalid_batch_handlers_are_refused() -> None:
    router = EventRouter()
    with pytest.raises(ApplicationError, match="is not an event class"):
        router.on_batch(str)  # type: ignore[arg-type]
    for size in (0, 2.5, True, "2"):
        with pytest.raises(ApplicationError, match=f"max_size is {size!r}, but must be an integer of at least 1"):
            router.on_batch(OrderPlaced, max_size=size)  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="is not an async function"):
        router.on_batch(OrderPlaced)(lambda_like)  # type: ignore[type-var]


def lambda_like(events: list[OrderPlaced]) -> None:
    """A plain function."""


class Search:
    """A dependency of the application."""


async def test_a_batch_handler_can_inject_dependencies_and_its_batch() -> None:
    router, seen = EventRouter(), list[Any]()

    @router.on_batch(OrderPlaced, max_size=2)
    async def index(events: list[OrderPlaced], search: FromDishka[Search], batch: FromDishka[Batch]) -> list[str]:
        seen.append((search, [attempt.number for attempt in batch.attempts]))
        return [event.order_id for event in events]

    class Mine(Provider):
        search = provide(Search, scope=Scope.APP)

    context: dict[Any, Any] = {
        Settings: Settings(store=MemoryStoreSettings(kind="memory")),
        ServiceName: ServiceName("search"),
    }
    providers: tuple[DispatcherProvider, ...] = (IdempotentDispatcherProvider(router),)
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        *providers,
        Mine(),
        context=context,
    )
    dispatcher = await container.get(EventDispatcher)
    executions = [execution for event in _events("a", "b") for execution in dispatcher.executions(event)]
    assert await asyncio.gather(*(execution.attempt() for execution in executions)) == [
        Executed("a", 1),
        Executed("b", 1),
    ]
    assert seen == [(await container.get(Search), [1, 1])]
    await container.close()


class Panic(BaseException):
    """An error that is not an `Exception`, such as the panics of Rust extensions."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Panic("broken"), Panic),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (PartialFailureError({0: StopIteration()}), RuntimeError),
    ],
    ids=["panic", "cancelled", "stop iteration"],
)
@virtual_time
async def test_every_member_of_a_batch_ends_with_any_error_of_its_handler(
    error: BaseException, expected: type[BaseException]
) -> None:
    async def fail(members: Sequence[Member]) -> None:
        raise error

    collector = BatchCollector(BatchSize(2, timedelta(0)), fail, "index")
    members = [Member(event, Attempt(event.event_id, 1, 0, float("inf")), Outgoing()) for event in _events("a")]

    async with asyncio.timeout(60):
        with pytest.raises(expected):
            await collector.join(members[0])
