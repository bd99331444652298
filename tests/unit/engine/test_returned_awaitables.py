"""A result that nobody awaited fails the attempt, since its work is not done."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest

from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventRouter,
    IdempotencyManager,
    IdempotentEventDispatcher,
    idempotent,
)
from integr8s_idem.engine.work import HandlerFailed
from integr8s_idem.errors import ApplicationError
from integr8s_idem.handlers.handler_calls import RegisteredHandler, returned_by
from integr8s_idem.reconciliation import Answer, Done
from integr8s_idem.records import IdempotencyStatus, Reserved
from tests.support.guarded import Guarded, guarded

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")

NOT_AWAITED = "returned an awaitable that nobody awaited"


class Ordered(BaseEvent):
    event_type: Literal["ordered"] = "ordered"


class Later:
    """A custom awaitable, such as a query."""

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()


@dataclasses.dataclass
class Holder:
    inner: object


def _future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


def _task() -> asyncio.Task[int]:
    return asyncio.create_task(asyncio.sleep(0, 7))


AWAITABLES: list[Callable[[], Any]] = [lambda: asyncio.sleep(0, 7), _future, _task, Later]


@pytest.mark.parametrize("make", AWAITABLES)
async def test_a_function_that_forgets_to_await_fails_under_the_manager(make: Callable[[], Any]) -> None:
    manager = guarded().manager

    async def work() -> Any:
        return make()

    async def right() -> int:
        return 7

    with pytest.raises(ApplicationError, match=rf"order:1 {NOT_AWAITED} \(\w+\).*write return await"):
        await manager.run("order:1", work)
    assert await manager.run("order:1", right) == 7


async def test_a_decorated_function_and_a_step_that_forget_to_await_fail() -> None:
    manager = guarded().manager

    @idempotent(key="order:{number}", manager=manager)
    async def order(number: int) -> Any:
        return asyncio.sleep(0, number)

    async def work() -> None:
        await manager.steps().run("read", _forgetful_step)

    async def _forgetful_step() -> Any:
        return asyncio.sleep(0, 7)

    with pytest.raises(ApplicationError, match=NOT_AWAITED):
        await order(1)
    with pytest.raises(ApplicationError, match=f"step read {NOT_AWAITED}"):
        await manager.run("order:2", work)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: [asyncio.sleep(0)], r"\[0\]"),
        (lambda: {"sum": asyncio.sleep(0)}, r"\['sum'\]"),
        (lambda: Holder(asyncio.sleep(0)), r"\.inner"),
    ],
)
async def test_an_awaitable_within_a_result_fails_the_run(make: Callable[[], Any], place: str) -> None:
    async def work() -> Any:
        return make()

    with pytest.raises(ApplicationError, match=rf"contains an awaitable .* \(coroutine\) at {place}\."):
        await guarded().manager.run("order:1", work)


async def test_a_result_of_an_awaitable_answer_fails_the_run() -> None:
    here = guarded()

    async def fail() -> int:
        raise ConnectionError

    async def find() -> Answer:
        return Done(asyncio.sleep(0, 7))

    with pytest.raises(ConnectionError):
        await here.manager.run("order:1", fail)
    with pytest.raises(ApplicationError, match=NOT_AWAITED):
        await here.manager.run("order:1", fail, reconcile=find)


async def test_the_caller_of_complete_cannot_pass_an_awaitable() -> None:
    manager = guarded().manager
    reserved = await manager.reserve("order:1")
    assert isinstance(reserved, Reserved)

    with pytest.raises(ApplicationError, match=NOT_AWAITED):
        await manager.complete(reserved, asyncio.sleep(0, 7))


def _forgetful(make: Callable[[], Any]) -> EventRouter:
    router = EventRouter()

    @router.on(Ordered)
    async def handle(event: Ordered) -> Any:
        return make()

    return router


def _plain(router: EventRouter, _: IdempotencyManager) -> EventDispatcher:
    return EventDispatcher(router)


@pytest.mark.parametrize("make_dispatcher", [IdempotentEventDispatcher, _plain])
@pytest.mark.parametrize("make", AWAITABLES)
async def test_a_handler_that_forgets_to_await_fails(make: Callable[[], Any], make_dispatcher: Any) -> None:
    here: Guarded = guarded()
    dispatcher: EventDispatcher = make_dispatcher(_forgetful(make), here.manager)

    [outcome] = await dispatcher.dispatch(Ordered())

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, ApplicationError)
    assert f"handle {NOT_AWAITED}" in str(outcome.error)
    assert IdempotencyStatus.COMPLETED not in [record.status async for record in here.store.scan("")]


async def test_a_batch_handler_that_forgets_to_await_fails() -> None:
    router = EventRouter()

    @router.on_batch(Ordered, max_wait=0)
    async def handle(events: list[Ordered]) -> Any:
        return [asyncio.sleep(0) for _ in events]

    [outcome] = await EventDispatcher(router).dispatch(Ordered())

    assert isinstance(outcome, HandlerFailed)
    assert f"handle {NOT_AWAITED}" in str(outcome.error)


async def test_a_handler_fails_before_its_dependencies_are_closed() -> None:
    async def handle(event: Ordered) -> Any:
        return asyncio.sleep(0)

    registered = RegisteredHandler(Ordered, "handle", handle)
    with pytest.raises(ApplicationError, match=NOT_AWAITED):
        returned_by(registered, await handle(Ordered()))
