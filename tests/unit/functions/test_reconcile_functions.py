"""`@idempotent(reconcile=…)` on async and plain functions and methods."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from dishka import FromDishka, Provider, Scope, make_async_container

from integr8s_idem import IdempotencyManager
from integr8s_idem._util.context_vars import CURRENT
from integr8s_idem.errors import ApplicationError, OutcomeUnknownError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.integrations.dishka import inject
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from tests.support.guarded import plain_manager


@dataclass
class Receipt:
    order: str


class Ledger:
    """Refunds, whose first response is lost."""

    def __init__(self) -> None:
        self.refunds: list[str] = []
        self.asked: list[tuple[Any, ...]] = []

    def refund(self, order: str) -> Receipt:
        self.refunds.append(order)
        if self.refunds.count(order) == 1:
            raise ConnectionError("the response is lost")
        return Receipt(order)

    def find(self, order: str) -> Answer:
        return Done(Receipt(order)) if order in self.refunds else NotDone()


async def test_a_call_after_one_that_failed_finds_its_effect() -> None:
    ledger, manager = Ledger(), plain_manager()

    async def find(order: str) -> Answer:
        return ledger.find(order)

    @idempotent(key="refund:{order}", reconcile=find, manager=manager)
    async def refund(order: str, amount: int) -> Receipt:
        return ledger.refund(order)

    with pytest.raises(ConnectionError):
        await refund("7", 30)

    assert await refund("7", 30) == Receipt("7")
    assert await refund("7", 30) == Receipt("7")
    assert ledger.refunds == ["7"]


async def test_a_reconcile_function_gets_the_arguments_that_it_names() -> None:
    asked: list[tuple[Any, ...]] = []

    async def find(amount: int, order: str) -> Answer:
        asked.append((amount, order))
        return NotDone()

    @idempotent(key="refund:{order}", reconcile=find, manager=plain_manager())
    async def refund(order: str, amount: int = 5) -> None:
        if not asked:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await refund("7")
    await refund("7")

    assert asked == [(5, "7")]


@pytest.mark.parametrize("given", [((30, "7"), {}), ((), {"amount": 30, "order": "7"})])
async def test_a_reconcile_function_keeps_its_own_defaults(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    ledger, asked, (args, kwargs) = Ledger(), list[Any](), given

    async def find(order: str, limit: int = 10) -> Answer:
        asked.append((order, limit))
        return ledger.find(order)

    @idempotent(key="refund:{order}", reconcile=find, manager=plain_manager())
    async def refund(amount: int, order: str) -> Receipt:
        return ledger.refund(order)

    with pytest.raises(ConnectionError):
        await refund(*args, **kwargs)

    assert await refund(*args, **kwargs) == Receipt("7")
    assert (ledger.refunds, asked) == (["7"], [("7", 10)])


async def test_a_reconcile_function_of_a_method_can_be_a_function_of_all_arguments() -> None:
    class Billing:
        def __init__(self) -> None:
            self.ledger = Ledger()

        async def find(self, order: str) -> Answer:
            return self.ledger.find(order)

        @idempotent(key="refund:{order}", reconcile=find, manager=plain_manager())
        async def refund(self, order: str) -> Receipt:
            return self.ledger.refund(order)

    billing = Billing()
    with pytest.raises(ConnectionError):
        await billing.refund("7")

    assert await billing.refund("7") == Receipt("7")
    assert billing.ledger.refunds == ["7"]


async def test_a_reconcile_function_can_be_injected() -> None:
    ledger, provider = Ledger(), Provider(scope=Scope.APP)
    provider.provide(lambda: ledger, provides=Ledger)
    container = make_async_container(provider)

    @inject
    async def find(order: str, ledger: FromDishka[Ledger]) -> Answer:
        return ledger.find(order)

    @idempotent(key="refund:{order}", reconcile=find, manager=plain_manager())
    @inject
    async def refund(order: str, ledger: FromDishka[Ledger]) -> Receipt:
        return ledger.refund(order)

    token = CURRENT.set(container)
    try:
        with pytest.raises(ConnectionError):
            await refund("7")  # type: ignore[call-arg]  # injected
        assert await refund("7") == Receipt("7")  # type: ignore[call-arg]  # injected
    finally:
        CURRENT.reset(token)
        await container.close()
    assert ledger.refunds == ["7"]


def test_a_plain_reconcile_function_runs_in_the_calling_thread() -> None:
    ledger, threads = Ledger(), list[str]()

    def find(order: str) -> Answer:
        threads.append(threading.current_thread().name)
        return ledger.find(order)

    @idempotent(key="refund:{order}", reconcile=find, manager=plain_manager())
    def refund(order: str) -> Receipt:
        return ledger.refund(order)

    with pytest.raises(ConnectionError):
        refund("7")

    assert refund("7") == Receipt("7")
    assert ledger.refunds == ["7"]
    assert threads == [threading.current_thread().name]


def test_a_plain_function_runs_after_not_done_and_not_after_unknown() -> None:
    answers: list[Answer] = [Unknown(timedelta(minutes=1)), NotDone()]
    runs: list[str] = []

    @idempotent(key="refund:{order}", reconcile=lambda order: answers.pop(0), manager=plain_manager())
    def refund(order: str) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise ConnectionError
        return "refunded"

    with pytest.raises(ConnectionError):
        refund("7")
    with pytest.raises(OutcomeUnknownError) as caught:
        refund("7")

    assert caught.value.delay == timedelta(minutes=1)
    assert refund("7") == "refunded"
    assert runs == ["7", "7"]


async def test_both_functions_must_be_of_the_same_kind() -> None:
    def find(order: str) -> Answer:
        return NotDone()

    with pytest.raises(ApplicationError, match="define it with async def, too"):

        @idempotent(key="{order}", reconcile=find, manager=plain_manager())
        async def refund(order: str) -> None: ...

    async def find_async(order: str) -> Answer:
        return NotDone()

    with pytest.raises(ApplicationError, match="define it with def, too"):

        @idempotent(key="{order}", reconcile=find_async, manager=plain_manager())
        def refund_plainly(order: str) -> None: ...


async def _find(order_id: str, limit: int = 10) -> Answer:
    return NotDone()


async def _find_by_position(order_id: str, /) -> Answer:
    return NotDone()


@pytest.mark.parametrize("find", [_find, _find_by_position])
async def test_an_argument_that_the_function_does_not_have_is_refused(find: Any) -> None:
    """Otherwise, the calls after a failure would fail, too, and nobody would learn the outcome."""
    with pytest.raises(ApplicationError, match=r"takes order_id, but .*refund does not: .* of order, amount"):

        @idempotent(key="{order}", reconcile=find, manager=plain_manager())
        async def refund(order: str, amount: int) -> None: ...


def test_a_function_that_is_executed_again_takes_no_reconcile_function() -> None:
    with pytest.raises(ApplicationError, match="remove reconcile"):
        idempotent(key="{order}", reconcile=Ledger().find, re_execute_on_read=True, manager=plain_manager())


async def test_the_manager_of_the_call_is_asked_in_its_scope() -> None:
    ledger, manager = Ledger(), plain_manager()

    async def find(order: str) -> Answer:
        return ledger.find(order)

    @idempotent(key="refund:{order}", scope="other", reconcile=find)
    async def refund(order: str, manager: IdempotencyManager) -> Receipt:
        return ledger.refund(order)

    with pytest.raises(ConnectionError):
        await refund("7", manager)

    assert await refund("7", manager) == Receipt("7")
    assert ledger.refunds == ["7"]
