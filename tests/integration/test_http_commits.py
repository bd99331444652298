"""A response leaves when it is remembered, and is remembered when what the request wrote has committed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from dishka import AsyncContainer, FromDishka, Provider, Scope, make_async_container
from dishka.integrations import fastapi as dishka_fastapi
from dishka.integrations import litestar as dishka_litestar
from fastapi import Depends, FastAPI, HTTPException
from litestar import Litestar, post
from litestar.exceptions import HTTPException as LitestarException
from litestar.middleware import DefineMiddleware
from starlette.types import Message, Receive, Send
from starlette.types import Scope as ASGIScope

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.http_server import client_of

KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
GUARD: Any = IdempotencyKeyMiddleware
"""Litestar has types of its own for ASGI."""


class Session:
    """What commits at the end of a request."""


class Recording(FlakyStore):
    """Says when an outcome is written."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(MemoryIdempotencyRepository())
        self._steps = steps

    async def complete(self, completions: Any) -> list[bool]:
        self._steps.append("remembered")
        return await super().complete(completions)


@dataclass
class Shop:
    steps: list[str] = field(default_factory=list)
    """In the order in which they were made."""
    fails: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.manager = IdempotencyManager(repository=Recording(self.steps), scope="shop")

    async def session(self) -> AsyncIterator[Session]:
        try:
            yield Session()
        except Exception:
            self.steps.append("rolled back")
            raise
        if "commit" in self.fails:
            raise RuntimeError("the database refuses to commit")
        self.steps.append("committed")

    def container(self) -> AsyncContainer:
        provider = Provider(scope=Scope.REQUEST)
        provider.provide(self.session)
        provider.provide(lambda: self.manager, provides=IdempotencyManager, scope=Scope.APP)
        return make_async_container(provider)

    def place(self, missing: Exception) -> dict[str, bool]:
        self.steps.append("done")
        if "missing" in self.fails:
            raise missing
        if "handler" in self.fails:
            raise RuntimeError("broken")
        return {"done": True}

    def watched(self, app: Any) -> Any:
        """`app` behind a note of when its response leaves."""

        async def watching(scope: ASGIScope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.steps.append(f"left with {message['status']}")
                await send(message)

            await app(scope, receive, sent)

        return watching


def fastapi_dishka(shop: Shop) -> Any:
    app = FastAPI()

    @app.post("/orders")
    @dishka_fastapi.inject
    async def place(session: FromDishka[Session]) -> dict[str, bool]:
        return shop.place(HTTPException(410))

    container = shop.container()
    dishka_fastapi.setup_dishka(container, app)
    app.add_middleware(IdempotencyKeyMiddleware, container=container, identity=anyone)
    return app


def fastapi_yield(shop: Shop) -> Any:
    app, opened = FastAPI(), Depends(shop.session)

    @app.post("/orders")
    async def place(session: Session = opened) -> dict[str, bool]:
        return shop.place(HTTPException(410))

    app.add_middleware(IdempotencyKeyMiddleware, manager=shop.manager, identity=anyone)
    return app


def litestar_dishka(shop: Shop) -> Any:
    @post("/orders", status_code=200)
    @dishka_litestar.inject
    async def place(session: FromDishka[Session]) -> dict[str, bool]:
        return shop.place(LitestarException(status_code=410))

    container = shop.container()
    app = Litestar([place])
    dishka_litestar.setup_dishka(container, app)
    app.asgi_handler = GUARD(app.asgi_handler, container=container, identity=anyone)
    return app


House = Callable[[Shop], Any]
EVERY = pytest.mark.parametrize("house", [fastapi_dishka, fastapi_yield, litestar_dishka])


async def _asked(house: House, shop: Shop, times: int = 2) -> list[httpx.Response]:
    async with client_of(shop.watched(house(shop))) as client:
        return [await client.post("/orders", headers=KEY) for _ in range(times)]


@EVERY
async def test_it_leaves_when_it_is_remembered_and_that_is_when_it_has_committed(house: House) -> None:
    shop = Shop()
    first, again = await _asked(house, shop)
    assert first.json() == again.json() == {"done": True}
    assert shop.steps == ["done", "committed", "remembered", "left with 200", "left with 200"]


@EVERY
async def test_what_did_not_commit_is_not_answered_as_if_it_had_and_a_retry_runs_again(house: House) -> None:
    shop = Shop(fails={"commit"})
    assert [response.status_code for response in await _asked(house, shop)] == [500, 500]
    # Where nobody else answers an exception, the server does.
    assert [step for step in shop.steps if step != "left with 500"] == ["done", "done"]


@EVERY
async def test_once_it_commits_a_retry_is_the_first_that_is_done(house: House) -> None:
    shop = Shop(fails={"commit"})
    async with client_of(house(shop)) as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 500
        shop.fails.clear()
        for _ in range(2):
            assert (await client.post("/orders", headers=KEY)).status_code == 200
    assert shop.steps == ["done", "done", "committed", "remembered"]


@EVERY
async def test_an_endpoint_that_fails_is_run_again(house: House) -> None:
    shop = Shop(fails={"handler"})
    assert [response.status_code for response in await _asked(house, shop)] == [500, 500]
    assert shop.steps.count("done") == 2
    assert "remembered" not in shop.steps


@EVERY
async def test_an_http_exception_is_remembered_when_its_scope_has_ended(house: House) -> None:
    """FastAPI's own dependency rolls back and Dishka's commits; that is theirs to say."""
    shop = Shop(fails={"missing"})
    assert [response.status_code for response in await _asked(house, shop)] == [410, 410]
    ended = "rolled back" if house is fastapi_yield else "committed"
    assert shop.steps == ["done", ended, "remembered", "left with 410", "left with 410"]


async def test_fastapi_within_dishkas_middleware_the_guard_refuses_to_work(caplog: pytest.LogCaptureFixture) -> None:
    shop, app = Shop(), FastAPI()

    @app.post("/orders")
    async def place() -> dict[str, bool]:
        return shop.place(HTTPException(410))

    app.add_middleware(IdempotencyKeyMiddleware, manager=shop.manager, identity=anyone)
    dishka_fastapi.setup_dishka(shop.container(), app)
    async with client_of(app) as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 500
    assert "add it after setup_dishka(container, app)" in caplog.text
    assert not shop.steps


@pytest.mark.parametrize("place", ["application", "route"])
async def test_litestar_within_dishkas_scope_the_guard_refuses_to_work(place: str) -> None:
    shop = Shop()
    guard: list[Any] = [DefineMiddleware(GUARD, manager=shop.manager, identity=anyone)]

    @post("/orders", middleware=guard if place == "route" else [])
    async def order() -> dict[str, bool]:
        return shop.place(LitestarException(status_code=410))

    app = Litestar([order], middleware=guard if place == "application" else [], debug=True)
    dishka_litestar.setup_dishka(shop.container(), app)
    async with client_of(app) as client:
        response = await client.post("/orders", headers=KEY)
    assert response.status_code == 500
    assert "app.asgi_handler = IdempotencyKeyMiddleware" in response.text
    assert not shop.steps
