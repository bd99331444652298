"""When FastAPI commits and when it answers, behind the guard for HTTP and without a key."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from dishka import Provider, Scope, make_async_container, provide
from dishka.integrations.fastapi import FromDishka, inject, setup_dishka
from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from tests.support.guarded import guarded

KEY = {"Idempotency-Key": '"1"'}


class Session:
    """What an endpoint writes by."""


class Telling:
    """Says when a response comes by."""

    def __init__(self, app: ASGIApp, story: list[str], what: str) -> None:
        self.app = app
        self.story = story
        self.what = what

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.story.append(f"{self.what} {message['status']}")
            await send(message)

        await self.app(scope, receive, tell)


class Shop:
    """An application that commits as `how` says, and the story of its requests."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.story: list[str] = []

    def commit(self) -> None:
        self.story.append("commit")

    async def order(self) -> dict[str, int]:
        self.story.append("handler")
        return {"order": 1}

    def with_dishka(self, app: FastAPI) -> None:
        shop = self

        class Sessions(Provider):
            @provide(scope=Scope.REQUEST)
            async def session(self) -> AsyncGenerator[Session, BaseException | None]:
                error = yield Session()
                if error is None:
                    shop.commit()

        @app.post("/orders", status_code=201)
        @inject
        async def place(session: FromDishka[Session]) -> dict[str, int]:
            return await shop.order()

        setup_dishka(make_async_container(Sessions()), app)

    def with_depends(self, app: FastAPI) -> None:
        async def session() -> AsyncIterator[Session]:
            yield Session()
            self.commit()

        dependency: Any = Depends(session, scope="function" if self.how == "function" else "request")

        @app.post("/orders", status_code=201)
        async def place(session: Any = dependency) -> dict[str, int]:
            return await self.order()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[httpx.AsyncClient]:
        app = FastAPI()
        app.add_middleware(Telling, story=self.story, what="answered")
        if self.how == "dishka":
            self.with_dishka(app)
        else:
            self.with_depends(app)
        app.add_middleware(IdempotencyKeyMiddleware, manager=guarded().manager, identity=anyone)
        app.add_middleware(Telling, story=self.story, what="left")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            yield client


@pytest.mark.parametrize(
    ("how", "story"),
    [
        ("dishka", ["handler", "answered 201", "commit", "left 201"]),
        ("request", ["handler", "answered 201", "commit", "left 201"]),
        ("function", ["handler", "commit", "answered 201", "left 201"]),
    ],
)
async def test_whenever_the_application_commits_the_response_leaves_behind_it(how: str, story: list[str]) -> None:
    shop = Shop(how)

    async with shop.opened() as client:
        await client.post("/orders", headers=KEY)

    assert shop.story == story


@pytest.mark.parametrize("how", ["dishka", "request"])
async def test_without_a_key_the_response_leaves_before_the_commit(how: str) -> None:
    shop = Shop(how)

    async with shop.opened() as client:
        await client.post("/orders")

    assert shop.story[-2:] == ["left 201", "commit"]
