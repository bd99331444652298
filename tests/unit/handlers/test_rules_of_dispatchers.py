"""Rules for errors of handlers that are called without a worker."""

from __future__ import annotations

from typing import Literal

import pytest

from integr8s_idem.engine.work import Discarded, Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError, DiscardedError
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import discard, retry, stop
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import Completed
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import guarded


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


EVENT = OrderPlaced(event_id="7")


def router_of(*errors: Exception) -> EventRouter:
    """Return a router whose handler raises these errors, one in each run, and then succeeds."""
    planned, router = list(errors), EventRouter(failures=[discard(KeyError), stop(MemoryError)])

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> str:
        if planned:
            raise planned.pop(0)
        return "receipt"

    return router


@virtual_time
async def test_an_attempt_whose_error_is_discarded_says_so() -> None:
    error, shop = KeyError("withdrawn"), guarded()
    dispatcher = IdempotentEventDispatcher(router_of(error), shop.manager)

    assert await dispatcher.dispatch(EVENT) == [Discarded(error, 1)]
    [duplicate] = await dispatcher.dispatch(EVENT)

    assert isinstance(duplicate, Completed)
    assert shop.observer.counts[Signal.HANDLER_FAILED] == 1


@virtual_time
async def test_an_unguarded_attempt_whose_error_is_discarded_says_so() -> None:
    error = KeyError("withdrawn")

    assert await EventDispatcher(router_of(error)).dispatch(EVENT) == [Discarded(error, 1)]


@virtual_time
async def test_callers_get_the_error_that_was_discarded_and_later_an_error_that_says_so() -> None:
    [handler] = IdempotentEventDispatcher(router_of(KeyError("withdrawn")), guarded().manager).handlers

    with pytest.raises(KeyError, match="withdrawn"):
        await handler(EVENT)
    with pytest.raises(DiscardedError, match="discarded after attempt 1: KeyError: 'withdrawn'"):
        await handler(EVENT)


@virtual_time
async def test_an_attempt_whose_discard_cannot_be_recorded_is_not_settled() -> None:
    error, shop = KeyError("withdrawn"), guarded()
    dispatcher = IdempotentEventDispatcher(router_of(error), shop.manager)
    shop.store.fail_next("complete", times=10_000)

    [failed] = await dispatcher.dispatch(EVENT)

    assert isinstance(failed, HandlerFailed)
    assert (failed.error, failed.given_up) == (error, False)


@virtual_time
async def test_a_discard_is_recorded_once_the_store_responds() -> None:
    error, shop = KeyError("withdrawn"), guarded()
    dispatcher = IdempotentEventDispatcher(router_of(error), shop.manager)
    shop.store.fail_next("complete", times=3)

    assert await dispatcher.dispatch(EVENT) == [Discarded(error, 1)]


@virtual_time
async def test_an_attempt_whose_error_stops_a_service_releases_the_key_and_names_the_rule() -> None:
    dispatcher = IdempotentEventDispatcher(router_of(MemoryError()), guarded(max_attempts=1).manager)

    [failed] = await dispatcher.dispatch(EVENT)
    [executed] = await dispatcher.dispatch(EVENT)

    assert isinstance(failed, HandlerFailed)
    assert (failed.given_up, str(failed.rule)) == (False, "stop(MemoryError)")
    assert executed == Executed("receipt", 2)


@virtual_time
async def test_a_rule_permits_retries_where_the_policy_is_to_block() -> None:
    shop = guarded(on_failure="block")
    dispatcher = IdempotentEventDispatcher(router_of(OSError()), shop.manager, failures=[retry(OSError)])

    [failed] = await dispatcher.dispatch(EVENT)

    assert isinstance(failed, HandlerFailed)
    assert not failed.given_up


@pytest.mark.parametrize("failures", [[OSError], [discard(OSError), "retry"]])
def test_something_else_than_a_rule_is_refused(failures: list[object]) -> None:
    with pytest.raises(ApplicationError, match="takes a list of rules"):
        EventRouter(failures=failures)  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="takes a list of rules"):
        EventRouter().on(OrderPlaced, failures=failures)  # type: ignore[arg-type]
    with pytest.raises(ApplicationError, match="takes a list of rules"):
        EventDispatcher(EventRouter(), failures=failures)  # type: ignore[arg-type]
