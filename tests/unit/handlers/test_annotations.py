"""The annotation of a handler's first parameter, the event, is checked when the handler is registered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

import pytest

from integr8s_idem import BaseEvent, EventRouter
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import FromDishka


class OrderEvent(BaseEvent):
    order_id: str


class OrderPlaced(OrderEvent):
    event_type: Literal["order_placed"] = "order_placed"


class OrderPaid(OrderEvent):
    event_type: Literal["order_paid"] = "order_paid"


class Payments: ...


class HasOrder(Protocol):
    order_id: str


EventT = TypeVar("EventT", bound=OrderEvent)


async def same(event: OrderPlaced) -> None: ...
async def base(event: OrderEvent) -> None: ...
async def union(event: OrderPlaced | OrderPaid) -> None: ...
async def unannotated(event) -> None: ...  # type: ignore[no-untyped-def]
async def anything(event: Any) -> None: ...
async def annotated(event: Annotated[OrderPlaced, "the order"]) -> None: ...
async def protocol(event: HasOrder) -> None: ...
async def generic(event: EventT) -> None: ...
async def arguments(*events: OrderPlaced) -> None: ...
async def unknown(event: Undefined) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def another(event: OrderPaid) -> None: ...
async def text(event: str) -> None: ...
async def optional(event: None) -> None: ...
async def dependency(payments: FromDishka[Payments], event: OrderPlaced) -> None: ...
async def nothing() -> None: ...
async def keyword(*, event: OrderPlaced) -> None: ...


class Desk:
    async def method(self, event: OrderPlaced) -> None: ...

    async def wrong_method(self, event: str) -> None: ...

    async def __call__(self, event: OrderPaid) -> None: ...


Function = Callable[..., Awaitable[None]]


def name_of(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


GOOD: list[Function] = [
    same,
    base,
    union,
    unannotated,
    anything,
    annotated,
    protocol,
    generic,
    arguments,
    unknown,
    Desk().method,
    partial(same),
]
BAD: list[tuple[Function, str]] = [
    (
        another,
        "handler another takes event: OrderPaid, but it is registered for OrderPlaced; the first parameter takes the "
        "event: write event: OrderPlaced",
    ),
    (text, "handler text takes event: str, but it is registered for OrderPlaced"),
    (optional, "handler optional takes event: None"),
    (dependency, "handler dependency takes payments: "),
    (nothing, "handler nothing has no parameter for the event"),
    (keyword, "handler keyword has no parameter for the event"),
    (Desk().wrong_method, "handler Desk.wrong_method takes event: str"),
    (Desk(), "handler Desk takes event: OrderPaid"),
    (partial(text), "takes event: str"),
]


@pytest.mark.parametrize("function", GOOD, ids=name_of)
def test_an_annotation_that_accepts_the_event_is_registered(function: Function) -> None:
    router = EventRouter()

    router.on(OrderPlaced, name="charge")(function)

    assert [handler.event for handler in router.handlers] == [OrderPlaced]


@pytest.mark.parametrize(("function", "why"), BAD)
def test_an_annotation_that_excludes_the_event_is_refused(function: Function, why: str) -> None:
    router = EventRouter()

    with pytest.raises(ApplicationError) as refusal:
        router.on(OrderPlaced, name="charge")(function)

    assert why in str(refusal.value)
    assert router.handlers == ()


def test_a_union_covers_all_registered_events() -> None:
    EventRouter().on(OrderPlaced, OrderPaid)(union)
    EventRouter().on(OrderPlaced, OrderPaid)(base)
    with pytest.raises(ApplicationError, match=r"registered for OrderPaid.*write event: OrderPlaced \| OrderPaid"):
        EventRouter().on(OrderPlaced, OrderPaid)(same)  # type: ignore[arg-type]


def test_a_local_event_class_is_resolved() -> None:
    class Local(BaseEvent):
        event_type: Literal["local"] = "local"

    async def handle(event: Local) -> None: ...

    EventRouter().on(Local)(handle)
    with pytest.raises(ApplicationError, match="takes event: Local, but it is registered for OrderPlaced"):
        EventRouter().on(OrderPlaced, Local)(handle)  # type: ignore[arg-type]


async def a_list(events: list[OrderPlaced]) -> None: ...
async def a_sequence(events: Sequence[OrderEvent]) -> None: ...
async def an_iterable(events: Iterable[OrderPlaced | OrderPaid]) -> None: ...
async def a_bare_list(events: list) -> None: ...  # type: ignore[type-arg]
async def a_list_of_others(events: list[OrderPaid]) -> None: ...
async def a_tuple(events: tuple[OrderPlaced, ...]) -> None: ...


@pytest.mark.parametrize("function", [a_list, a_sequence, an_iterable, a_bare_list, unannotated, anything], ids=name_of)
def test_a_batch_handler_takes_a_list_of_events(function: Function) -> None:
    EventRouter().on_batch(OrderPlaced)(function)


@pytest.mark.parametrize("function", [same, text, a_list_of_others, a_tuple, nothing], ids=name_of)
def test_a_batch_handler_without_a_list_of_events_is_refused(function: Function) -> None:
    with pytest.raises(ApplicationError, match=r"write events?: list\[OrderPlaced\]|has no parameter for the event"):
        EventRouter().on_batch(OrderPlaced)(function)
