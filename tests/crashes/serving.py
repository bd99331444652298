"""A FastAPI application in a process of its own, which dies by an order: `run_worker(TillOrder(...))`.

Uvicorn serves it; the guard stands around it, and around the guard somebody who dies while a response leaves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import uvicorn
from dishka import make_async_container
from dishka.integrations.fastapi import FromDishka, inject, setup_dishka
from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integr8s_idem import IdempotencyManager
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint
from integr8s_idem.testing.transactional_crash_points import CrashingSqlStore
from tests.crashes.stores import open_sql_store
from tests.crashes.tills import Sessions, Till, till_engine
from tests.crashes.tills import TillOrder as Order
from tests.crashes.worker import ending, leave_with
from tests.support.homes import open_records

__all__ = ["Order", "run_worker"]

STORE_TIMEOUT: Final = 2.0


class Purchase(BaseModel):
    """What a client wants done."""

    work: str


@asynccontextmanager
async def _with_dishka(order: Order, till: Till, engine: AsyncEngine) -> AsyncIterator[FastAPI]:
    """The session is that of a scope of Dishka's, which commits when it closes."""
    app = FastAPI()

    @app.post("/orders", status_code=201)
    @inject
    async def place(purchase: Purchase, session: FromDishka[AsyncSession]) -> dict[str, str]:
        return await _enter(till, session, purchase)

    container = make_async_container(Sessions(engine, till.plan))
    setup_dishka(container, app)
    yield app
    await container.close()


@asynccontextmanager
async def _with_depends(order: Order, till: Till, engine: AsyncEngine) -> AsyncIterator[FastAPI]:
    """The session is that of a dependency with `yield`, which commits behind it."""
    app = FastAPI()

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            await till.plan.around("transaction_commit", session.commit)

    session_of_this: Any = Depends(session, scope="function" if order.shape == "depends_function" else "request")

    @app.post("/orders", status_code=201)
    async def place(purchase: Purchase, session: AsyncSession = session_of_this) -> dict[str, str]:
        return await _enter(till, session, purchase)

    yield app


@asynccontextmanager
async def _with_transaction(order: Order, till: Till, engine: AsyncEngine) -> AsyncIterator[FastAPI]:
    """The endpoint commits by itself, and what forbids a second run with it."""
    app = FastAPI()

    @app.post("/orders", status_code=201)
    async def place(purchase: Purchase, idempotency_key: Annotated[str, Header()]) -> dict[str, str]:
        async with AsyncSession(engine) as session:

            async def work() -> dict[str, str]:
                return await _enter(till, session, purchase)

            async with till.manager.in_transaction(session):
                answer = await till.manager.run(f"place:{idempotency_key}", work)
            await till.plan.around("transaction_commit", session.commit)
            return answer

    yield app


SHAPES: Final[dict[str, Callable[[Order, Till, AsyncEngine], Any]]] = {
    "dishka": _with_dishka,
    "depends": _with_depends,
    "depends_function": _with_depends,
    "transaction": _with_transaction,
}
TRANSACTIONAL: Final = "transaction"


async def _enter(till: Till, session: AsyncSession, purchase: Purchase) -> dict[str, str]:
    till.plan.reached(CrashPoint.BEFORE_HANDLER)
    await till.enter(session, purchase.work)
    return {"done": purchase.work}


class Leaving:
    """Points around the response as it leaves; its body leaves in two parts."""

    def __init__(self, app: ASGIApp, plan: CrashPlan) -> None:
        self._app = app
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_outcome = False

        async def leaving(message: Message) -> None:
            nonlocal is_outcome
            if message["type"] == "http.response.start":
                # One that says to come again is none.
                is_outcome = message["status"] < 300
                if is_outcome:
                    self._plan.reached(CrashPoint.BEFORE_RESPONSE)
            if is_outcome and message["type"] == "http.response.body":
                await self._in_two(message["body"], send)
            else:
                await send(message)

        await self._app(scope, receive, leaving)

    async def _in_two(self, body: bytes, send: Send) -> None:
        half = len(body) // 2
        await send({"type": "http.response.body", "body": body[:half], "more_body": True})
        self._plan.reached(CrashPoint.IN_RESPONSE)
        await send({"type": "http.response.body", "body": body[half:], "more_body": False})
        self._plan.reached(CrashPoint.AFTER_RESPONSE)


@asynccontextmanager
async def _opened_store(order: Order, plan: CrashPlan) -> AsyncIterator[CrashingStore]:
    if order.shape == TRANSACTIONAL:
        async with open_sql_store(order.database, STORE_TIMEOUT) as store:
            yield CrashingSqlStore(store, plan)
    else:
        async with open_records(order.store, order.key_prefix) as records:
            yield CrashingStore(records, plan)


@asynccontextmanager
async def _application(order: Order, plan: CrashPlan) -> AsyncIterator[ASGIApp]:
    engine = till_engine(order.database)
    async with _opened_store(order, plan) as store:
        manager = IdempotencyManager(order.idempotency, store, scope="shop")
        async with SHAPES[order.shape](order, Till(plan, manager), engine) as app:
            app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=anyone, required=True)
            app.add_middleware(Leaving, plan=plan)
            yield app
        await manager.close()
    await engine.dispose()


def reserved_port(port: int = 0) -> socket.socket:
    """A socket bound to a port of the loopback that others may bind as well if they do as we; any free one for 0."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def run_worker(order: Order, parent: int) -> int:
    """Serve until told to stop by SIGTERM, or until `parent` is gone; the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    # Uvicorn ends well by it, and then sends it again to whoever was there before.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with asyncio.Runner() as runner:
        return runner.run(_serve(order, parent))


async def _serve(order: Order, parent: int) -> int:
    plan = CrashPlan(CrashPoint(order.point) if order.point else None, order.occurrence, ending(order))
    leaving = asyncio.create_task(leave_with(parent))
    async with _application(order, plan) as app:
        server = uvicorn.Server(uvicorn.Config(app, log_level=logging.WARNING, lifespan="off"))
        await server.serve(sockets=[reserved_port(order.port)])
    leaving.cancel()
    await asyncio.wait({leaving})
    return 0
