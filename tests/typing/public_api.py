"""The types of the public API, as a user's type checker sees them.  Checked by mypy; nothing here is run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, assert_type

from integr8s_idem import (
    Attempt,
    BaseEvent,
    EventDispatcher,
    EventMetadata,
    EventPublisher,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotencyRecord,
    IdempotencyRepository,
    IdempotencyStatus,
    IdempotentEventDispatcher,
    IdempotentEventHandler,
    KeyResolver,
    KeyStrategy,
    MemoryIdempotencyRepository,
    Outgoing,
    PermanentError,
    Platform,
    RedisIdempotencyRepository,
    Service,
    Settings,
    Verdict,
    derived_event_id,
    load_settings,
    run_services,
    with_idempotency,
)
from integr8s_idem.errors import LeaseLostError
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failed,
    InProgress,
    KeyReused,
    Reserved,
    Scheduled,
    StoreHealth,
)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


class ShopSettings(Settings):
    """Settings of an application."""


async def receipt() -> str:
    return "receipt-1"


async def nothing() -> None: ...


async def a_run_has_the_type_of_its_function(manager: IdempotencyManager) -> None:
    assert_type(await manager.run("order:1", receipt), str)
    assert_type(await manager.run("order:1", receipt, ttl=timedelta(days=1), fingerprint=b"0" * 16), str)
    await manager.run("order:1", nothing)


async def a_verdict_is_an_exhaustive_union(manager: IdempotencyManager) -> str:
    verdict = await manager.reserve("order:1")
    assert_type(verdict, Reserved | InProgress | Scheduled | Completed | Failed | KeyReused | Corrupt)
    match verdict:
        case Reserved(attempt=attempt):
            return f"reserved, attempt {assert_type(attempt, int)}"
        case InProgress(retry_after=retry_after) | Scheduled(retry_after=retry_after):
            return f"retry after {assert_type(retry_after, timedelta)}"
        case Completed() | Failed() | KeyReused() | Corrupt():
            return "no"


async def manager_operations_have_exact_types(manager: IdempotencyManager, reservation: Reserved) -> None:
    assert_type(await manager.reserve_many(["order:1"]), list[Verdict])
    assert_type(await manager.renew(reservation), list[bool])
    assert_type(await manager.complete(reservation, {"receipt": 1}), bool)
    assert_type(manager.completion(reservation), Completion)
    assert_type(await manager.fail(reservation, "no money"), bool)
    assert_type(await manager.release(reservation, reservation), list[bool])
    assert_type(await manager.get("order:1"), IdempotencyRecord | None)
    assert_type(await manager.delete("order:1"), bool)
    assert_type(await manager.count_active(), int)


async def every_store_implements_the_protocol(
    memory: MemoryIdempotencyRepository, redis: RedisIdempotencyRepository
) -> None:
    stores: list[IdempotencyRepository] = [memory, redis]
    assert_type(await stores[0].ping(), StoreHealth)
    async for record in stores[0].scan("idempotency:"):
        assert_type(record.status, IdempotencyStatus)


async def a_handler_keeps_its_type(router: EventRouter) -> None:
    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> str:
        return event.order_id

    assert_type(await charge(OrderPlaced(order_id="1")), str)
    assert_type(router.events, tuple[type[BaseEvent], ...])


def a_dispatcher_exposes_its_manager(router: EventRouter, manager: IdempotencyManager) -> None:
    assert_type(EventDispatcher(router).manager, IdempotencyManager | None)
    assert_type(IdempotentEventDispatcher(router, manager, ttl=timedelta(days=8)).manager, IdempotencyManager)
    resolver = KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: event.event_id)
    assert_type(IdempotentEventHandler(nothing, manager, resolver=resolver).ttl, timedelta | None)


async def a_guarded_call_is_any(manager: IdempotencyManager, event: OrderPlaced) -> None:
    # A replayed result has the type of the annotation at run time; the checker cannot know it.
    assert_type(await with_idempotency(event, nothing, manager, key_strategy=KeyStrategy.CONTENT_HASH), Any)


def handler_parameters_have_exact_types(attempt: Attempt, outgoing: Outgoing, event: OrderPlaced) -> None:
    assert_type(attempt.number, int)
    assert_type(attempt.fence, int)
    assert_type(attempt.deadline, float)
    assert_type(attempt.key_for("charge"), str)
    assert_type(event.metadata, EventMetadata)
    assert_type(derived_event_id(attempt.key, 0), str)
    outgoing.publish(event)


def settings_have_the_requested_class() -> None:
    assert_type(load_settings(), Settings)
    assert_type(load_settings(None, ShopSettings), ShopSettings)
    assert_type(Settings().idempotency_for("billing"), IdempotencyConfig)
    assert_type(IdempotencyConfig().lease, timedelta)


async def a_platform_runs(platform: Platform, publisher: EventPublisher, event: OrderPlaced) -> None:
    services = platform.choose(["billing"])
    assert_type(services, list[Service])
    assert_type(await run_services(services, Settings()), int)
    await publisher.publish(event, event)


def errors_expose_typed_attributes(lost: LeaseLostError) -> None:
    assert_type(lost.lease, timedelta)
    assert_type(lost.retryable, bool)
    raise PermanentError("the card was stolen") from lost
