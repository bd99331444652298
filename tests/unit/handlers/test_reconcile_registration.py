"""The registration of reconcile functions: what is accepted, and errors that say why something is not."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
from dishka import FromDishka, Provider, Scope, make_async_container
from dishka.exceptions import NoFactoryError

from integr8s_idem import BaseEvent, EventRouter, IdempotencyManager, MemoryIdempotencyRepository, Service, Settings
from integr8s_idem.config.store_sections import MemoryStoreSettings
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    setup_dishka,
)
from integr8s_idem.reconciliation import Answer, Done, NotDone
from integr8s_idem.runtime import make_container


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"


class Paid(BaseEvent):
    event_type: Literal["paid"] = "paid"


async def find(event: Placed) -> Answer:
    return Done("found")


async def fail(event: BaseEvent) -> str:
    raise ConnectionError


def manager() -> IdempotencyManager:
    return IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")


def router_with(reconcile: Any, *events: type[BaseEvent]) -> EventRouter:
    router = EventRouter()
    router.on(*(events or (Placed,)), name="charge", reconcile=reconcile)(fail)
    return router


async def test_a_dispatcher_without_a_container_asks() -> None:
    dispatcher, event = IdempotentEventDispatcher(router_with(find), manager()), Placed()

    [failed] = await dispatcher.dispatch(event)
    [found] = await dispatcher.dispatch(event)

    assert isinstance(failed, HandlerFailed)
    assert found == Executed("found", 2)


async def test_handlers_of_an_included_router_keep_their_reconcile_function() -> None:
    router, event = EventRouter(), Placed()
    router.include(router_with(find))
    dispatcher = IdempotentEventDispatcher(router, manager())

    await dispatcher.dispatch(event)

    assert await dispatcher.dispatch(event) == [Executed("found", 2)]


async def test_a_container_of_ones_own_injects_into_reconcile_functions() -> None:
    async def find_in(event: Placed, found: FromDishka[str]) -> Answer:
        return Done(found)

    provider, event = Provider(scope=Scope.APP), Placed()
    provider.provide(lambda: "injected", provides=str)
    container = make_async_container(provider, EventContextProvider())
    dispatcher = IdempotentEventDispatcher(router_with(find_in), manager())
    setup_dishka(container, dispatcher)

    await dispatcher.dispatch(event)

    assert await dispatcher.dispatch(event) == [Executed("injected", 2)]
    await container.close()


def test_missing_dependencies_of_a_reconcile_function_are_found_when_the_container_is_made() -> None:
    async def find_in(event: Placed, bank: FromDishka[complex]) -> Answer:
        return NotDone()

    find_in.__globals__.setdefault("FromDishka", FromDishka)
    providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router_with(find_in))]

    with pytest.raises((NoFactoryError, ApplicationError), match="complex"):
        make_container(Service("billing", providers=providers), Settings())


async def plain(event: Placed) -> Answer:
    return NotDone()


def not_async(event: Placed) -> Answer:
    return NotDone()


async def without_an_event() -> Answer:
    return NotDone()


class Finder:
    """A callable object."""

    async def __call__(self, event: Placed, found: FromDishka[str]) -> Answer:
        return Done(found)


class PlainFinder:
    def __call__(self, event: Placed) -> Answer:
        return NotDone()


async def find_with(prefix: str, event: Placed, found: FromDishka[str]) -> Answer:
    return Done(f"{prefix} {found}")


@pytest.mark.parametrize(
    ("reconcile", "events", "reason"),
    [
        (not_async, (Placed,), "^reconcile function not_async is not an async function"),
        (PlainFinder(), (Placed,), "^reconcile function .*PlainFinder.* is not an async function"),
        (partial(not_async), (Placed,), "^reconcile function .*not_async.* is not an async function"),
        (lambda _: NotDone(), (Placed,), "is a lambda, which is known to be async only .*: define it with async def"),
        (3, (Placed,), r"pass the function itself, as in @router.on\(…, reconcile=find\), not .* \(int\)"),
        (without_an_event, (Placed,), "^reconcile function without_an_event has no parameter for the event"),
        (find, (Placed, Paid), "^reconcile function find takes event: Placed, but it is registered for Paid"),
    ],
)
def test_a_function_that_cannot_be_asked_is_refused(reconcile: Any, events: Any, reason: str) -> None:
    with pytest.raises(ApplicationError, match=reason):
        EventRouter().on(*events, name="charge", reconcile=reconcile)


async def test_the_result_of_calling_a_reconcile_function_is_refused_without_a_warning() -> None:
    answer: Any = find(Placed())

    with pytest.raises(ApplicationError, match=r"not the result of calling it \(coroutine\)"):
        EventRouter().on(Placed, reconcile=answer)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await answer


CALLABLES = [(Finder(), "injected"), (partial(find_with, "was"), "was injected")]


@pytest.mark.parametrize(("reconcile", "found"), CALLABLES)
async def test_a_callable_object_or_a_partial_can_be_asked(reconcile: Any, found: str) -> None:
    provider, event = Provider(scope=Scope.APP), Placed()
    provider.provide(lambda: "injected", provides=str)
    container = make_async_container(provider, EventContextProvider())
    dispatcher = IdempotentEventDispatcher(router_with(reconcile), manager())
    setup_dishka(container, dispatcher)

    await dispatcher.dispatch(event)

    assert await dispatcher.dispatch(event) == [Executed(found, 2)]
    await container.close()


@pytest.mark.parametrize(("reconcile", "found"), CALLABLES)
async def test_a_container_of_a_service_injects_into_a_callable_object_or_a_partial(reconcile: Any, found: str) -> None:
    values = Provider(scope=Scope.APP)
    values.provide(lambda: "injected", provides=str)
    dispatcher = IdempotentDispatcherProvider(router_with(reconcile))
    service = Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), dispatcher, values])
    container, event = make_container(service, Settings(store=MemoryStoreSettings(kind="memory"))), Placed()
    made = await container.get(EventDispatcher)

    await made.dispatch(event)

    assert await made.dispatch(event) == [Executed(found, 2)]
    await container.close()


def test_a_plain_dispatcher_refuses_reconcile_functions() -> None:
    with pytest.raises(ApplicationError, match="asked only if the handler is guarded"):
        EventDispatcher(router_with(plain))


def test_a_transactional_handler_refuses_a_reconcile_function() -> None:
    outbox: Any = object()

    with pytest.raises(ApplicationError, match="its outcome is never unknown"):
        IdempotentEventDispatcher(router_with(plain), manager(), outbox=outbox)
