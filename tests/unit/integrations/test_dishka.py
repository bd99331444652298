"""Dishka providers: validation of containers, and the scope of a handler call."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Annotated, Any, Literal

import pytest
from dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    FromComponent,
    FromDishka,
    Provider,
    Scope,
    from_context,
    make_async_container,
    provide,
)
from dishka.exceptions import ExitError, ImplicitOverrideDetectedError, NoFactoryError

from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.config.store_sections import MemoryStoreSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.steps import Steps
from integr8s_idem.engine.work import Attempt, Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError, InvalidKeyError
from integr8s_idem.events import BaseEvent
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
    inject,
    setup_dishka,
)
from integr8s_idem.keys.event_keys import KeyStrategy
from integr8s_idem.records import Completed, Completion
from integr8s_idem.runtime import Service, make_container
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Observer
from integr8s_idem.worker import EventPublisher
from tests.support.counting import CountingObserver

SETTINGS = Settings(store=MemoryStoreSettings(kind="memory"), idempotency=IdempotencyConfig(max_attempts=2))
CONTEXT: dict[Any, Any] = {Settings: SETTINGS, ServiceName: ServiceName("billing")}


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


class Payments:
    """A service of the application."""


class Missing:
    """A type without a provider."""


class Transaction:
    """A transaction of a REQUEST scope."""


class RecordingStore(MemoryIdempotencyRepository):
    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        self.steps.append("complete")
        return await super().complete(completions)


class RecordingPublisher(EventPublisher):
    def __init__(self, steps: list[str]) -> None:
        super().__init__(SETTINGS.kafka)
        self.steps = steps

    async def publish(self, *events: BaseEvent) -> None:
        self.steps.append("publish")


class Application(Provider):
    """A provider of the application, which records the order of steps."""

    scope = Scope.APP

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.commit_fails = False

    payments = provide(Payments)

    @provide(scope=Scope.REQUEST)
    async def transaction(self, event: BaseEvent) -> AsyncIterable[Transaction]:
        self.steps.append(f"begin {event.event_type}")
        yield Transaction()
        if self.commit_fails:
            raise ConnectionError("the database is gone")
        self.steps.append("commit")

    @provide(override=True)
    def publisher(self) -> EventPublisher:
        return RecordingPublisher(self.steps)

    @provide(override=True)
    def repository(self) -> IdempotencyRepository:
        return RecordingStore(self.steps)


def container_for(router: EventRouter, application: Application | None = None, *more: Provider) -> AsyncContainer:
    return make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router),
        application or Application(),
        *more,
        context=CONTEXT,
        validation_settings=STRICT_VALIDATION,
    )


def router_of(*handlers: Callable[..., Any]) -> EventRouter:
    router = EventRouter()
    for handler in handlers:
        router.on(OrderPlaced)(handler)
    return router


async def plain(event: OrderPlaced) -> None:
    """A handler without dependencies."""


async def test_a_container_provides_its_dispatcher_without_connecting_to_a_server() -> None:
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router_of(plain)),
        context={Settings: Settings(), ServiceName: ServiceName("billing")},
        validation_settings=STRICT_VALIDATION,
    )

    dispatcher = await container.get(EventDispatcher)

    assert isinstance(dispatcher, IdempotentEventDispatcher)
    assert dispatcher.manager is await container.get(IdempotencyManager)
    assert dispatcher.manager.scope == "billing"
    await container.close()


async def test_a_plain_service_needs_no_store() -> None:
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        KafkaProvider(),
        DispatcherProvider(router_of(plain)),
        context=CONTEXT,
        validation_settings=STRICT_VALIDATION,
    )

    dispatcher = await container.get(EventDispatcher)

    assert type(dispatcher) is EventDispatcher
    assert dispatcher.manager is None
    await container.close()


@pytest.mark.scenario(99)
def test_a_handler_with_a_missing_dependency_is_rejected_by_name() -> None:
    async def charge_the_card(event: OrderPlaced, missing: FromDishka[Missing]) -> None:
        raise AssertionError

    with pytest.raises(NoFactoryError, match="Missing") as caught:
        container_for(router_of(charge_the_card))

    assert "charge_the_card" in str(caught.value)


def test_two_dispatchers_in_one_container_are_rejected() -> None:
    with pytest.raises(ImplicitOverrideDetectedError, match="DispatcherProvider"):
        container_for(router_of(plain), None, DispatcherProvider(EventRouter()))


@pytest.mark.scenario(99)
def test_an_idempotent_dispatcher_without_a_manager_is_rejected() -> None:
    with pytest.raises(NoFactoryError, match="IdempotencyManager"):
        make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            KafkaProvider(),
            IdempotentDispatcherProvider(router_of(plain)),
            context=CONTEXT,
            validation_settings=STRICT_VALIDATION,
        )


async def two_plain(event: OrderPlaced, payments: Payments) -> None:
    """A handler that lacks `FromDishka`."""


async def none_plain(payments: FromDishka[Payments]) -> None:
    """A handler that lacks the event."""


@pytest.mark.parametrize(
    ("handler", "message"), [(two_plain, "neither: payments"), (none_plain, "the first parameter takes the event")]
)
def test_a_handler_takes_exactly_one_plain_parameter_its_event(handler: Callable[..., Any], message: str) -> None:
    with pytest.raises(ApplicationError, match=message) as caught:
        DispatcherProvider(router_of(handler))

    assert handler.__name__ in str(caught.value)


def test_a_key_strategy_that_matches_no_event_is_rejected() -> None:
    with pytest.raises(InvalidKeyError, match="order"):
        IdempotentDispatcherProvider(router_of(plain), key_strategy=KeyStrategy.CONTENT_HASH, fields=["order"])


async def pay(
    event: OrderPlaced,
    transaction: FromDishka[Transaction],
    outgoing: FromDishka[Outgoing],
    application: FromDishka[Application],
) -> str:
    application.steps.append("handle")
    outgoing.publish(OrderPaid())
    return "receipt-1"


class ApplicationProvider(Provider):
    application = from_context(Application, scope=Scope.APP)


def paying_container(application: Application) -> AsyncContainer:
    return make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router_of(pay)),
        application,
        ApplicationProvider(),
        context={**CONTEXT, Application: application},
        validation_settings=STRICT_VALIDATION,
    )


async def test_the_scope_closes_then_events_are_published_then_the_record_is_completed() -> None:
    application = Application()
    container = paying_container(application)

    (outcome,) = await (await container.get(EventDispatcher)).dispatch(OrderPlaced())

    assert outcome == Executed("receipt-1", 1)
    assert application.steps == ["begin order_placed", "handle", "commit", "publish", "complete"]
    await container.close()


async def test_a_failed_commit_fails_the_handler_and_publishes_nothing() -> None:
    application = Application()
    application.commit_fails = True
    container = paying_container(application)
    (execution,) = (await container.get(EventDispatcher)).executions(OrderPlaced())

    outcome = await execution.attempt()

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, OSError)
    assert not outcome.given_up
    assert application.steps == ["begin order_placed", "handle"]
    application.commit_fails = False
    assert await execution.attempt() == Executed("receipt-1", 2)
    await container.close()


class Receipts:
    """Another resource of a REQUEST scope."""


class FailingReceipts(Provider):
    """A provider that fails at the end of the scope."""

    scope = Scope.REQUEST

    @provide
    async def receipts(self) -> AsyncIterable[Receipts]:
        yield Receipts()
        raise OSError("the disk is full")


async def pay_with_receipt(
    event: OrderPlaced, transaction: FromDishka[Transaction], receipts: FromDishka[Receipts]
) -> None:
    if event.order_id == "declined":
        raise ValueError("no such card")


@pytest.mark.parametrize(("order_id", "kind"), [("1", ExitError), ("declined", ValueError)])
async def test_errors_of_a_closing_scope_are_raised_together_and_do_not_hide_the_handlers(
    order_id: str, kind: type[Exception]
) -> None:
    application = Application()
    application.commit_fails = True
    container = container_for(router_of(pay_with_receipt), application, FailingReceipts())
    (execution,) = (await container.get(EventDispatcher)).executions(OrderPlaced(order_id=order_id))

    outcome = await execution.attempt()

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, kind)
    assert "the disk is full" in "".join(traceback.format_exception(outcome.error))
    await container.close()


async def test_every_run_has_its_own_scope_with_event_and_attempt() -> None:
    seen: list[tuple[str, int, int]] = []

    async def look(
        event: OrderPlaced,
        attempt: FromDishka[Attempt],
        same: FromDishka[BaseEvent],
        transaction: FromDishka[Transaction],
    ) -> None:
        assert same is event
        seen.append((event.order_id, attempt.number, id(transaction)))
        if attempt.number == 1:
            raise ValueError("no")

    container = container_for(router_of(look))
    (execution,) = (await container.get(EventDispatcher)).executions(OrderPlaced(order_id="7"))

    await execution.attempt()
    await execution.attempt()

    assert [(order, number) for order, number, _ in seen] == [("7", 1), ("7", 2)]
    await container.close()


async def test_a_dependency_may_come_from_a_component() -> None:
    got: list[object] = []

    class OtherComponent(Provider):
        component = "elsewhere"
        scope = Scope.APP
        payments = provide(Payments)

    async def charge(
        event: OrderPlaced,
        here: FromDishka[Payments],
        there: Annotated[Payments, FromComponent("elsewhere")],
    ) -> None:
        got.extend((here, there))

    container = container_for(router_of(charge), None, OtherComponent())

    await (await container.get(EventDispatcher)).dispatch(OrderPlaced())

    assert [type(found) for found in got] == [Payments, Payments]
    assert got[0] is not got[1]
    await container.close()


@inject
async def helper(
    amount: int, payments: FromDishka[Payments], attempt: FromDishka[Attempt]
) -> tuple[int, Payments, int]:
    return amount, payments, attempt.number


async def test_inject_works_for_functions_called_by_a_handler() -> None:
    found: list[Any] = []

    async def charge(event: OrderPlaced) -> None:
        found.append(await helper(30))  # type: ignore[call-arg]  # the rest is injected

    container = container_for(router_of(charge))

    await (await container.get(EventDispatcher)).dispatch(OrderPlaced())

    assert found == [(30, await container.get(Payments), 1)]
    await container.close()


async def test_inject_outside_a_handler_raises_an_error() -> None:
    container = container_for(router_of(plain))
    (execution,) = (await container.get(EventDispatcher)).executions(OrderPlaced())
    await execution.attempt()

    with pytest.raises(ApplicationError, match="no event is being handled"):
        await helper(30)  # type: ignore[call-arg]  # the rest is injected

    await container.close()


async def test_setup_dishka_injects_into_handlers_of_a_custom_dispatcher() -> None:
    found: list[Any] = []

    async def charge(event: OrderPlaced, payments: FromDishka[Payments], attempt: FromDishka[Attempt]) -> str:
        found.append((payments, attempt.number))
        return "receipt-1"

    class PaymentsProvider(Provider):
        scope = Scope.APP
        payments = provide(Payments)
        attempt = from_context(Attempt, scope=Scope.REQUEST)

    container = make_async_container(PaymentsProvider())
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
    dispatcher, event = IdempotentEventDispatcher(router_of(charge), manager), OrderPlaced()
    setup_dishka(container, dispatcher)

    (first,), (second,) = await dispatcher.dispatch(event), await dispatcher.dispatch(event)

    assert first == Executed("receipt-1", 1)
    assert isinstance(second, Completed)
    assert found == [(await container.get(Payments), 1)]
    await manager.close()
    await container.close()


async def test_the_scope_of_a_handler_provides_steps() -> None:
    done: list[str] = []
    fails = [OSError("once")]

    async def step(name: str) -> str:
        done.append(name)
        return name.upper()

    async def charge(event: OrderPlaced, steps: FromDishka[Steps]) -> str:
        first = await steps.run("first", step, "a")
        if fails:
            raise fails.pop()
        return first + await steps.run("second", step, "b")

    container = container_for(router_of(charge))
    (execution,) = (await container.get(EventDispatcher)).executions(OrderPlaced())

    assert isinstance(await execution.attempt(), HandlerFailed)
    assert await execution.attempt() == Executed("AB", 2)
    assert done == ["a", "b"]
    await container.close()


def test_a_plain_service_does_not_provide_steps() -> None:
    async def charge(event: OrderPlaced, steps: FromDishka[Steps]) -> None:
        """Requires `Steps`, which no provider makes."""

    with pytest.raises(NoFactoryError, match="Steps"):
        make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            KafkaProvider(),
            DispatcherProvider(router_of(charge)),
            context=CONTEXT,
            validation_settings=STRICT_VALIDATION,
        )


@inject
@idempotent(key="above:{order_id}")
async def injected_above(order_id: str, payments: FromDishka[Payments]) -> str:
    _ran.append(order_id)
    return type(payments).__name__


@idempotent(key="below:{order_id}")
@inject
async def injected_below(order_id: str, payments: FromDishka[Payments]) -> str:
    _ran.append(order_id)
    return type(payments).__name__


@inject
@idempotent(key="given:{order_id}")
async def given_a_manager(order_id: str, manager: FromDishka[IdempotencyManager]) -> str:
    _ran.append(order_id)
    return manager.scope


_ran: list[str] = []


@pytest.mark.parametrize(
    ("function", "result"),
    [(injected_above, "Payments"), (injected_below, "Payments"), (given_a_manager, "billing")],
)
async def test_inject_works_above_and_below_idempotent(function: Callable[..., Any], result: str) -> None:
    _ran.clear()
    found: list[str] = []

    async def charge(event: OrderPlaced) -> None:
        found.extend([await function("7"), await function(order_id="7")])

    container = container_for(router_of(charge))
    await (await container.get(EventDispatcher)).dispatch(OrderPlaced())

    assert found == [result, result]
    assert _ran == ["7"]
    await container.close()


async def test_a_handler_registered_after_its_provider_is_rejected_at_startup() -> None:
    router = EventRouter()
    service = Service("billing", providers=[KafkaProvider(), DispatcherProvider(router)])

    @router.on(OrderPlaced)
    async def too_late(event: OrderPlaced) -> None: ...

    container = make_container(service, Settings())
    with pytest.raises(ApplicationError, match=r"handler too_late was registered after DispatcherProvider\(router\)"):
        await container.get(EventDispatcher)
    await container.close()


async def test_manager_publisher_and_dispatcher_use_the_observer_of_the_container() -> None:
    given = CountingObserver()
    overriding = Provider(scope=Scope.APP)
    overriding.provide(lambda: given, provides=Observer)
    providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router_of(plain))]
    service = Service("billing", providers=providers).with_providers(overriding)

    container = make_container(service, Settings.model_validate({"store": {"kind": "memory"}}))

    assert (await container.get(IdempotencyManager)).observer is given
    assert (await container.get(EventDispatcher)).observer is given
    assert (await container.get(EventPublisher))._observer is given
    await container.close()


def test_a_service_has_either_providers_or_a_factory() -> None:
    with pytest.raises(ApplicationError, match="needs either providers"):
        Service("billing")
    with pytest.raises(ApplicationError, match="needs either providers"):
        Service("billing", providers=[], container=lambda _: make_async_container())


async def test_application_settings_are_provided_under_their_own_class() -> None:
    class CustomSettings(Settings): ...

    container = make_container(
        Service("billing", providers=[KafkaProvider(), DispatcherProvider(EventRouter())]), CustomSettings()
    )

    assert await container.get(CustomSettings) is await container.get(Settings)
    await container.close()
