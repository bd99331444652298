"""The order of FastAPI's commit and response, with and without an idempotency key."""

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
    """A database session."""


class ResponseRecorder:
    """Middleware that records when a response passes."""

    def __init__(self, app: ASGIApp, events: list[str], label: str) -> None:
        self.app = app
        self.events = events
        self.label = label

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async def record(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.events.append(f"{self.label} {message['status']}")
            await send(message)

        await self.app(scope, receive, record)


class Shop:
    """An application that commits as `how` specifies, and the recorded events."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.events: list[str] = []

    def commit(self) -> None:
        self.events.append("commit")

    async def order(self) -> dict[str, int]:
        self.events.append("handler")
        return {"order": 1}

    def add_dishka_endpoint(self, app: FastAPI) -> None:
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

    def add_depends_endpoint(self, app: FastAPI) -> None:
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
        app.add_middleware(ResponseRecorder, events=self.events, label="responded")
        if self.how == "dishka":
            self.add_dishka_endpoint(app)
        else:
            self.add_depends_endpoint(app)
        app.add_middleware(IdempotencyKeyMiddleware, manager=guarded().manager, identity=anyone)
        app.add_middleware(ResponseRecorder, events=self.events, label="sent")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            yield client


@pytest.mark.parametrize(
    ("how", "events"),
    [
        ("dishka", ["handler", "responded 201", "commit", "sent 201"]),
        ("request", ["handler", "responded 201", "commit", "sent 201"]),
        ("function", ["handler", "commit", "responded 201", "sent 201"]),
    ],
)
async def test_the_response_is_sent_after_the_commit(how: str, events: list[str]) -> None:
    shop = Shop(how)

    async with shop.opened() as client:
        await client.post("/orders", headers=KEY)

    assert shop.events == events


@pytest.mark.parametrize("how", ["dishka", "request"])
async def test_without_a_key_the_response_is_sent_before_the_commit(how: str) -> None:
    shop = Shop(how)

    async with shop.opened() as client:
        await client.post("/orders")

    assert shop.events[-2:] == ["sent 201", "commit"]
