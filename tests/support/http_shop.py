"""An application with the HTTP middleware, called without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, by_authorization
from integr8s_idem.testing.flaky_store import FlakyStore

KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
RULES = "https://shop.example/rules"
"""Documentation of the application's idempotency rules."""

Answer = Callable[[Request], Awaitable[Response]]


@dataclass
class Shop:
    """An application with the middleware, and the requests that reached it."""

    client: httpx.AsyncClient
    manager: IdempotencyManager
    store: FlakyStore
    bodies: list[bytes] = field(default_factory=list)

    async def order(
        self, body: bytes = b"{}", path: str = "/orders", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return await self.client.post(path, content=body, headers={**KEY, **(headers or {})})


async def created(request: Request) -> Response:
    return JSONResponse({"order": 1}, status_code=201, headers={"Location": "/orders/1", "Set-Cookie": "a=b"})


@asynccontextmanager
async def shop(
    answer: Answer = created,
    *,
    config: dict[str, Any] | None = None,
    outside: Sequence[Middleware] = (),
    inside: Sequence[Middleware] = (),
    debug: bool = False,
    **options: Any,
) -> AsyncIterator[Shop]:
    store = FlakyStore(MemoryIdempotencyRepository())
    manager = IdempotencyManager(IdempotencyConfig(**(config or {})), store, scope="shop")

    async def endpoint(request: Request) -> Response:
        opened.bodies.append(await request.body())
        return await answer(request)

    methods = ["GET", "POST", "PATCH", "PUT"]
    options = {"identity": by_authorization(anonymous="share"), "documentation": RULES, **options}
    guarded = Middleware(IdempotencyKeyMiddleware, manager=manager, **options)
    app = Starlette(
        debug=debug,
        routes=[Route(path, endpoint, methods=methods) for path in ("/orders", "/orders/{order}/refund")],
        middleware=[*outside, guarded, *inside],
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        opened = Shop(client, manager, store)
        yield opened


def problem_in(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert response.headers["link"] == f'<{RULES}>; rel="describedby"'
    return problem
