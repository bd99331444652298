"""Incorrect uses of `@idempotent`: rejected as early as possible, with a remedy."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from decimal import Decimal
from functools import wraps
from typing import Any

import pytest
from dishka import FromDishka, Provider, Scope, make_async_container
from dishka.integrations.fastapi import inject, setup_dishka
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from integr8s_idem import IdempotencyManager, PermanentError, idempotent
from integr8s_idem.config import OnFailure
from integr8s_idem.errors import ApplicationError, InvalidKeyError, PreviouslyFailedError
from tests.support.guarded import plain_manager


class Unreadable:
    """A type without a Pydantic schema."""


async def _named(name: str) -> str:
    return name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": "500"}, "ttl must be a non-negative timedelta"),
        ({"lock_timeout": timedelta(seconds=-5)}, "lock_timeout must be a non-negative timedelta"),
        ({"ttl": timedelta(seconds=1), "manager": plain_manager()}, "shorter than the lease"),
        ({"on_failure": "blokc"}, "on_failure must be 'retry' or 'block', not 'blokc'"),
        ({"re_execute_on_read": True, "on_failure": "block"}, "stores no outcome"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_option_is_rejected_at_decoration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ApplicationError, match=message):
        idempotent(key="{name}", **options)(_named)


@pytest.mark.parametrize(
    ("source", "message"),
    [("name", r"such as \['name'\]"), (["nam"], "the fingerprint uses 'nam', and the parameters of _named are name")],
)
def test_an_invalid_fingerprint_is_rejected_at_decoration(source: Any, message: str) -> None:
    with pytest.raises(InvalidKeyError, match=message):
        idempotent(key="{name}", fingerprint=source)(_named)


def test_a_template_with_a_format_is_rejected_with_one_hint() -> None:
    with pytest.raises(InvalidKeyError) as caught:
        idempotent(key="{name!r}")(_named)

    assert str(caught.value).count("Read more") == 1
    assert "use names only" in str(caught.value)


@pytest.mark.parametrize(("value", "message"), [(None, "is None"), (True, "is True"), ([1], "of type list")])
async def test_the_error_of_an_unsupported_key_value_lists_the_supported_types(value: Any, message: str) -> None:
    guarded = idempotent(key="{name}", manager=plain_manager())(_named)

    with pytest.raises(InvalidKeyError, match=f"{message}: keys are made of strings"):
        await guarded(value)


async def test_the_error_of_a_key_function_shows_what_it_returned() -> None:
    guarded = idempotent(key=lambda name: 7, manager=plain_manager())(_named)  # type: ignore[arg-type, return-value]

    with pytest.raises(InvalidKeyError, match="not 7"):
        await guarded("x")


async def test_a_key_function_receives_the_arguments_it_names_with_defaults() -> None:
    @idempotent(key=lambda currency, **given: f"{given['amount']} {currency}", manager=plain_manager())
    async def pay(amount: Decimal, currency: str = "EUR", *, note: str = "") -> str:
        return currency

    @idempotent(key=lambda currency: f"only {currency}", fingerprint=lambda note: note, manager=plain_manager())
    async def rate(currency: str = "EUR", *, note: str = "") -> str:
        return currency

    assert [await pay(Decimal(1)), await pay(Decimal(1), "EUR", note="paid")] == ["EUR", "EUR"]
    assert [await rate(), await rate("EUR", note="")] == ["EUR", "EUR"]


def test_classes_and_unreadable_result_types_are_rejected_at_decoration() -> None:
    async def numbered(name: str) -> None: ...

    numbered.__annotations__["return"] = Unreadable
    with pytest.raises(ApplicationError, match="is a class"):
        idempotent(key="{number}")(dict)
    with pytest.raises(ApplicationError, match="cannot be restored for a later caller"):
        idempotent(key="{name}")(numbered)


async def test_on_failure_accepts_a_string_or_the_enum() -> None:
    manager, runs = plain_manager(), list[str]()

    async def fail(name: str) -> None:
        runs.append(name)
        raise ConnectionError

    policies: list[Any] = ["block", OnFailure.BLOCK]
    for policy in policies:
        guarded = idempotent(key="{name}", manager=manager, on_failure=policy)(fail)
        with pytest.raises(ConnectionError):
            await guarded(repr(policy))
        with pytest.raises(PreviouslyFailedError):
            await guarded(repr(policy))
    with pytest.raises(ConnectionError):
        await manager.run("direct", lambda: fail("direct"), on_failure="block")
    with pytest.raises(PreviouslyFailedError):
        await manager.run("direct", lambda: fail("direct"), on_failure="block")

    assert len(runs) == 3


@pytest.mark.parametrize("error", [ConnectionError, PermanentError])
async def test_re_execute_on_read_does_not_store_failures(error: type[Exception]) -> None:
    manager, runs = plain_manager(max_attempts=2, on_failure="block"), 0

    @idempotent(key="{name}", manager=manager, re_execute_on_read=True)
    async def look(name: str) -> str:
        nonlocal runs
        runs += 1
        if runs < 8:
            raise error("no")
        return name

    for _ in range(7):
        with pytest.raises(error):
            await look("x")

    assert await look("x") == "x"


async def test_a_plain_function_that_returns_a_coroutine_raises_an_error() -> None:
    manager, runs = plain_manager(), list[str]()

    async def send(name: str) -> str:
        runs.append(name)
        return name

    @wraps(lambda name: None)
    def plain(name: str) -> Any:
        return send(name)

    guarded = idempotent(key="{name}", manager=manager)(plain)
    for _ in range(2):
        with pytest.raises(ApplicationError, match="so its work is not done"):
            await asyncio.to_thread(guarded, "x")

    assert runs == []


async def test_an_object_with_an_async_call_method_is_async() -> None:
    class Send:
        async def __call__(self, name: str) -> str:
            return name

    assert await idempotent(key="{name}", manager=plain_manager())(Send())("x") == "x"


@pytest.mark.parametrize("above", [True, False], ids=["@inject above", "@inject below"])
async def test_endpoints_injected_by_dishka_can_be_decorated(above: bool) -> None:
    provider, placed, app = Provider(scope=Scope.APP), list[str](), FastAPI()
    provider.provide(lambda: plain_manager(), provides=IdempotencyManager)
    container = make_async_container(provider)

    async def place(order: str, manager: FromDishka[IdempotencyManager]) -> str:
        placed.append(order)
        assert manager.attempt().number == 1
        return f"placed {order}"

    guard = idempotent(key="order:{order}", container=container)
    app.post("/orders/{order}")(inject(guard(place)) if above else guard(inject(place)))
    setup_dishka(container, app)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
        answers = [(await client.post("/orders/7")).json() for _ in range(2)]

    assert (answers, placed) == (["placed 7", "placed 7"], ["7"])
    await container.close()
