"""Routers and dispatchers: calls of handlers, and their outgoing events."""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta
from typing import Any, Literal

import pytest

from integr8s_idem.config import OnKeyReused
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import (
    ApplicationError,
    HandlerCancelledError,
    HandlerTimeoutError,
    InvalidKeyError,
    KeyReusedError,
    PermanentError,
    PublishError,
    StoreUnavailableError,
)
from integr8s_idem.events import BaseEvent, EventMetadata
from integr8s_idem.handlers.dispatcher import (
    EventDispatcher,
    EventHandler,
    IdempotentEventDispatcher,
    IdempotentEventHandler,
    with_idempotency,
)
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.records import Completed
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, guarded


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    tags: list[str] = []  # noqa: RUF012  # pydantic copies it


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"
    order_id: str = "1"


class Broker:
    """A publisher that keeps events, and can refuse them."""

    def __init__(self, refusals: int = 0) -> None:
        self.published: list[BaseEvent] = []
        self.refusals = refusals

    async def publish(self, *events: BaseEvent) -> None:
        if self.refusals:
            self.refusals -= 1
            raise PublishError("order_paid", "no broker")
        self.published.extend(events)


async def with_outgoing(handler: RegisteredHandler, call: HandlerCall) -> Any:
    """Call a handler with its whole `HandlerCall`."""
    return await handler.function(call)


async def pay(call: HandlerCall) -> str:
    call.outgoing.publish(OrderPaid())
    call.outgoing.publish(OrderPaid(order_id="2"))
    return "paid"


async def nothing(event: BaseEvent) -> None:
    pass


def test_a_router_keeps_handlers_in_the_order_of_registration() -> None:
    router = EventRouter()

    router.on(OrderPlaced, OrderPaid)(nothing)
    router.on(OrderPlaced, name="ship")(nothing)

    assert [(h.event_type, h.name) for h in router.handlers] == [
        ("order_placed", "nothing"),
        ("order_paid", "nothing"),
        ("order_placed", "ship"),
    ]
    assert router.events == (OrderPlaced, OrderPaid)


@pytest.mark.scenario(99)
def test_two_handlers_of_one_event_may_not_share_a_name() -> None:
    router, other = EventRouter(), EventRouter()
    router.on(OrderPlaced)(nothing)
    other.on(OrderPlaced)(nothing)

    with pytest.raises(ApplicationError, match="two handlers named nothing"):
        router.include(other)


def test_two_classes_may_not_share_an_event_type() -> None:
    class Impostor(BaseEvent):
        event_type: Literal["order_placed"] = "order_placed"

    router = EventRouter()
    router.on(OrderPlaced)(nothing)

    with pytest.raises(ApplicationError, match="OrderPlaced and Impostor share"):
        router.on(Impostor, name="other")(nothing)


def test_a_handler_without_events_or_of_an_event_without_a_type_is_refused() -> None:
    with pytest.raises(ApplicationError, match="at least one event class"):
        EventRouter().on()
    with pytest.raises(ApplicationError, match="does not define event_type"):
        EventRouter().on(BaseEvent)(nothing)


@pytest.mark.parametrize("function", [lambda event: nothing(event), functools.partial(nothing)])
def test_a_function_without_a_name_requires_a_name(function: Any) -> None:
    with pytest.raises(ApplicationError, match="name"):
        EventRouter().on(OrderPlaced)(function)
    with pytest.raises(ApplicationError, match="name"):
        IdempotentEventHandler(function, guarded().manager)

    EventRouter().on(OrderPlaced, name="pay")(function)


@pytest.mark.scenario(6)
@virtual_time
async def test_two_handlers_of_one_event_run_once_each() -> None:
    router, calls = EventRouter(), list[str]()
    for name in ("charge", "ship"):

        async def handle(event: BaseEvent, name: str = name) -> None:
            calls.append(name)

        router.on(OrderPlaced, name=name)(handle)
    dispatcher, event = IdempotentEventDispatcher(router, guarded().manager), OrderPlaced()

    first = await dispatcher.dispatch(event)
    second = await dispatcher.dispatch(event)

    assert sorted(calls) == ["charge", "ship"]
    assert [type(outcome) for outcome in first + second] == [Executed, Executed, Completed, Completed]


@virtual_time
async def test_an_unguarded_dispatcher_runs_a_handler_each_time() -> None:
    router, calls = EventRouter(), list[str]()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        calls.append(event.order_id)

    dispatcher = EventDispatcher(router)
    await dispatcher.dispatch(OrderPlaced())
    await dispatcher.dispatch(OrderPlaced())
    await dispatcher.dispatch(OrderPaid())

    assert calls == ["1", "1"]


@virtual_time
async def test_an_unguarded_execution_fails_after_its_maximum_attempts() -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        raise ValueError("no")

    (execution,) = EventDispatcher(router, max_attempts=3).executions(OrderPlaced())
    outcomes = [await execution.attempt() for _ in range(3)]

    assert [outcome.given_up for outcome in outcomes if isinstance(outcome, HandlerFailed)] == [False, False, True]


@pytest.mark.parametrize("guard", [False, True])
@virtual_time
async def test_a_cancelled_error_raised_by_a_handler_is_a_failure_of_the_handler(guard: bool) -> None:
    here, router = guarded(), EventRouter()

    @router.on(OrderPlaced)
    async def careless(event: OrderPlaced) -> None:
        task = asyncio.create_task(asyncio.sleep(1))
        task.cancel()
        await task

    dispatcher = IdempotentEventDispatcher(router, here.manager) if guard else EventDispatcher(router)

    (outcome,) = await dispatcher.dispatch(OrderPlaced())

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, HandlerCancelledError)
    assert "careless" in str(outcome.error)


@virtual_time
async def test_a_handler_is_stopped_at_its_timeout() -> None:
    here, router = guarded(), EventRouter()

    @router.on(OrderPlaced)
    async def slow(event: OrderPlaced) -> None:
        await asyncio.sleep(LEASE * 3)

    (outcome,) = await IdempotentEventDispatcher(router, here.manager, timeout=timedelta(seconds=5)).dispatch(
        OrderPlaced()
    )

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, HandlerTimeoutError)
    assert asyncio.get_running_loop().time() == 5


@virtual_time
async def test_a_store_error_of_one_handler_does_not_interrupt_the_others() -> None:
    here, router, ends = guarded(), EventRouter(), list[str]()

    @router.on(OrderPlaced)
    async def good(event: OrderPlaced) -> None:
        await asyncio.sleep(5)
        ends.append("good")

    @router.on(OrderPlaced)
    async def bad(event: OrderPlaced) -> None:
        here.store.down.add("complete")

    with pytest.raises(StoreUnavailableError):
        await IdempotentEventDispatcher(router, here.manager).dispatch(OrderPlaced())

    assert ends == ["good"]


@virtual_time
async def test_outgoing_events_are_published_after_success_and_before_completion() -> None:
    here, broker = guarded(), Broker()
    here.store.held["complete"] = asyncio.Event()
    handler = IdempotentEventHandler(pay, here.manager, invoke=with_outgoing, publisher=broker)
    running = asyncio.create_task(handler(OrderPlaced()))
    await asyncio.sleep(1)

    assert here.store.calls["complete"] == 1
    assert len(broker.published) == 2
    here.store.held["complete"].set()
    assert await running == "paid"


@virtual_time
async def test_a_failed_handler_publishes_nothing() -> None:
    broker = Broker()

    async def fail(call: HandlerCall) -> None:
        call.outgoing.publish(OrderPaid())
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await IdempotentEventHandler(fail, guarded().manager, invoke=with_outgoing, publisher=broker)(OrderPlaced())

    assert broker.published == []


@virtual_time
async def test_a_rerun_publishes_the_same_ids_and_two_handlers_different_ones() -> None:
    event, ids = OrderPlaced(), list[list[str]]()
    for name in ("pay", "pay", "other"):
        broker = Broker()
        await IdempotentEventHandler(pay, guarded().manager, name=name, invoke=with_outgoing, publisher=broker)(event)
        ids.append([published.event_id for published in broker.published])

    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4


@virtual_time
async def test_an_id_set_by_the_handler_is_kept() -> None:
    broker = Broker()

    async def give(call: HandlerCall) -> None:
        call.outgoing.publish(OrderPaid(event_id="mine"))

    await EventHandler(give, invoke=with_outgoing, publisher=broker)(OrderPlaced())

    assert broker.published[0].event_id == "mine"


@virtual_time
async def test_outgoing_events_have_the_service_name_and_the_correlation_id() -> None:
    broker, manager = Broker(), guarded().manager
    incoming = OrderPlaced(metadata=EventMetadata(user_id="bob", service_name="shop"))

    await IdempotentEventHandler(pay, manager, invoke=with_outgoing, publisher=broker)(incoming)

    metadata = broker.published[0].metadata
    assert (metadata.service_name, metadata.correlation_id, metadata.user_id) == ("billing", incoming.event_id, "bob")


@virtual_time
async def test_with_wait_for_store_publishing_is_retried_without_a_second_run() -> None:
    here, broker, runs = guarded(), Broker(refusals=20), list[int]()

    async def once(call: HandlerCall) -> None:
        runs.append(call.attempt.number)
        await pay(call)

    handler = IdempotentEventHandler(once, here.manager, invoke=with_outgoing, publisher=broker)

    async def soon(error: Exception) -> None:
        await asyncio.sleep(1)

    outcome = await handler.execution(OrderPlaced()).attempt(wait_for_store=soon)

    assert isinstance(outcome, Executed)
    assert runs == [1]
    assert len(broker.published) == 2


@virtual_time
async def test_without_wait_for_store_a_publish_error_is_raised() -> None:
    handler = IdempotentEventHandler(pay, guarded().manager, invoke=with_outgoing, publisher=Broker(refusals=1))

    with pytest.raises(PublishError):
        await handler(OrderPlaced())


@pytest.mark.scenario(14)
@virtual_time
async def test_the_key_is_computed_before_the_handler_can_modify_the_event() -> None:
    manager, runs = guarded().manager, list[int]()

    async def meddle(event: OrderPlaced) -> None:
        runs.append(1)
        event.tags.append("seen")

    handler = IdempotentEventHandler(meddle, manager, resolver=KeyResolver(KeyStrategy.CONTENT_HASH))
    await handler(OrderPlaced())
    await handler(OrderPlaced())

    assert len(runs) == 1


@virtual_time
async def test_with_on_key_reused_run_a_reused_id_runs_as_other_work() -> None:
    here, broker = guarded(on_key_reused=OnKeyReused.RUN), Broker()
    handler = IdempotentEventHandler(pay, here.manager, invoke=with_outgoing, publisher=broker)

    await handler(OrderPlaced(event_id="1"))
    await handler(OrderPlaced(event_id="1", order_id="another"))

    assert len({event.event_id for event in broker.published}) == 4


@virtual_time
async def test_a_reused_id_with_another_payload_fails_after_its_maximum_attempts() -> None:
    here, router = guarded(on_key_reused=OnKeyReused.RUN, max_attempts=2), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        if event.order_id == "another":
            raise ValueError("no")

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    await dispatcher.dispatch(OrderPlaced(event_id="1"))
    (execution,) = dispatcher.executions(OrderPlaced(event_id="1", order_id="another"))

    outcomes = [await execution.attempt() for _ in range(2)]

    assert [outcome.given_up for outcome in outcomes if isinstance(outcome, HandlerFailed)] == [False, True]


@virtual_time
async def test_with_idempotency_runs_a_function_once() -> None:
    manager, runs, event = guarded().manager, list[str](), OrderPlaced()

    async def charge(event: OrderPlaced) -> str:
        runs.append(event.order_id)
        return "receipt-1"

    results = [await with_idempotency(event, charge, manager, ttl=timedelta(days=1)) for _ in range(2)]

    assert (results, runs) == (["receipt-1", "receipt-1"], ["1"])
    with pytest.raises(KeyReusedError):
        await with_idempotency(OrderPlaced(event_id=event.event_id, order_id="2"), charge, manager)


@virtual_time
async def test_with_idempotency_supports_content_and_custom_keys() -> None:
    manager, runs = guarded().manager, list[str]()

    async def charge(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    for _ in range(2):
        await with_idempotency(OrderPlaced(), charge, manager, key_strategy=KeyStrategy.CONTENT_HASH)
        await with_idempotency(OrderPlaced(), charge, manager, key_strategy=KeyStrategy.CUSTOM, custom_key="order:1")

    assert len(runs) == 2
    with pytest.raises(InvalidKeyError):
        await with_idempotency(OrderPlaced(), charge, manager, key_strategy=KeyStrategy.CONTENT_HASH, fields={"nope"})


def test_a_resolver_that_does_not_match_the_events_is_refused_at_startup() -> None:
    router = EventRouter()
    router.on(OrderPlaced)(nothing)

    with pytest.raises(InvalidKeyError, match="OrderPlaced has no field nope"):
        IdempotentEventDispatcher(
            router, guarded().manager, resolver=KeyResolver(KeyStrategy.CONTENT_HASH, frozenset({"nope"}))
        )


@virtual_time
async def test_a_permanent_error_is_not_retried_by_unguarded_handlers() -> None:
    async def hopeless(event: OrderPlaced) -> None:
        raise PermanentError("no such user")

    outcome = await EventHandler(hopeless).execution(OrderPlaced()).attempt()

    assert isinstance(outcome, HandlerFailed)
    assert outcome.given_up
