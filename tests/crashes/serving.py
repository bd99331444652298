"""A FastAPI application in its own process that dies at a crash point: `run_worker(TillOrder(...))`.

Uvicorn serves it.  It is wrapped in the idempotency middleware, which is wrapped in a middleware with crash points
around the response.
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
from tests.crashes.worker import crash_action, exit_with
from tests.support.homes import open_records

__all__ = ["Order", "run_worker"]

STORE_TIMEOUT: Final = 2.0


class Purchase(BaseModel):
    """A request of the client."""

    work: str


@asynccontextmanager
async def _with_dishka(order: Order, till: Till, engine: AsyncEngine) -> AsyncIterator[FastAPI]:
    """The session belongs to a Dishka scope, which commits it on closing."""
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
    """The session belongs to a dependency with `yield`, which commits it afterwards."""
    app = FastAPI()

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            await till.plan.around("transaction_commit", session.commit)

    session_dependency: Any = Depends(session, scope="function" if order.shape == "depends_function" else "request")

    @app.post("/orders", status_code=201)
    async def place(purchase: Purchase, session: AsyncSession = session_dependency) -> dict[str, str]:
        return await _enter(till, session, purchase)

    yield app


@asynccontextmanager
async def _with_transaction(order: Order, till: Till, engine: AsyncEngine) -> AsyncIterator[FastAPI]:
    """The endpoint itself commits the row and its idempotency record in one transaction."""
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


class ResponseCrashPoints:
    """Middleware with crash points around the response, whose body is sent in two parts."""

    def __init__(self, app: ASGIApp, plan: CrashPlan) -> None:
        self._app = app
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_outcome = False

        async def send_with_points(message: Message) -> None:
            nonlocal is_outcome
            if message["type"] == "http.response.start":
                # A response that asks the client to retry is not an outcome.
                is_outcome = message["status"] < 300
                if is_outcome:
                    self._plan.reached(CrashPoint.BEFORE_RESPONSE)
            if is_outcome and message["type"] == "http.response.body":
                await self._send_in_two_parts(message["body"], send)
            else:
                await send(message)

        await self._app(scope, receive, send_with_points)

    async def _send_in_two_parts(self, body: bytes, send: Send) -> None:
        half = len(body) // 2
        await send({"type": "http.response.body", "body": body[:half], "more_body": True})
        self._plan.reached(CrashPoint.IN_RESPONSE)
        await send({"type": "http.response.body", "body": body[half:], "more_body": False})
        self._plan.reached(CrashPoint.AFTER_RESPONSE)


@asynccontextmanager
async def _open_store(order: Order, plan: CrashPlan) -> AsyncIterator[CrashingStore]:
    if order.shape == TRANSACTIONAL:
        async with open_sql_store(order.database, STORE_TIMEOUT) as store:
            yield CrashingSqlStore(store, plan)
    else:
        async with open_records(order.store, order.key_prefix) as records:
            yield CrashingStore(records, plan)


@asynccontextmanager
async def _application(order: Order, plan: CrashPlan) -> AsyncIterator[ASGIApp]:
    engine = till_engine(order.database)
    async with _open_store(order, plan) as store:
        manager = IdempotencyManager(order.idempotency, store, scope="shop")
        async with SHAPES[order.shape](order, Till(plan, manager), engine) as app:
            app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=anyone, required=True)
            app.add_middleware(ResponseCrashPoints, plan=plan)
            yield app
        await manager.close()
    await engine.dispose()


def reserved_port(port: int = 0) -> socket.socket:
    """Return a socket bound to a loopback port that other sockets with `SO_REUSEPORT` can bind too; 0 for any port."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def run_worker(order: Order, parent: int) -> int:
    """Serve until SIGTERM or until the process `parent` is gone, and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    # Uvicorn shuts down on SIGTERM, and then raises it again for the previous handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with asyncio.Runner() as runner:
        return runner.run(_serve(order, parent))


async def _serve(order: Order, parent: int) -> int:
    plan = CrashPlan(CrashPoint(order.point) if order.point else None, order.occurrence, crash_action(order))
    watching = asyncio.create_task(exit_with(parent))
    async with _application(order, plan) as app:
        server = uvicorn.Server(uvicorn.Config(app, log_level=logging.WARNING, lifespan="off"))
        await server.serve(sockets=[reserved_port(order.port)])
    watching.cancel()
    await asyncio.wait({watching})
    return 0
