"""Returned iterators are read within the run, and all callers get the same collection."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import threading
import typing
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Reversible,
    Sequence,
    Set,
)
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytest
from dishka import Provider, Scope, make_async_container, provide
from pydantic import BaseModel, Field, RootModel

from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventRouter,
    IdempotencyManager,
    IdempotentEventDispatcher,
    IdempotentEventHandler,
    PartialFailureError,
    idempotent,
    with_idempotency,
)
from integr8s_idem.engine.iterators import refuse_iterator
from integr8s_idem.engine.results import repeatable
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError, ResultDecodeError
from integr8s_idem.handlers.handler_calls import BatchCall, BatchSize, HandlerCall, RegisteredHandler
from integr8s_idem.integrations import aiokafka, confluent
from integr8s_idem.integrations.dishka import FromDishka, setup_dishka
from integr8s_idem.records import Completed, IdempotencyStatus, Reserved
from integr8s_idem.telemetry import Signal
from tests.support.fake_consumer import FakeRecord
from tests.support.guarded import Guarded, guarded


class Ordered(BaseEvent):
    event_type: Literal["ordered"] = "ordered"
    number: int = 1


def numbers() -> Iterator[int]:
    yield 1
    yield 2


def lazily(items: list[int], effect: Callable[[int], object]) -> Iterator[int]:
    for item in items:
        effect(item)
        yield item


class Countdown:
    """A custom iterator."""

    def __init__(self) -> None:
        self.left = 2

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class Wrapper:
    """Delegates everything to a file, like the wrappers of `tempfile`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(io.BytesIO(b"x"), name)


async def pages() -> AsyncIterator[int]:
    yield 1


ITERATORS: list[tuple[Callable[[], Any], list[Any]]] = [
    (numbers, [1, 2]),
    (lambda: map(str, [1, 2]), ["1", "2"]),
    (lambda: iter([1, 2]), [1, 2]),
    (lambda: iter({"a": 1}.values()), [1]),
    (lambda: itertools.chain([1], [2]), [1, 2]),
    (Countdown, [1, 0]),
    (lambda: iter([]), []),
]

READ_ONCE: list[tuple[Callable[[], Any], str]] = [
    (pages, "an async iterator"),
    (lambda: io.BytesIO(b"x"), "its content, as bytes"),
    (lambda: Wrapper(), "its content, as bytes"),
    (lambda: {"rows": numbers()}, r"contains an iterator \(generator\) at \['rows'\]\."),
    (lambda: [{"rows": [map(str, [1])]}], r"contains an iterator \(map\) at \[0\]\['rows'\]\[0\]\."),
    (lambda: Page(rows=iter([1])), r"contains an iterator \(\w+\) at \.rows\."),
    (lambda: Table(iter([1])), r"contains an iterator \(\w+\) at \.rows\."),
    (lambda: {"file": io.StringIO("x")}, "a file object"),
    (lambda: itertools.groupby([1]), r"contains an iterator \(_grouper\) at \[0\]\[1\]\."),
]


class Page(BaseModel):
    rows: Iterable[int]


@dataclasses.dataclass
class Table:
    rows: Iterator[int]


def _returning(make: Callable[[], Any]) -> Callable[[], Any]:
    async def work() -> Any:
        return make()

    return work


@pytest.mark.parametrize(("make", "items"), ITERATORS)
async def test_the_first_caller_and_every_duplicate_get_the_list(make: Callable[[], Any], items: list[Any]) -> None:
    manager = guarded().manager
    assert [await manager.run("order:1", _returning(make)) for _ in range(3)] == [items] * 3


@pytest.mark.parametrize("caching", [True, False])
async def test_a_lazy_iterator_runs_while_the_lease_is_held(caching: bool) -> None:
    here, seen = guarded(enable_result_caching=caching), list[int]()

    def work() -> Iterator[int]:
        return lazily([7], lambda _: seen.append(here.manager.attempt().number))

    assert await here.manager.run("order:1", _returning(work)) == [7]
    assert seen == [1]


async def test_an_error_of_a_lazy_iterator_fails_the_run() -> None:
    here, errors = guarded(), [OSError("the bank is away")]

    def failing() -> Iterator[str]:
        yield "half"
        if errors:
            raise errors.pop()

    with pytest.raises(OSError, match="the bank is away"):
        await here.manager.run("order:1", _returning(failing))
    assert (await here.record()).status is not IdempotencyStatus.COMPLETED
    assert here.observer.counts[Signal.HANDLER_FAILED] == 1
    assert await here.manager.run("order:1", _returning(failing)) == ["half"]
    assert (await here.record()).attempt == 2


@pytest.mark.parametrize(("make", "message"), READ_ONCE)
async def test_a_result_that_can_be_read_only_once_fails_the_run(make: Callable[[], Any], message: str) -> None:
    here = guarded()
    with pytest.raises(ApplicationError, match=message) as error:
        await here.manager.run("order:1", _returning(make))
    assert str(error.value).startswith("order:1 returned ")
    assert (await here.record()).status is not IdempotencyStatus.COMPLETED
    assert here.observer.counts[Signal.HANDLER_FAILED] == 1
    assert await here.manager.run("order:1", _returning(lambda: "receipt")) == "receipt"


async def test_a_run_without_the_store_reads_iterators_as_well() -> None:
    here = guarded(on_store_error="open")
    here.store.down.add("reserve")
    assert await here.manager.run("order:1", _returning(numbers)) == [1, 2]
    assert here.observer.counts[Signal.UNGUARDED] == 1


RETURN_TYPES = [
    Iterator[int],
    Iterable[int],
    typing.Generator[int, None, None],
    map,
    Iterator[int] | None,
    list[int],
    Iterator,
]


@pytest.mark.parametrize("promised", RETURN_TYPES)
async def test_a_duplicate_gets_a_list_for_every_iterator_annotation(promised: Any) -> None:
    async def work() -> Any:
        return numbers()

    work.__annotations__["return"] = promised
    manager = guarded().manager
    assert [await manager.run("order:1", work) for _ in range(2)] == [[1, 2], [1, 2]]
    decorated = idempotent(key=lambda: "order:2", manager=manager)(work)
    assert [await decorated() for _ in range(2)] == [[1, 2], [1, 2]]


async def test_a_duplicate_gets_items_of_the_annotated_type() -> None:
    class Row(BaseModel):
        number: int

    async def work() -> Any:
        return (Row(number=number) for number in (1, 2))

    work.__annotations__["return"] = Iterator[Row]
    manager = guarded().manager
    assert [await manager.run("order:1", work) for _ in range(2)] == [[Row(number=1), Row(number=2)]] * 2


# The type of the collection.


class Numbers(RootModel[list[int]]):
    """A named list type."""


COLLECTIONS: list[tuple[Any, Any]] = [
    (set[int], {1, 2}),
    (set[int] | None, {1, 2}),
    (frozenset, frozenset({1, 2})),
    (tuple[int, ...], (1, 2)),
    (tuple[int, int], (1, 2)),
    (tuple, (1, 2)),
    (deque[int], deque([1, 2])),
    (Sequence[int], [1, 2]),
    (Set[int], frozenset({1, 2})),
    (Collection[int], [1, 2]),
    (Collection, [1, 2]),
    (Reversible[int], [1, 2]),
    (Container[int] | None, [1, 2]),
    (list[str | int], [1, 2]),
    (Any, [1, 2]),
    (Numbers, Numbers([1, 2])),
]


async def _by_run(manager: IdempotencyManager, work: Any) -> list[Any]:
    return [await manager.run("order:1", work) for _ in range(2)]


async def _by_async_function(manager: IdempotencyManager, work: Any) -> list[Any]:
    guarded_work = idempotent(key=lambda: "order:1", manager=manager)(work)
    return [await guarded_work() for _ in range(2)]


async def _by_plain_function(manager: IdempotencyManager, work: Any) -> list[Any]:
    def plain() -> Any:
        return numbers()

    plain.__annotations__["return"] = work.__annotations__["return"]
    guarded_work = idempotent(key=lambda: "order:1", manager=manager)(plain)
    return [await asyncio.to_thread(guarded_work) for _ in range(2)]


async def _by_event(manager: IdempotencyManager, work: Any) -> list[Any]:
    async def handle(_: Ordered) -> Any:
        return await work()

    handle.__annotations__["return"] = work.__annotations__["return"]
    event = Ordered()
    return [await with_idempotency(event, handle, manager, name="ordered") for _ in range(2)]


async def _by_step(manager: IdempotencyManager, work: Any) -> list[Any]:
    seen = list[Any]()

    async def unit() -> None:
        seen.append(await manager.steps().run("read", work))
        if len(seen) == 1:
            raise OSError("once")

    with pytest.raises(OSError, match="once"):
        await manager.run("order:1", unit)
    await manager.run("order:1", unit)
    return seen


async def _by_loop_of_aiokafka(manager: IdempotencyManager, work: Any) -> list[Any]:
    async def handle(_: object) -> Any:
        return await work()

    handle.__annotations__["return"] = work.__annotations__["return"]
    return [await _aiokafka(manager).run(handle) for _ in range(2)]


async def _by_loop_of_confluent_kafka(manager: IdempotencyManager, work: Any) -> list[Any]:
    def handle(_: object) -> Any:
        return numbers()

    handle.__annotations__["return"] = work.__annotations__["return"]
    return [await asyncio.to_thread(_confluent(manager).run, handle) for _ in range(2)]


@pytest.mark.parametrize(
    "ask_twice",
    [
        _by_run,
        _by_async_function,
        _by_plain_function,
        _by_event,
        _by_step,
        _by_loop_of_aiokafka,
        _by_loop_of_confluent_kafka,
    ],
)
@pytest.mark.parametrize(("promised", "expected"), COLLECTIONS)
async def test_the_first_caller_and_a_duplicate_get_the_annotated_type(
    ask_twice: Callable[..., Awaitable[list[Any]]], promised: Any, expected: Any
) -> None:
    async def work() -> Any:
        return numbers()

    work.__annotations__["return"] = promised

    first, second = await ask_twice(guarded().manager, work)

    assert first == second == expected
    assert type(first) is type(second) is type(expected)


async def test_the_first_caller_gets_items_of_the_annotated_type() -> None:
    async def work() -> Any:
        return ({"number": number} for number in (1, 2))

    work.__annotations__["return"] = tuple[Line, ...]
    manager = guarded().manager

    assert [await manager.run("order:1", work) for _ in range(2)] == [(Line(number=1), Line(number=2))] * 2


async def test_items_that_do_not_match_the_annotation_reach_the_first_caller_unchanged() -> None:
    async def work() -> Any:
        return iter(["one"])

    work.__annotations__["return"] = set[int]
    manager = guarded().manager

    assert await manager.run("order:1", work) == ["one"]
    with pytest.raises(ResultDecodeError):
        await manager.run("order:1", work)


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_a_handler_in_a_scope_returns_the_annotated_type(is_guarded: bool) -> None:
    router = EventRouter()

    @router.on(Ordered)
    async def handle(event: Ordered, session: FromDishka[Session]) -> tuple[bool, ...]:
        return (session.open for _ in range(2))  # type: ignore[return-value]

    manager = guarded().manager
    dispatcher = IdempotentEventDispatcher(router, manager) if is_guarded else EventDispatcher(router)
    assert await _handled(dispatcher) == (True, True)


async def test_the_annotation_of_a_batch_handler_does_not_type_the_result_of_one_event() -> None:
    async def handle(events: list[Ordered]) -> tuple[int, ...]:
        return (event.number for event in events)  # type: ignore[return-value]

    batch = BatchSize(1, timedelta(milliseconds=1))
    handler = IdempotentEventHandler(handle, guarded().manager, event=Ordered, batch=batch)
    event = Ordered(number=7)

    assert [await handler(event) for _ in range(2)] == [7, 7]


# Generator functions.


async def _async_generator(*_: object) -> AsyncIterator[int]:
    yield 1


def _generator(*_: object) -> Iterator[int]:
    yield 1


class _Callable:
    def __call__(self, *_: object) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("function", [_async_generator, _generator, partial(_generator), _Callable()])
async def test_generator_functions_are_rejected_before_reserving(function: Any) -> None:
    here = guarded()
    manager = here.manager
    rejected = pytest.raises(ApplicationError, match="is a generator, which returns before its work is done")
    with rejected:
        await manager.run("order:1", function)
    with rejected:
        idempotent(key=lambda: "order:1", manager=manager)(function)
    with rejected:
        EventRouter().on(Ordered, name="ordered")(function)
    with rejected:
        EventRouter().on_batch(Ordered, name="ordered")(function)
    with rejected:
        await with_idempotency(Ordered(), function, manager, name="ordered")
    for delivery in (_aiokafka(manager), _confluent(manager)):
        with rejected:
            running = delivery.run(function)
            if asyncio.iscoroutine(running):
                await running
    assert [record async for record in here.store.scan("")] == []

    async def unit() -> None:
        with rejected:
            await manager.steps().run("step", function)

    await manager.run("order:1", unit)


# Other entry points.


async def test_a_step_returns_the_list_to_its_own_run_and_to_a_later_one() -> None:
    manager, seen = guarded().manager, list[Any]()

    async def unit() -> None:
        seen.append(await manager.steps().run("read", _returning(numbers)))
        if len(seen) == 1:
            raise OSError("once")

    with pytest.raises(OSError, match="once"):
        await manager.run("order:1", unit)
    await manager.run("order:1", unit)
    assert seen == [[1, 2], [1, 2]]


@pytest.mark.parametrize("once", ["at_least_once", "at_most_once"])
async def test_a_step_that_returns_an_async_iterator_fails(once: Any) -> None:
    manager = guarded().manager

    async def unit() -> None:
        await manager.steps().run("read", _returning(pages), once=once)

    with pytest.raises(ApplicationError, match="step read returned an async iterator"):
        await manager.run("order:1", unit)


def test_a_plain_function_reads_its_iterator_in_its_own_thread() -> None:
    threads: list[int] = []

    @idempotent(key=lambda: "order:1", manager=guarded().manager)
    def work() -> Any:
        return lazily([1, 2], lambda _: threads.append(threading.get_ident()))

    assert [work(), work()] == [[1, 2], [1, 2]]
    assert threads == [threading.get_ident()] * 2


def test_a_confluent_loop_reads_the_iterator_in_its_own_thread() -> None:
    threads: list[int] = []

    def work(_: object) -> Any:
        return lazily([1, 2], lambda _: threads.append(threading.get_ident()))

    manager = guarded().manager
    assert [_confluent(manager).run(work) for _ in range(2)] == [[1, 2], [1, 2]]
    assert threads == [threading.get_ident()] * 2


async def test_an_aiokafka_loop_returns_the_list() -> None:
    async def work(_: object) -> Any:
        return numbers()

    manager = guarded().manager
    assert [await _aiokafka(manager).run(work) for _ in range(2)] == [[1, 2], [1, 2]]


async def test_a_handlers_iterator_is_read_before_its_events_are_published() -> None:
    router, published = EventRouter(), list[int]()

    class Publisher:
        async def publish(self, *events: BaseEvent) -> None:
            published.extend(event.number for event in events if isinstance(event, Ordered))

    @router.on(Ordered)
    async def handle(event: Ordered) -> Any: ...

    async def invoke(_: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, HandlerCall)
        return lazily([7, 8], lambda number: call.outgoing.publish(Ordered(number=number)))

    dispatcher = IdempotentEventDispatcher(router, guarded().manager, invoke=invoke, publisher=Publisher())
    [first] = await dispatcher.dispatch(Ordered(event_id="e"))
    [second] = await dispatcher.dispatch(Ordered(event_id="e"))
    assert isinstance(first, Executed)
    assert (first.value, published) == ([7, 8], [7, 8])
    assert isinstance(second, Completed)


class Session:
    """A database session that is closed with its scope."""

    def __init__(self) -> None:
        self.open = True


class SessionProvider(Provider):
    @provide(scope=Scope.REQUEST)
    def session(self) -> Iterable[Session]:
        session = Session()
        yield session
        session.open = False


async def _handled(dispatcher: EventDispatcher) -> Any:
    container = make_async_container(SessionProvider())
    setup_dishka(container, dispatcher)
    try:
        [outcome] = await dispatcher.dispatch(Ordered())
    finally:
        await container.close()
    assert isinstance(outcome, Executed), outcome
    return outcome.value


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_a_handlers_iterator_is_read_while_its_scope_is_open(is_guarded: bool) -> None:
    router = EventRouter()

    @router.on(Ordered)
    async def handle(event: Ordered, session: FromDishka[Session]) -> Any:
        return (session.open for _ in range(2))

    manager = guarded().manager
    dispatcher = IdempotentEventDispatcher(router, manager) if is_guarded else EventDispatcher(router)
    assert await _handled(dispatcher) == [True, True]


async def test_a_batch_handler_reads_the_results_of_its_events_while_its_scope_is_open() -> None:
    router = EventRouter()

    @router.on_batch(Ordered, max_wait=timedelta(milliseconds=1))
    async def handle(events: list[Ordered], session: FromDishka[Session]) -> Any:
        return ((session.open for _ in range(2)) for _ in events)

    assert await _handled(IdempotentEventDispatcher(router, guarded().manager)) == [True, True]


def _batches(handle: Callable[[Sequence[Ordered]], Any]) -> IdempotentEventDispatcher:
    router = EventRouter()

    async def handler(events: list[Ordered]) -> Any:
        return handle(events)

    router.on_batch(Ordered, max_wait=timedelta(milliseconds=1))(handler)
    return IdempotentEventDispatcher(router, guarded().manager)


async def test_a_batch_handler_may_return_an_iterator_of_results() -> None:
    dispatcher = _batches(lambda events: (event.number for event in events))
    events = [Ordered(number=number) for number in (7, 8)]
    outcomes = await asyncio.gather(*map(dispatcher.dispatch, events))
    assert [outcome.value for [outcome] in outcomes if isinstance(outcome, Executed)] == [7, 8]


async def test_only_the_event_with_an_unreadable_result_fails() -> None:
    dispatcher = _batches(lambda events: [pages() if event.number == 8 else numbers() for event in events])
    [[good], [bad]] = await asyncio.gather(*map(dispatcher.dispatch, [Ordered(number=7), Ordered(number=8)]))
    assert isinstance(good, Executed)
    assert good.value == [1, 2]
    assert isinstance(bad, HandlerFailed)
    assert isinstance(bad.error, ApplicationError)


async def test_results_next_to_failures_may_be_an_iterator() -> None:
    def handle(events: Sequence[Ordered]) -> Any:
        raise PartialFailureError({0: OSError("no")}, (iter([event.number]) for event in events))

    [[bad], [good]] = await asyncio.gather(*map(_batches(handle).dispatch, [Ordered(number=7), Ordered(number=8)]))
    assert isinstance(bad, HandlerFailed)
    assert isinstance(good, Executed)
    assert good.value == [8]


# Methods that take a result.


async def _reserved(here: Guarded) -> Reserved:
    verdict = await here.manager.reserve("order:1")
    assert isinstance(verdict, Reserved)
    return verdict


async def _complete(manager: IdempotencyManager, reserved: Reserved, result: Any) -> Any:
    return await manager.complete(reserved, result)


async def _completion(manager: IdempotencyManager, reserved: Reserved, result: Any) -> Any:
    return await manager.complete_many([manager.completion(reserved, result)])


async def _confirm(manager: IdempotencyManager, reserved: Reserved, result: Any) -> Any:
    return await manager.confirm_batch({reserved: result})


@pytest.mark.parametrize("method", [_complete, _completion, _confirm])
async def test_rejected_iterators_of_the_caller_are_not_consumed(method: Any) -> None:
    here = guarded()
    reserved = await _reserved(here)
    for make, _ in [*ITERATORS, *READ_ONCE]:
        with pytest.raises(ApplicationError, match="order:1 returned"):
            await method(here.manager, reserved, make())
    given = numbers()
    with pytest.raises(ApplicationError):
        await method(here.manager, reserved, {"rows": given})
    assert (await here.record()).status is IdempotencyStatus.PROCESSING
    assert list(given) == [1, 2]
    assert await method(here.manager, reserved, [1, 2]) in (True, [True])


# Other results are unchanged.


class Line(BaseModel):
    number: int


class Order(BaseModel):
    model_config = {"extra": "allow"}
    lines: list[Line]
    source: Any = Field(default=None, exclude=True)


def test_repeatable_results_are_unchanged() -> None:
    cyclic: list[Any] = [[]]
    cyclic.append(cyclic)
    whole = [{"lines": (1, {2}, frozenset({3}))}, Order(lines=[Line(number=1)]), Table(typing.cast("Any", [1]))]
    for value in (
        None,
        0,
        "",
        b"",
        [],
        {},
        False,
        object(),
        range(2),
        whole,
        cyclic,
        {"a": 1}.keys(),
        threading.Lock(),
    ):
        assert repeatable(value, "order:1") is value


def test_an_excluded_field_may_contain_an_iterator() -> None:
    order = Order(lines=[], source=numbers())
    assert repeatable(order, "order:1") is order


def test_extra_fields_are_checked() -> None:
    order = Order.model_validate({"lines": [], "rows": numbers()})
    with pytest.raises(ApplicationError, match=r"contains an iterator \(\w+\) at \.rows\."):
        refuse_iterator(order, "order:1")


# Deliveries without a broker.


class FakeMessage:
    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> None:
        return None

    def key(self) -> None:
        return None


def _confluent(manager: IdempotencyManager) -> confluent.Delivery:
    broker: Any = None
    message: Any = FakeMessage()
    return confluent.Delivery(broker, manager, message, confluent.by_position, None, None)


def _aiokafka(manager: IdempotencyManager) -> aiokafka.Delivery:
    broker: Any = None
    record: Any = FakeRecord("orders", 0, 7, None, b"{}")
    return aiokafka.Delivery(broker, manager, record, aiokafka.by_position, None, None)
