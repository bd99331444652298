"""Errors of handlers that are not an `Exception`: they are failures of the handler, as `sys.exit()` is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import HandlerExitError
from integr8s_idem.failures import discard
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler import EventHandler
from integr8s_idem.handlers.handler_calls import HandlerCall
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.reconciliation import Answer
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import (
    TOPIC,
    ParcelSent,
    all_committed,
    dispatcher_of,
    key_of,
    leases_left,
    reserved_by_another,
    sent,
    unfinished,
)


class Panic(BaseException):
    """As the panics of Rust extensions."""


ERRORS = pytest.mark.parametrize(
    "error",
    [
        Panic("called `unwrap` on None"),
        GeneratorExit(),
        SystemExit(3),
        BaseExceptionGroup("two tasks failed", [Panic("one"), ValueError("two")]),
    ],
    ids=lambda error: type(error).__name__,
)
WAITS = pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])


async def is_dead_lettered(here: Guarded | None, dispatcher: EventDispatcher, broker: FakeBroker) -> dict[str, bytes]:
    """Run a worker until everything is committed, and return the headers of the only dead letter."""
    async with running(dispatcher, broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}
    if here is not None:
        [record] = await here.store.get([key_of(here, 1)])
        assert record is not None
        assert record.status is IdempotencyStatus.FAILED
        assert await leases_left(here) == []
    [dead_letter] = broker.values(f"{TOPIC.topic}.dlq")
    return {name: value or b"" for name, value in dead_letter.headers}


@ERRORS
@WAITS
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
@virtual_time
async def test_a_handler_that_raises_any_error_fails(error: BaseException, waits: bool, is_guarded: bool) -> None:
    here, runs = guarded(max_attempts=2), list[int]()

    async def handle(event: ParcelSent) -> None:
        runs.append(event.number)
        if waits:
            await asyncio.sleep(1)
        if event.number == 1:
            raise error

    router = EventRouter()
    router.on(ParcelSent, name="handle")(handle)
    plain = EventDispatcher(router, max_attempts=2)
    used = here if is_guarded else None
    headers = await is_dead_lettered(used, dispatcher_of(handle, here) if is_guarded else plain, sent(3))

    assert sorted(runs) == [0, 1, 1, 2]
    assert headers["idempotency-dlq-error-class"] == b"HandlerExitError"
    assert type(error).__name__.encode() in headers["idempotency-dlq-error-message"].replace(
        b"sys.exit()", b"SystemExit"
    )


@ERRORS
@WAITS
@virtual_time
async def test_a_batch_handler_that_raises_any_error_fails(error: BaseException, waits: bool) -> None:
    here, batches, router = guarded(max_attempts=2), list[list[int]](), EventRouter()

    @router.on_batch(ParcelSent, name="handle", max_size=3)
    async def handle(events: Sequence[ParcelSent]) -> None:
        numbers = [event.number for event in events]
        batches.append(numbers)
        if waits:
            await asyncio.sleep(1)
        if 1 in numbers:
            raise error

    await is_dead_lettered(here, IdempotentEventDispatcher(router, here.manager), sent(3))

    assert sorted(batches)[-1] == [2]
    assert batches.count([1]) >= 1


@ERRORS
@WAITS
@virtual_time
async def test_a_reconcile_function_that_raises_any_error_fails(error: BaseException, waits: bool) -> None:
    here = guarded(max_attempts=3)
    questions = list[int]()

    async def find(event: ParcelSent) -> Answer:
        questions.append(event.number)
        if waits:
            await asyncio.sleep(1)
        raise error

    async def handle(event: ParcelSent) -> None:
        if event.number == 1:
            raise ConnectionError

    await is_dead_lettered(here, dispatcher_of(handle, here, reconcile=find), sent(2))

    assert questions == [1, 1]


@virtual_time
async def test_a_suspect_that_raises_any_error_fails() -> None:
    here, runs = guarded(max_attempts=2), list[int]()
    for _ in range(2):
        await reserved_by_another(here, 1, timedelta(seconds=1))
        await asyncio.sleep(2)

    async def handle(event: ParcelSent) -> None:
        runs.append(event.number)
        if event.number == 1:
            raise Panic("broken")

    await is_dead_lettered(here, dispatcher_of(handle, here), sent(3))

    assert sorted(runs) == [0, 1, 1, 2]


@virtual_time
async def test_a_rule_applies_to_errors_of_any_class() -> None:
    here = guarded()

    async def handle(event: ParcelSent) -> None:
        raise Panic("broken")

    broker = sent(2)
    dispatcher = dispatcher_of(handle, here, failures=[discard(HandlerExitError)])
    async with running(dispatcher, broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert not broker.values(f"{TOPIC.topic}.dlq")


@pytest.mark.parametrize("seconds", [None, 60], ids=["without a timeout", "with a timeout"])
async def test_a_handler_whose_coroutine_is_closed_does_not_fail(seconds: int | None) -> None:
    """Python closes coroutines whose event loop has ended; an error would be reported as one of the handler."""
    ends = list[str]()

    async def handle(event: ParcelSent) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    handler = EventHandler(handle, event=ParcelSent, timeout=seconds)
    call = handler.call(HandlerCall(ParcelSent(), Attempt("key", 1, 0, float("inf")), Outgoing()))
    call.send(None)

    call.close()

    assert ends == ["GeneratorExit"]


async def test_a_keyboard_interrupt_propagates() -> None:
    async def handle(event: ParcelSent) -> Any:
        raise KeyboardInterrupt

    handler = EventHandler(handle, event=ParcelSent)
    call = handler.call(HandlerCall(ParcelSent(), Attempt("key", 1, 0, float("inf")), Outgoing()))

    with pytest.raises(KeyboardInterrupt):
        call.send(None)
