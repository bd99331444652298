"""`check_lease` in endpoints and dependencies that start long after the middleware called their application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from litestar import Litestar, post
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotencyStatus
from integr8s_idem.errors import LeaseLostError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone, check_lease
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from tests.support.counting import CountingObserver
from tests.support.guarded import LEASE
from tests.support.stalling import ManualClock

KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}


@dataclass
class Bank:
    """Records the charges of an application's endpoint."""

    config: IdempotencyConfig = field(default_factory=lambda: IdempotencyConfig(processing_timeout_seconds=LEASE))
    clock: ManualClock = field(default_factory=ManualClock)
    observer: CountingObserver = field(default_factory=CountingObserver)
    shared: MemoryIdempotencyRepository | None = None
    """The store of another process, to share it."""
    stalls: list[Callable[[], object]] = field(default_factory=list)
    """Actions to run, one per request, before the endpoint starts."""
    charges: list[int] = field(default_factory=list)
    """Attempt numbers of the charges."""

    def __post_init__(self) -> None:
        self.store = MemoryIdempotencyRepository(clock=self.clock.wall) if self.shared is None else self.shared
        self.manager = IdempotencyManager(self.config, self.store, self.observer, scope="bank", clock=self.clock)

    def stall(self) -> None:
        """Run the next action between the call of the application and the start of its endpoint."""
        if self.stalls:
            self.stalls.pop(0)()

    def charge(self) -> dict[str, int]:
        self.charges.append(self.manager.attempt().number)
        return {"charges": len(self.charges)}


def fastapi_endpoint(bank: Bank) -> Any:
    app = FastAPI()

    @app.post("/charges", status_code=201, dependencies=[Depends(bank.stall)])
    def charge() -> dict[str, int]:
        check_lease()
        return bank.charge()

    app.add_middleware(IdempotencyKeyMiddleware, manager=bank.manager, identity=anyone)
    return app


def fastapi_dependency(bank: Bank) -> Any:
    app = FastAPI()

    @app.post("/charges", status_code=201, dependencies=[Depends(bank.stall), Depends(check_lease)])
    def charge() -> dict[str, int]:
        return bank.charge()

    app.add_middleware(IdempotencyKeyMiddleware, manager=bank.manager, identity=anyone)
    return app


def fastapi_handled(bank: Bank) -> Any:
    """An application that converts the error to a response."""

    async def handled(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "handled"}, status_code=200)

    app = fastapi_endpoint(bank)
    app.add_exception_handler(LeaseLostError, handled)
    return app


def starlette_endpoint(bank: Bank) -> Any:
    def charge(request: Request) -> Response:
        bank.stall()
        check_lease()
        return JSONResponse(bank.charge(), status_code=201)

    app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app.add_middleware(IdempotencyKeyMiddleware, manager=bank.manager, identity=anyone)
    return app


def litestar_endpoint(bank: Bank) -> Any:
    @post("/charges", sync_to_thread=True)
    def charge() -> dict[str, int]:
        bank.stall()
        check_lease()
        return bank.charge()

    app = Litestar([charge], logging_config=None)
    guarded: Any = app.asgi_handler
    app.asgi_handler = IdempotencyKeyMiddleware(guarded, bank.manager, identity=anyone)
    return app


APPLICATIONS = [fastapi_endpoint, fastapi_dependency, fastapi_handled, starlette_endpoint, litestar_endpoint]
EVERY = pytest.mark.parametrize("application", APPLICATIONS, ids=lambda application: application.__name__)


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bank") as client:
        yield client


@EVERY
async def test_an_endpoint_that_starts_after_its_lease_does_nothing_and_a_retry_runs(
    application: Callable[[Bank], Any],
) -> None:
    bank = Bank()
    bank.stalls.append(bank.clock.leap)
    async with client_of(application(bank)) as client:
        late = await client.post("/charges", headers=KEY)
        charges = list(bank.charges)
        retried, again = [await client.post("/charges", headers=KEY) for _ in range(2)]

    assert (late.status_code, late.json()["type"], charges) == (503, "urn:integr8s-idem:unavailable", [])
    assert late.headers["retry-after"] == "1"
    assert (retried.status_code, retried.json(), bank.charges) == (201, {"charges": 1}, [2])
    assert (again.content, again.headers["idempotency-replayed"]) == (retried.content, "true")
    assert bank.observer.counts[Signal.STALE_START_PREVENTED] == 1
    assert bank.observer.counts[Signal.HANDLER_FAILED] == 0


async def test_a_late_endpoint_does_not_change_the_record_of_the_new_owner() -> None:
    bank = Bank()
    other = Bank(clock=bank.clock, shared=bank.store, charges=bank.charges)
    async with client_of(fastapi_endpoint(bank)) as client, client_of(fastapi_endpoint(other)) as other_client:
        loop = asyncio.get_running_loop()

        def stall_until_taken_over() -> None:
            bank.clock.leap()
            asyncio.run_coroutine_threadsafe(other_client.post("/charges", headers=KEY), loop).result(timeout=30)

        bank.stalls.append(stall_until_taken_over)
        late, retried = [await client.post("/charges", headers=KEY) for _ in range(2)]

    assert (late.status_code, bank.charges) == (503, [2])
    assert (retried.status_code, retried.headers["idempotency-replayed"]) == (201, "true")


async def test_a_late_endpoint_does_not_block_its_key_under_on_failure_block() -> None:
    bank = Bank(IdempotencyConfig(processing_timeout_seconds=LEASE, on_failure="block"))
    bank.stalls.append(bank.clock.leap)
    async with client_of(fastapi_endpoint(bank)) as client:
        answers = [await client.post("/charges", headers=KEY) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [503, 201]
    [record] = [record async for record in bank.store.scan("")]
    assert record.status is IdempotencyStatus.COMPLETED


async def test_a_second_side_effect_is_checked_as_well() -> None:
    bank = Bank()
    app = FastAPI()

    @app.post("/charges", status_code=201)
    def charge() -> dict[str, int]:
        check_lease()
        bank.charge()
        bank.stall()
        check_lease()
        return bank.charge()

    app.add_middleware(IdempotencyKeyMiddleware, manager=bank.manager, identity=anyone)
    bank.stalls.append(bank.clock.leap)
    async with client_of(app) as client:
        answers = [await client.post("/charges", headers=KEY) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [503, 201]
    assert bank.charges == [1, 2, 2]


async def test_an_endpoint_that_starts_after_its_request_ended_does_nothing() -> None:
    bank = Bank()
    checks: list[asyncio.Task[None]] = []
    ended = asyncio.Event()

    async def check_after_the_end() -> None:
        await ended.wait()
        check_lease()

    async def start(request: Request) -> Response:
        checks.append(asyncio.create_task(check_after_the_end()))
        return JSONResponse({}, status_code=201)

    app = Starlette(routes=[Route("/charges", start, methods=["POST"])])
    app.add_middleware(IdempotencyKeyMiddleware, manager=bank.manager, identity=anyone)
    async with client_of(app) as client:
        assert (await client.post("/charges", headers=KEY)).status_code == 201
        ended.set()

        with pytest.raises(LeaseLostError):
            await checks[0]


@EVERY
async def test_requests_without_a_key_have_no_lease_to_check(application: Callable[[Bank], Any]) -> None:
    bank = Bank()
    bank.stalls.append(bank.clock.leap)
    bank.charge = lambda: {"charges": 1}  # type: ignore[method-assign]  # there is no attempt without a key
    async with client_of(application(bank)) as client:
        assert (await client.post("/charges")).status_code == 201


async def test_check_lease_passes_while_the_lease_is_valid() -> None:
    bank = Bank()
    bank.stalls.append(partial(bank.clock.leap, LEASE / 2))
    async with client_of(fastapi_endpoint(bank)) as client:
        answer = await client.post("/charges", headers=KEY)

    assert (answer.status_code, bank.charges) == (201, [1])
