"""Common mistakes are rejected where they are made, with one sentence."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, cast

import pytest

from integr8s_idem import (
    BaseEvent,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotentEventHandler,
    KeyResolver,
    MemoryIdempotencyRepository,
    Platform,
)
from integr8s_idem.errors import ApplicationError, HandlerExitError, InProgressError, InvalidKeyError
from integr8s_idem.events import event_type_of
from integr8s_idem.keys import LONGEST_LABEL, Key, KeySpace
from tests.support.guarded import guarded
from tests.support.workers import OrderPlaced


async def handle(event: BaseEvent) -> str:
    return "done"


def test_a_platform_without_services_is_rejected() -> None:
    with pytest.raises(ApplicationError, match="at least one service"):
        Platform()


def test_a_handler_that_is_not_async_is_rejected_at_registration() -> None:
    def charge(event: OrderPlaced) -> None: ...

    with pytest.raises(ApplicationError, match=r"charge is not an async function"):
        EventRouter().on(OrderPlaced)(cast(Any, charge))


def test_a_decorator_without_its_event_is_rejected() -> None:
    with pytest.raises(ApplicationError, match="is not an event class"):
        EventRouter().on(cast(Any, handle))


@pytest.mark.parametrize("name", ["", "a b/c", "x" * 151, "naïve"])
def test_an_event_type_that_is_not_a_valid_topic_is_rejected(name: str) -> None:
    class Odd(BaseEvent):
        event_type: str = name

    with pytest.raises(ApplicationError, match="is not valid in a topic name"):
        event_type_of(Odd)


def test_an_event_type_with_two_values_is_rejected() -> None:
    class Both(BaseEvent):
        event_type: Literal["a", "b"] = "a"

    with pytest.raises(ApplicationError, match="does not define event_type"):
        event_type_of(Both)


@pytest.mark.parametrize("seconds", [0, 1, 299])
async def test_a_ttl_shorter_than_the_lease_is_rejected_everywhere(seconds: float) -> None:
    manager, ttl = guarded(processing_timeout_seconds=300).manager, timedelta(seconds=seconds)

    with pytest.raises(ApplicationError, match="shorter than the lease of 300 s"):
        await manager.run("order:1", lambda: handle(OrderPlaced(order_id="1")), ttl=ttl)
    with pytest.raises(ApplicationError, match="shorter than the lease"):
        IdempotentEventHandler(handle, manager, ttl=ttl)


def test_a_default_ttl_shorter_than_the_lease_is_rejected() -> None:
    config = IdempotencyConfig(default_ttl_seconds=1, processing_timeout_seconds=300)

    with pytest.raises(ApplicationError, match="shorter than the lease"):
        IdempotencyManager(config, MemoryIdempotencyRepository(), scope="billing")


def test_a_manager_without_a_scope_is_rejected() -> None:
    with pytest.raises(ApplicationError, match="needs a scope"):
        IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="")


async def test_a_policy_may_be_given_as_a_string() -> None:
    here = guarded()
    await here.manager.reserve("order:1")

    with pytest.raises(InProgressError):
        await here.manager.run("order:1", lambda: handle(OrderPlaced(order_id="1")), on_in_progress=cast(Any, "raise"))
    assert (
        await here.manager.run("order:1", lambda: handle(OrderPlaced(order_id="1")), on_in_progress=cast(Any, "skip"))
        is None
    )


def test_a_key_strategy_may_be_given_as_a_string_and_unknown_ones_are_rejected() -> None:
    event = OrderPlaced(order_id="1")

    assert KeyResolver(cast(Any, "content_hash")).resolve("h", event) == KeyResolver(
        KeyResolver(cast(Any, "content_hash")).strategy
    ).resolve("h", event)
    with pytest.raises(InvalidKeyError, match="use one of event_based, content_hash, custom"):
        KeyResolver(cast(Any, "by_magic"))


async def test_run_rejects_a_function_that_is_not_async() -> None:
    with pytest.raises(ApplicationError, match="not an async function"):
        await guarded().manager.run("order:1", cast(Any, lambda: "receipt"))


async def test_a_handler_that_calls_exit_fails_without_ending_the_process() -> None:
    async def leave(event: BaseEvent) -> None:
        raise SystemExit(0)

    with pytest.raises(HandlerExitError):
        await IdempotentEventHandler(leave, guarded().manager)(OrderPlaced(order_id="1"))


def test_long_keys_have_short_distinct_labels() -> None:
    first, second = Key.of("x" * 1_000_000 + "1"), Key.of("x" * 1_000_000 + "2")

    assert len(first.label) <= LONGEST_LABEL
    assert first.label != second.label


def test_generations_of_a_key_are_distinct_from_all_other_keys() -> None:
    first = Key.of_event("charge", "order_placed", "id", "1")

    full = KeySpace("idempotency", "billing").full
    assert first.in_generation(0) == first
    assert full(first.in_generation(1)) != full(Key.of_event("charge", "order_placed", "id", "1;1"))
    assert len({full(first.in_generation(number)) for number in range(5)}) == 5
