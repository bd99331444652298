"""The middleware in FastAPI, Starlette and Litestar on a real server: for an application, paths, or a route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from litestar import Litestar, post
from litestar.exceptions import HTTPException as LitestarException
from litestar.middleware import DefineMiddleware
from litestar.params import Body
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from tests.support.conditions import eventually
from tests.support.http_server import client_of

KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}


class NewOrder(BaseModel):
    item: str


@dataclass
class Shop:
    """Records the effects of the applications below."""

    done: list[str] = field(default_factory=list)
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)
    manager: IdempotencyManager = field(
        default_factory=lambda: IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    )

    @property
    def guard(self) -> dict[str, Any]:
        return {"manager": self.manager, "identity": anyone}

    async def place(self, item: str) -> dict[str, object]:
        self.done.append(item)
        if item == "slow":
            await self.may_finish.wait()
        if item == "broken":
            raise RuntimeError("broken")
        return {"order": len(self.done)}


GUARD: Any = IdempotencyKeyMiddleware
"""`Any`, because Litestar defines its own ASGI types."""

# Each application has POST /orders, which is guarded, and POST /free, which is guarded only with the whole application.


def _fastapi(shop: Shop) -> FastAPI:
    app = FastAPI()

    @app.post("/orders", status_code=201)
    @app.post("/free", status_code=201)
    async def place(new: NewOrder) -> dict[str, object]:
        if new.item == "missing":
            shop.done.append(new.item)
            raise HTTPException(410, "no such item")
        return await shop.place(new.item)

    return app


def fastapi_application(shop: Shop) -> Any:
    app = _fastapi(shop)
    app.add_middleware(IdempotencyKeyMiddleware, **shop.guard)
    return app


def fastapi_paths(shop: Shop) -> Any:
    app = _fastapi(shop)
    app.add_middleware(IdempotencyKeyMiddleware, paths=["/orders"], **shop.guard)
    return app


def fastapi_mounted(shop: Shop) -> Any:
    app = FastAPI()
    app.mount("/v1", fastapi_paths(shop))
    return app


def _endpoint(shop: Shop) -> Any:
    async def place(request: Request) -> Response:
        try:
            item = NewOrder.model_validate_json(await request.body()).item
        except ValueError:
            shop.done.append("invalid")
            raise StarletteHTTPException(422) from None
        if item == "missing":
            shop.done.append(item)
            raise StarletteHTTPException(410, "no such item")
        return JSONResponse(await shop.place(item), status_code=201)

    return place


def _routes(shop: Shop, middleware: list[Middleware]) -> list[Any]:
    place = _endpoint(shop)
    return [Route("/orders", place, methods=["POST"], middleware=middleware), Route("/free", place, methods=["POST"])]


def starlette_application(shop: Shop) -> Any:
    return Starlette(routes=_routes(shop, []), middleware=[Middleware(IdempotencyKeyMiddleware, **shop.guard)])


def starlette_paths(shop: Shop) -> Any:
    guard = Middleware(IdempotencyKeyMiddleware, paths=["/orders"], **shop.guard)
    return Starlette(routes=_routes(shop, []), middleware=[guard])


def starlette_route(shop: Shop) -> Any:
    return Starlette(routes=_routes(shop, [Middleware(IdempotencyKeyMiddleware, **shop.guard)]))


def starlette_mount(shop: Shop) -> Any:
    guard = Middleware(IdempotencyKeyMiddleware, **shop.guard)
    mounted = Mount("/v1", routes=_routes(shop, []), middleware=[guard])
    return Starlette(routes=[mounted])


def _litestar(shop: Shop, *, route: list[Any] | None = None, application: list[Any] | None = None) -> Litestar:
    async def placed(data: NewOrder) -> dict[str, object]:
        if data.item == "missing":
            shop.done.append(data.item)
            raise LitestarException("no such item", status_code=410)
        return await shop.place(data.item)

    @post("/orders", middleware=route or [])
    async def place(data: Annotated[NewOrder, Body()]) -> dict[str, object]:
        return await placed(data)

    @post("/free")
    async def free(data: Annotated[NewOrder, Body()]) -> dict[str, object]:
        return await placed(data)

    return Litestar([place, free], middleware=application or [], logging_config=None)


def litestar_application(shop: Shop) -> Any:
    return _litestar(shop, application=[DefineMiddleware(GUARD, **shop.guard)])


def litestar_paths(shop: Shop) -> Any:
    guard = DefineMiddleware(GUARD, paths=["/orders"], **shop.guard)
    return _litestar(shop, application=[guard])


def litestar_route(shop: Shop) -> Any:
    return _litestar(shop, route=[DefineMiddleware(GUARD, **shop.guard)])


def litestar_around(shop: Shop) -> Any:
    app = _litestar(shop)
    app.asgi_handler = IdempotencyKeyMiddleware(app.asgi_handler, **shop.guard)
    return app


MakeApp = Callable[[Shop], Any]
WHOLE: list[MakeApp] = [fastapi_application, starlette_application, starlette_mount, litestar_application]
WHOLE += [litestar_around]
PART: list[MakeApp] = [fastapi_paths, fastapi_mounted, starlette_paths, starlette_route, litestar_paths, litestar_route]


@dataclass
class ShopClient:
    client: httpx.AsyncClient
    shop: Shop
    prefix: str

    async def order(self, item: str, path: str = "/orders") -> httpx.Response:
        return await self.client.post(self.prefix + path, json={"item": item}, headers=KEY)


@pytest.fixture
async def shop_client(request: pytest.FixtureRequest) -> AsyncIterator[ShopClient]:
    make_app: MakeApp = request.param
    async with open_client(make_app) as shop_client:
        yield shop_client


@asynccontextmanager
async def open_client(make_app: MakeApp) -> AsyncIterator[ShopClient]:
    shop = Shop()
    async with client_of(make_app(shop)) as client:
        yield ShopClient(client, shop, "/v1" if make_app in (fastapi_mounted, starlette_mount) else "")


ALL = pytest.mark.parametrize("shop_client", WHOLE + PART, indirect=True, ids=lambda make_app: make_app.__name__)


@ALL
async def test_a_retry_gets_the_first_response_and_a_different_payload_is_refused(shop_client: ShopClient) -> None:
    first, again = await shop_client.order("book"), await shop_client.order("book")

    assert (first.status_code, first.json()) == (201, {"order": 1})
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert (await shop_client.order("pen")).status_code == 422
    assert shop_client.shop.done == ["book"]


@ALL
async def test_a_retry_during_the_first_request_gets_409(shop_client: ShopClient) -> None:
    first = asyncio.create_task(shop_client.order("slow"))
    await eventually(lambda: shop_client.shop.done)

    assert (await shop_client.order("slow")).status_code == 409
    shop_client.shop.may_finish.set()
    assert (await first).status_code == 201
    assert (await shop_client.order("slow")).headers["idempotency-replayed"] == "true"
    assert shop_client.shop.done == ["slow"]


@ALL
async def test_an_http_exception_of_the_framework_is_stored_as_an_outcome(shop_client: ShopClient) -> None:
    first, again = await shop_client.order("missing"), await shop_client.order("missing")

    assert (first.status_code, again.status_code) == (410, 410)
    assert again.content == first.content
    assert shop_client.shop.done == ["missing"]


@ALL
async def test_a_validation_error_is_stored_and_a_corrected_request_needs_another_key(
    shop_client: ShopClient,
) -> None:
    path = f"{shop_client.prefix}/orders"
    first = await shop_client.client.post(path, json={"nothing": 1}, headers=KEY)
    again = await shop_client.client.post(path, json={"nothing": 1}, headers=KEY)

    assert first.status_code == again.status_code in (400, 422)
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert (await shop_client.order("book")).json()["title"] == "Idempotency-Key is already used"


@ALL
async def test_any_other_exception_is_500_and_a_retry_runs_again(shop_client: ShopClient) -> None:
    assert [(await shop_client.order("broken")).status_code for _ in range(2)] == [500, 500]
    assert shop_client.shop.done == ["broken", "broken"]


@ALL
async def test_a_malformed_key_is_refused(shop_client: ShopClient) -> None:
    response = await shop_client.client.post(
        f"{shop_client.prefix}/orders", json={"item": "book"}, headers={"Idempotency-Key": "no quotes"}
    )
    assert (response.status_code, response.headers["content-type"]) == (400, "application/problem+json")
    assert not shop_client.shop.done


@pytest.mark.parametrize("shop_client", PART, indirect=True, ids=lambda make_app: make_app.__name__)
async def test_other_paths_are_not_guarded(shop_client: ShopClient) -> None:
    for _ in range(2):
        assert "idempotency-replayed" not in (await shop_client.order("book", "/free")).headers
    assert shop_client.shop.done == ["book", "book"]


@pytest.mark.parametrize("shop_client", WHOLE, indirect=True, ids=lambda make_app: make_app.__name__)
async def test_a_key_belongs_to_one_path(shop_client: ShopClient) -> None:
    await shop_client.order("book")
    await shop_client.order("book", "/free")
    assert (await shop_client.order("book", "/free")).headers["idempotency-replayed"] == "true"
    assert shop_client.shop.done == ["book", "book"]


@pytest.mark.parametrize("path", ["/orders/", "//orders"])
@pytest.mark.parametrize("make_app", [litestar_paths, litestar_route])
async def test_extra_slashes_are_ignored_by_litestar_and_the_middleware(make_app: MakeApp, path: str) -> None:
    async with open_client(make_app) as shop_client:
        base = str(shop_client.client.base_url).rstrip("/")
        for _ in range(2):
            assert (await shop_client.client.post(base + path, json={"item": "book"}, headers=KEY)).status_code == 201
        assert shop_client.shop.done == ["book"]
