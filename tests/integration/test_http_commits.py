"""A response is sent after its outcome is stored, and stored after the request's transaction has committed."""

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
"""`Any`, because Litestar defines its own ASGI types."""


class Session:
    """A session that commits at the end of a request."""


class Recording(FlakyStore):
    """Records when an outcome is stored."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(MemoryIdempotencyRepository())
        self._steps = steps

    async def complete(self, completions: Any) -> list[bool]:
        self._steps.append("stored")
        return await super().complete(completions)


@dataclass
class Shop:
    steps: list[str] = field(default_factory=list)
    """Steps in the order of their execution."""
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
        """Wrap `app` to record when its response is sent."""

        async def watching(scope: ASGIScope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.steps.append(f"sent {message['status']}")
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
    app = Litestar([place], logging_config=None)
    dishka_litestar.setup_dishka(container, app)
    app.asgi_handler = GUARD(app.asgi_handler, container=container, identity=anyone)
    return app


MakeApp = Callable[[Shop], Any]
ALL = pytest.mark.parametrize("make_app", [fastapi_dishka, fastapi_yield, litestar_dishka])


async def _responses(make_app: MakeApp, shop: Shop, times: int = 2) -> list[httpx.Response]:
    async with client_of(shop.watched(make_app(shop))) as client:
        return [await client.post("/orders", headers=KEY) for _ in range(times)]


@ALL
async def test_the_response_is_sent_after_the_commit_and_the_stored_outcome(make_app: MakeApp) -> None:
    shop = Shop()
    first, again = await _responses(make_app, shop)
    assert first.json() == again.json() == {"done": True}
    assert shop.steps == ["done", "committed", "stored", "sent 200", "sent 200"]


@ALL
async def test_a_failed_commit_is_an_error_and_a_retry_runs_again(make_app: MakeApp) -> None:
    shop = Shop(fails={"commit"})
    assert [response.status_code for response in await _responses(make_app, shop)] == [500, 500]
    # The server sends the 500 if the application does not handle the exception.
    assert [step for step in shop.steps if step != "sent 500"] == ["done", "done"]


@ALL
async def test_the_first_committed_retry_is_stored(make_app: MakeApp) -> None:
    shop = Shop(fails={"commit"})
    async with client_of(make_app(shop)) as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 500
        shop.fails.clear()
        for _ in range(2):
            assert (await client.post("/orders", headers=KEY)).status_code == 200
    assert shop.steps == ["done", "done", "committed", "stored"]


@ALL
async def test_a_failed_endpoint_runs_again(make_app: MakeApp) -> None:
    shop = Shop(fails={"handler"})
    assert [response.status_code for response in await _responses(make_app, shop)] == [500, 500]
    assert shop.steps.count("done") == 2
    assert "stored" not in shop.steps


@ALL
async def test_an_http_exception_is_stored_after_its_scope_has_ended(make_app: MakeApp) -> None:
    """FastAPI's dependency rolls back, and Dishka's commits."""
    shop = Shop(fails={"missing"})
    assert [response.status_code for response in await _responses(make_app, shop)] == [410, 410]
    ended = "rolled back" if make_app is fastapi_yield else "committed"
    assert shop.steps == ["done", ended, "stored", "sent 410", "sent 410"]


async def test_in_fastapi_the_middleware_refuses_to_run_inside_dishkas(caplog: pytest.LogCaptureFixture) -> None:
    shop, app = Shop(), FastAPI()

    @app.post("/orders")
    async def place() -> dict[str, bool]:
        return shop.place(HTTPException(410))

    app.add_middleware(IdempotencyKeyMiddleware, manager=shop.manager, identity=anyone)
    dishka_fastapi.setup_dishka(shop.container(), app)
    async with client_of(app) as client:
        assert (await client.post("/orders", headers=KEY)).status_code == 500
    assert "and after setup_dishka(container, app)" in caplog.text
    assert not shop.steps


@pytest.mark.parametrize("place", ["application", "route"])
async def test_in_litestar_the_middleware_refuses_to_run_inside_dishkas(place: str) -> None:
    shop = Shop()
    guard: list[Any] = [DefineMiddleware(GUARD, manager=shop.manager, identity=anyone)]

    @post("/orders", middleware=guard if place == "route" else [])
    async def order() -> dict[str, bool]:
        return shop.place(LitestarException(status_code=410))

    app = Litestar([order], middleware=guard if place == "application" else [], debug=True, logging_config=None)
    dishka_litestar.setup_dishka(shop.container(), app)
    async with client_of(app) as client:
        response = await client.post("/orders", headers=KEY)
    assert response.status_code == 500
    assert "app.asgi_handler = IdempotencyKeyMiddleware" in response.text
    assert not shop.steps
