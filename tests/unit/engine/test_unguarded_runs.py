"""Runs without a reservation, which a policy allows, have attempts and steps of their own."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

from integr8s_idem import Steps
from integr8s_idem.engine.work import Attempt, HandlerFailed, Work
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry.log_fields import context_fields
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import ParcelSent, dispatcher_of

CHARGED_BODY, OTHER_BODY = b"a" * 16, b"b" * 16


@virtual_time
async def test_without_the_store_code_gets_the_attempt_of_its_run() -> None:
    here, attempts = guarded(on_store_error="open"), list[Attempt]()

    async def pay() -> None:
        attempts.append(here.manager.attempt())

    with here.store.outage():
        await here.manager.run("order:7", pay)

    [attempt] = attempts
    assert attempt.number == 1
    assert attempt.key == here.manager.space.full(Key.of("order:7"))


@virtual_time
async def test_without_the_store_steps_run_without_records() -> None:
    here, reserved = guarded(on_store_error="open"), list[str]()

    async def reserve(order: str) -> str:
        reserved.append(order)
        return "shelf 3"

    async def fulfil() -> str:
        return await here.manager.steps().run("reserve", reserve, "7")

    with here.store.outage():
        assert await here.manager.run("order:7", fulfil) == "shelf 3"

    assert reserved == ["7"]
    assert [record async for record in here.store.scan("")] == []


@virtual_time
async def test_an_endpoint_gets_its_attempt_without_the_store() -> None:
    here, app = guarded(on_store_error="open"), FastAPI()

    @app.post("/orders", status_code=201)
    async def place() -> str:
        return here.manager.attempt().key_for("charge")

    app.add_middleware(IdempotencyKeyMiddleware, manager=here.manager, identity=anyone)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")
    with here.store.outage():
        response = await client.post("/orders", headers={"Idempotency-Key": '"k"'})

    assert response.status_code == 201
    assert response.json().endswith(":charge")


async def charge_items(here: Guarded, charged: list[str], *, body: bytes | None = None) -> None:
    """Charge two items, each in a run of its own."""

    async def pay() -> None:
        charged.append(here.manager.attempt().key_for("charge"))

    for item in ("a", "b"):
        await here.manager.run(f"item:{item}", pay, fingerprint=body)


@virtual_time
async def test_runs_without_the_store_within_another_run_have_keys_of_their_own() -> None:
    here, charged = guarded(on_store_error="open"), list[str]()

    async def order() -> None:
        here.store.down.add("reserve")
        await charge_items(here, charged)
        charged.append(here.manager.attempt().key_for("charge"))

    await here.manager.run("order:7", order)

    assert len(set(charged)) == 3  # a bank that recognizes keys charges each of them


@virtual_time
async def test_reused_keys_that_may_run_have_downstream_keys_of_their_own() -> None:
    here, charged = guarded(on_key_reused="run"), list[str]()
    await charge_items(here, charged, body=CHARGED_BODY)

    await here.manager.run("order:7", lambda: charge_items(here, charged, body=OTHER_BODY))

    assert len(set(charged)) == 4


@virtual_time
async def test_steps_within_a_run_without_the_store_are_not_those_of_the_outer_run() -> None:
    here, printed = guarded(on_store_error="open"), list[str]()

    async def print_label(item: str) -> str:
        printed.append(item)
        return item

    async def ship(item: str) -> None:
        steps: Steps = here.manager.steps()
        assert await steps.run("label", print_label, item) == item

    async def order() -> None:
        here.store.down.add("reserve")
        for item in ("a", "b"):
            await here.manager.run(f"item:{item}", lambda item=item: ship(item))  # type: ignore[misc]

    await here.manager.run("order:7", order)

    assert printed == ["a", "b"]


@virtual_time
async def test_a_task_that_outlives_its_run_without_the_store_sees_that_it_is_over() -> None:
    here, leftover = guarded(on_store_error="open"), list[asyncio.Task[bool]]()

    async def is_over() -> bool:
        await asyncio.sleep(1)
        run = here.manager.executor.runs.current()
        assert run is not None
        return run.is_over

    async def pay() -> None:
        leftover.append(asyncio.create_task(is_over()))

    with here.store.outage():
        await here.manager.run("order:7", pay)

    assert await leftover[0]


@virtual_time
async def test_log_records_of_a_run_without_the_store_have_its_attempt() -> None:
    here, fields = guarded(on_store_error="open"), list[object]()

    async def pay() -> None:
        fields.append(context_fields(keys=True).get("attempt"))

    with here.store.outage():
        await here.manager.run("order:7", pay)

    assert fields == [1]


@virtual_time
async def test_an_outage_between_attempts_does_not_reset_their_number() -> None:
    here, numbers = guarded(on_store_error="open", max_attempts=10), list[int]()
    work = Work(Key.of("order:7"))

    async def pay(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        raise ConnectionError

    for is_down in (False, False, True, True, False):
        here.store.down = {"reserve"} if is_down else set()
        assert isinstance(await here.manager.execute(work, pay), HandlerFailed)

    assert numbers == [1, 2, 3, 4, 5]


@virtual_time
async def test_an_outage_between_attempts_of_a_handler_does_not_reset_their_number() -> None:
    here, logged = guarded(on_store_error="open", max_attempts=10), list[object]()

    async def handle(event: ParcelSent) -> None:
        logged.append(here.manager.attempt().number)
        raise ConnectionError

    [execution] = dispatcher_of(handle, here).executions(ParcelSent(number=1))
    for is_down in (False, False, True):
        here.store.down = {"reserve"} if is_down else set()
        assert isinstance(await execution.attempt(), HandlerFailed)

    assert logged == [1, 2, 3]
    assert execution.log_fields()["attempt"] == 3


@virtual_time
async def test_a_request_without_an_answer_keeps_its_token_while_runs_without_it_fail() -> None:
    """The next attempt finds the reservation that the store made although its answer was lost."""
    here, numbers = guarded(on_store_error="open"), list[int]()
    work = Work(Key.of("order:7"))

    async def pay(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        if len(numbers) == 1:
            raise ConnectionError

    here.store.lose_answer("reserve")
    assert isinstance(await here.manager.execute(work, pay), HandlerFailed)
    assert not isinstance(await here.manager.execute(work, pay), HandlerFailed)

    assert len(numbers) == 2


@virtual_time
async def test_a_last_failure_that_cannot_be_recorded_is_given_up_without_a_record() -> None:
    here = guarded(on_store_error="open", max_attempts=1)

    async def pay(_: Attempt) -> None:
        here.store.down = {"fail"}
        raise ConnectionError

    outcome = await here.manager.execute(Work(Key.of("order:7")), pay)

    assert isinstance(outcome, HandlerFailed)
    assert outcome.given_up
    assert (await here.record("order:7")).status is IdempotencyStatus.PROCESSING
