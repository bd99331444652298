"""The guard in FastAPI, Starlette and Litestar behind a real server: for the application, for paths, for a route."""

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
    """What is done by the applications below."""

    done: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    manager: IdempotencyManager = field(
        default_factory=lambda: IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    )

    @property
    def guard(self) -> dict[str, Any]:
        return {"manager": self.manager, "identity": anyone}

    async def place(self, item: str) -> dict[str, object]:
        self.done.append(item)
        if item == "slow":
            await self.go_on.wait()
        if item == "broken":
            raise RuntimeError("broken")
        return {"order": len(self.done)}


GUARD: Any = IdempotencyKeyMiddleware
"""Litestar has types of its own for ASGI."""

# Each has POST /orders, which is guarded, and POST /free, which is not unless all is.


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

    return Litestar([place, free], middleware=application or [])


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


House = Callable[[Shop], Any]
WHOLE: list[House] = [fastapi_application, starlette_application, starlette_mount, litestar_application]
WHOLE += [litestar_around]
PART: list[House] = [fastapi_paths, fastapi_mounted, starlette_paths, starlette_route, litestar_paths, litestar_route]


@dataclass
class Asked:
    client: httpx.AsyncClient
    shop: Shop
    prefix: str

    async def order(self, item: str, path: str = "/orders") -> httpx.Response:
        return await self.client.post(self.prefix + path, json={"item": item}, headers=KEY)


@pytest.fixture
async def asked(request: pytest.FixtureRequest) -> AsyncIterator[Asked]:
    house: House = request.param
    async with asking(house) as asked:
        yield asked


@asynccontextmanager
async def asking(house: House) -> AsyncIterator[Asked]:
    shop = Shop()
    async with client_of(house(shop)) as client:
        yield Asked(client, shop, "/v1" if house in (fastapi_mounted, starlette_mount) else "")


EVERY = pytest.mark.parametrize("asked", WHOLE + PART, indirect=True, ids=lambda house: house.__name__)


@EVERY
async def test_a_retry_gets_the_first_response_and_another_payload_none(asked: Asked) -> None:
    first, again = await asked.order("book"), await asked.order("book")

    assert (first.status_code, first.json()) == (201, {"order": 1})
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert (await asked.order("pen")).status_code == 422
    assert asked.shop.done == ["book"]


@EVERY
async def test_a_retry_that_comes_too_early_gets_409(asked: Asked) -> None:
    first = asyncio.create_task(asked.order("slow"))
    await eventually(lambda: asked.shop.done)

    assert (await asked.order("slow")).status_code == 409
    asked.shop.go_on.set()
    assert (await first).status_code == 201
    assert (await asked.order("slow")).headers["idempotency-replayed"] == "true"
    assert asked.shop.done == ["slow"]


@EVERY
async def test_an_exception_of_the_framework_for_http_is_an_outcome(asked: Asked) -> None:
    first, again = await asked.order("missing"), await asked.order("missing")

    assert (first.status_code, again.status_code) == (410, 410)
    assert again.content == first.content
    assert asked.shop.done == ["missing"]


@EVERY
async def test_what_the_framework_refuses_to_read_is_an_outcome_and_its_correction_another_request(
    asked: Asked,
) -> None:
    path = f"{asked.prefix}/orders"
    first = await asked.client.post(path, json={"nothing": 1}, headers=KEY)
    again = await asked.client.post(path, json={"nothing": 1}, headers=KEY)

    assert first.status_code == again.status_code in (400, 422)
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert (await asked.order("book")).json()["title"] == "Idempotency-Key is already used"


@EVERY
async def test_any_other_exception_is_500_and_a_retry_runs_again(asked: Asked) -> None:
    assert [(await asked.order("broken")).status_code for _ in range(2)] == [500, 500]
    assert asked.shop.done == ["broken", "broken"]


@EVERY
async def test_a_key_that_is_malformed_is_refused(asked: Asked) -> None:
    response = await asked.client.post(
        f"{asked.prefix}/orders", json={"item": "book"}, headers={"Idempotency-Key": "no quotes"}
    )
    assert (response.status_code, response.headers["content-type"]) == (400, "application/problem+json")
    assert not asked.shop.done


@pytest.mark.parametrize("asked", PART, indirect=True, ids=lambda house: house.__name__)
async def test_what_is_not_named_is_not_guarded(asked: Asked) -> None:
    for _ in range(2):
        assert "idempotency-replayed" not in (await asked.order("book", "/free")).headers
    assert asked.shop.done == ["book", "book"]


@pytest.mark.parametrize("asked", WHOLE, indirect=True, ids=lambda house: house.__name__)
async def test_a_key_is_good_for_one_path(asked: Asked) -> None:
    await asked.order("book")
    await asked.order("book", "/free")
    assert (await asked.order("book", "/free")).headers["idempotency-replayed"] == "true"
    assert asked.shop.done == ["book", "book"]


@pytest.mark.parametrize("path", ["/orders/", "//orders"])
@pytest.mark.parametrize("house", [litestar_paths, litestar_route])
async def test_litestar_overlooks_slashes_and_so_does_the_guard(house: House, path: str) -> None:
    async with asking(house) as asked:
        base = str(asked.client.base_url).rstrip("/")
        for _ in range(2):
            assert (await asked.client.post(base + path, json={"item": "book"}, headers=KEY)).status_code == 201
        assert asked.shop.done == ["book"]
