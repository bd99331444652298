"""`@idempotent` on async functions and methods."""

from __future__ import annotations

import asyncio
import inspect
import typing
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from dishka import Provider, Scope, make_async_container
from pydantic import BaseModel

from integr8s_idem import IdempotencyManager
from integr8s_idem.config import OnFailure, OnInProgress
from integr8s_idem.errors import (
    ApplicationError,
    IdempotencyConflictError,
    InvalidKeyError,
    KeyReusedError,
    PreviouslyFailedError,
)
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import guarded, plain_manager


class Refund(BaseModel):
    order_id: str
    amount: Decimal


@dataclass
class Receipt:
    number: int


@virtual_time
async def test_a_second_call_gets_the_first_result_with_its_type() -> None:
    manager, runs = guarded().manager, []

    @idempotent(key="refund:{order_id}", manager=manager)
    async def refund(order_id: str, amount: Decimal) -> Refund:
        runs.append(order_id)
        return Refund(order_id=order_id, amount=amount)

    first = await refund("7", Decimal("30.00"))
    again = await refund(amount=Decimal(1), order_id="7")
    other = await refund("8", Decimal(1))

    assert first == again == Refund(order_id="7", amount=Decimal("30.00"))
    assert other.order_id == "8"
    assert runs == ["7", "8"]
    record = await manager.get("refund:7")
    assert record is not None
    assert record.status is IdempotencyStatus.COMPLETED


@virtual_time
@pytest.mark.parametrize("value", [None, 0, "", False, [], {}, b"", 0.0])
async def test_falsy_results_are_replayed_unchanged(value: object) -> None:
    runs = []

    @idempotent(key="{name}", manager=guarded().manager)
    async def work(name: str) -> Any:
        runs.append(name)
        return value

    assert await work("x") == value
    again = await work("x")
    assert again == value
    assert type(again) is type(value)
    assert runs == ["x"]


@virtual_time
async def test_a_dataclass_is_replayed_as_a_dataclass() -> None:
    @idempotent(key="{number}", manager=guarded().manager)
    async def work(number: int) -> Receipt | None:
        return Receipt(number)

    assert await work(5) == await work(5) == Receipt(5)


@virtual_time
async def test_a_concurrent_duplicate_waits_until_the_lock_timeout() -> None:
    manager = guarded().manager
    runs = []

    @idempotent(key="{name}", manager=manager, lock_timeout=timedelta(seconds=10))
    async def work(name: str, seconds: float) -> int:
        runs.append(name)
        await asyncio.sleep(seconds)
        return len(runs)

    assert list(await asyncio.gather(work("short", 5), work("short", 5))) == [1, 1]

    slow = asyncio.create_task(work("long", 15))
    await asyncio.sleep(0.1)
    with pytest.raises(IdempotencyConflictError, match="after a wait of 10 s"):
        await work("long", 15)
    assert await slow == 2


@virtual_time
async def test_a_lock_timeout_of_zero_raises_a_conflict_immediately() -> None:
    @idempotent(key="{name}", manager=guarded().manager, lock_timeout=timedelta())
    async def work(name: str) -> None:
        await asyncio.sleep(5)

    first = asyncio.create_task(work("x"))
    await asyncio.sleep(1)
    with pytest.raises(IdempotencyConflictError):
        await work("x")
    assert asyncio.get_running_loop().time() == pytest.approx(1)
    await first


@virtual_time
async def test_a_duplicate_call_waits_even_if_the_manager_is_configured_to_skip() -> None:
    manager = guarded(on_in_progress=OnInProgress.SKIP).manager

    @idempotent(key="{name}", manager=manager)
    async def work(name: str) -> str:
        await asyncio.sleep(1)
        return name

    assert list(await asyncio.gather(work("x"), work("x"))) == ["x", "x"]


@virtual_time
async def test_a_failure_is_raised_unchanged_and_the_next_call_tries_again() -> None:
    runs = []

    @idempotent(key="{name}", manager=guarded().manager)
    async def work(name: str) -> int:
        runs.append(name)
        if len(runs) == 1:
            raise OSError("no")
        return len(runs)

    with pytest.raises(OSError, match="no"):
        await work("x")
    assert await work("x") == 2


@virtual_time
async def test_a_blocking_failure_is_raised_by_the_next_call() -> None:
    @idempotent(key="{name}", manager=guarded().manager, on_failure=OnFailure.BLOCK)
    async def work(name: str) -> None:
        raise OSError(name)

    with pytest.raises(OSError, match="x"):
        await work("x")
    with pytest.raises(PreviouslyFailedError, match="OSError: x"):
        await work("x")


@virtual_time
async def test_a_key_reused_with_another_payload_is_rejected() -> None:
    @idempotent(key="{order_id}", fingerprint=["amount"], manager=guarded().manager)
    async def pay(order_id: str, amount: Decimal) -> str:
        return order_id

    await pay("7", Decimal(30))
    await pay("7", Decimal(30))
    with pytest.raises(KeyReusedError):
        await pay("7", Decimal(31))


@virtual_time
async def test_re_execute_on_read_runs_every_call_but_never_concurrently() -> None:
    manager, running, most, runs = guarded().manager, 0, 0, 0

    @idempotent(key="report:{name}", manager=manager, re_execute_on_read=True)
    async def report(name: str) -> int:
        nonlocal running, most, runs
        running, runs = running + 1, runs + 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1
        return runs

    assert sorted(await asyncio.gather(*(report("x") for _ in range(5)))) == [1, 2, 3, 4, 5]
    assert await report("x") == 6
    assert most == 1


@virtual_time
async def test_re_execute_on_read_is_not_limited_by_max_attempts() -> None:
    @idempotent(key="{name}", manager=guarded(max_attempts=2).manager, re_execute_on_read=True)
    async def work(name: str) -> str:
        return name

    for _ in range(10):
        assert await work("x") == "x"


@virtual_time
async def test_re_execute_on_read_conflicts_with_a_stored_outcome_of_another_function() -> None:
    manager = guarded().manager
    await idempotent(key="{name}", manager=manager)(_echo)("x")

    again = idempotent(key="{name}", manager=manager, re_execute_on_read=True, lock_timeout=timedelta(seconds=3))(_echo)
    with pytest.raises(IdempotencyConflictError, match="a run that has just ended"):
        await again("x")


async def _echo(name: str) -> str:
    return name


@virtual_time
async def test_the_same_key_is_separate_in_different_scopes() -> None:
    manager = guarded().manager
    one, other = (idempotent(key="{name}", manager=manager, scope=scope)(_echo) for scope in ("one", "other"))
    await one("x")
    await other("x")

    assert await manager.get("x") is None
    assert await manager.in_scope("one").get("x") is not None
    assert await manager.in_scope("other").get("x") is not None


@virtual_time
async def test_methods_can_be_decorated() -> None:
    manager = guarded().manager

    class Billing:
        def __init__(self, tenant: str) -> None:
            self.tenant = tenant
            self.charged: list[str] = []

        @idempotent(key="{self.tenant}:{order_id}", manager=manager)
        async def charge(self, order_id: str) -> str:
            self.charged.append(order_id)
            return self.tenant

        @classmethod
        @idempotent(key="class:{order_id}", manager=manager)
        async def charge_all(cls, order_id: str) -> str:
            return cls.__name__ + order_id

        @staticmethod
        @idempotent(key="static:{order_id}", manager=manager)
        async def charge_none(order_id: str) -> str:
            return order_id

    shop, market = Billing("shop"), Billing("market")
    assert [await shop.charge("1"), await shop.charge("1"), await market.charge("1")] == ["shop", "shop", "market"]
    assert (shop.charged, market.charged) == (["1"], ["1"])
    assert await Billing.charge_all("1") == "Billing1"
    assert await Billing.charge_none("1") == "1"


@virtual_time
async def test_decorated_functions_can_be_nested() -> None:
    manager, runs = guarded().manager, []

    @idempotent(key="inner:{name}", manager=manager)
    async def inner(name: str) -> str:
        runs.append(f"inner {name}")
        return name

    @idempotent(key="outer:{name}", manager=manager)
    async def outer(name: str) -> list[str]:
        runs.append(f"outer {name}")
        return [*await asyncio.gather(inner(name), inner("other")), await inner(name)]

    assert await outer("x") == await outer("x") == ["x", "other", "x"]
    assert sorted(runs) == ["inner other", "inner x", "outer x"]


@virtual_time
async def test_a_call_that_requests_its_own_key_fails_instead_of_waiting() -> None:
    @idempotent(key="{name}", manager=guarded().manager)
    async def work(name: str) -> None:
        await work(name)

    with pytest.raises(ApplicationError, match="x was requested within its own run"):
        await work("x")


def test_the_decorator_preserves_signature_name_and_annotations() -> None:
    async def refund(order_id: str, amount: Decimal = Decimal(1), *, note: str = "") -> Refund:
        """Return the money."""
        raise NotImplementedError

    wrapped = idempotent(key="{order_id}")(refund)
    assert inspect.signature(wrapped) == inspect.signature(refund)
    assert typing.get_type_hints(wrapped) == typing.get_type_hints(refund)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__module__) == ("refund", "Return the money.", __name__)
    assert inspect.iscoroutinefunction(wrapped)


def test_unsupported_functions_and_options_are_rejected_at_decoration() -> None:
    def numbers(name: str) -> typing.Iterator[int]:
        yield 1

    async def more(name: str) -> typing.AsyncIterator[int]:
        yield 1

    for generator in (numbers, more):
        with pytest.raises(ApplicationError, match="is a generator, which returns before its work is done"):
            idempotent(key="{name}")(generator)
    with pytest.raises(ApplicationError, match="put @idempotent below @staticmethod"):
        idempotent(key="{name}")(staticmethod(_echo))
    with pytest.raises(InvalidKeyError, match="parameters of _echo are name"):
        idempotent(key="{nam}")(_echo)
    with pytest.raises(ApplicationError, match="stores no outcome"):
        idempotent(key="{name}", re_execute_on_read=True, ttl=timedelta(days=1))
    with pytest.raises(ApplicationError, match="not both"):
        idempotent(key="{name}", manager=plain_manager(), container=make_async_container())


async def test_the_error_of_a_call_without_a_manager_names_the_options() -> None:
    with pytest.raises(ApplicationError, match="no manager found for _echo"):
        await idempotent(key="{name}")(_echo)("x")


# Sources of the manager.


@virtual_time
async def test_a_manager_among_the_arguments_takes_precedence() -> None:
    decorated, given = guarded().manager, guarded().manager

    @idempotent(key="{name}", manager=decorated)
    async def work(name: str, manager: IdempotencyManager) -> str:
        return name

    await work("x", given)
    assert await given.get("x") is not None
    assert await decorated.get("x") is None


async def test_the_container_provides_the_manager() -> None:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: plain_manager(), provides=IdempotencyManager)
    container = make_async_container(provider)

    @idempotent(key="{name}", container=container)
    async def work(name: str) -> str:
        return name

    await work("x")
    assert await (await container.get(IdempotencyManager)).get("x") is not None
    await container.close()


# Plain functions.


@pytest.mark.parametrize("scope", [None, "refunds"])
async def test_a_function_can_get_its_attempt(scope: str | None) -> None:
    manager, seen = plain_manager(), list[tuple[str, int]]()

    @idempotent(key="refund:{number}", manager=manager, scope=scope)
    async def refund(number: int) -> None:
        await note(number)
        seen.append((manager.attempt().label, manager.attempt().number))
        if len(seen) == 2:
            raise ConnectionError

    @idempotent(key="note:{number}", manager=manager)
    async def note(number: int) -> None:
        seen.append((manager.attempt().label, manager.attempt().number))

    with pytest.raises(ConnectionError):
        await refund(1)
    await refund(1)

    assert seen == [("note:1", 1), ("refund:1", 1), ("refund:1", 2)]
    with pytest.raises(ApplicationError, match="is running here"):
        manager.attempt()


async def test_cancelled_calls_count_toward_max_attempts() -> None:
    manager, hangs = plain_manager(max_attempts=3), True

    @idempotent(key="refund:{order}", manager=manager)
    async def refund(order: str) -> None:
        if hangs:
            await asyncio.Event().wait()
        raise ValueError("declined")

    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(refund("7"), 0.05)
        await manager.close()  # waits for the release in the background
    hangs = False
    with pytest.raises(ValueError, match="declined"):
        await refund("7")
    with pytest.raises(PreviouslyFailedError):
        await refund("7")
