"""The retrying client and a real server, with network faults between them: every request has one effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.httpx import BlockingRetryingTransport, RetryingTransport
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.conditions import eventually
from tests.support.fault_proxy import Cut, Fault, FaultProxy, Refuse, Way
from tests.support.http_server import serving

BODY = {"item": "b" * 2000}


@dataclass
class Shop:
    """A guarded application that counts its effects, behind a fault proxy."""

    proxy: FaultProxy
    store: FlakyStore
    done: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[Response] = field(default_factory=list)
    """Responses of a server in front of the guard to the first requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.address}/orders"

    async def place(self, request: Request) -> Response:
        item = (await request.json())["item"]
        self.done.append(item)
        self.started.set()
        await self.may_finish.wait()
        return JSONResponse({"order": len(self.done), "item": item}, status_code=201)

    async def watch(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x"

        return StreamingResponse(parts())


@asynccontextmanager
async def shop() -> AsyncIterator[Shop]:
    store = FlakyStore(MemoryIdempotencyRepository())
    manager = IdempotencyManager(repository=store, scope="shop")
    opened = Shop(FaultProxy(), store)
    opened.may_finish.set()
    routes = [Route("/orders", opened.place, methods=["POST"]), Route("/watch", opened.watch, methods=["POST"])]
    guarded = IdempotencyKeyMiddleware(Starlette(routes=routes), manager, identity=anyone, paths=["/orders"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and opened.refusals:
            await opened.refusals.pop(0)(scope, receive, send)
        else:
            await guarded(scope, receive, send)

    async with serving(app) as port:
        opened.proxy.target = port
        async with opened.proxy:
            yield opened


Post = Callable[[str], Any]


async def _with_asyncio(url: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=RetryingTransport(httpx.AsyncHTTPTransport()), timeout=30) as client:
        return await client.post(url, json=BODY)


async def _blocking(url: str) -> httpx.Response:
    def post() -> httpx.Response:
        with httpx.Client(transport=BlockingRetryingTransport(httpx.HTTPTransport()), timeout=30) as client:
            return client.post(url, json=BODY)

    return await asyncio.to_thread(post)


BOTH = pytest.mark.parametrize("post", [_with_asyncio, _blocking])

BEFORE: list[Fault] = [Refuse(times=2), Cut(b"POST", way=Way.TO_SERVER), Cut(b"POST", way=Way.TO_SERVER, reset=True)]
DURING: list[Fault] = [Cut(b"POST", way=Way.TO_SERVER, after=40), Cut(b"POST", way=Way.TO_SERVER, after=150)]
AFTER: list[Fault] = [
    Cut(b"POST"),
    Cut(b"POST", reset=True),
    Cut(b"POST", after=20),
    Cut(b"POST", after=500),
    Cut(b"POST", times=3),
]


@BOTH
@pytest.mark.parametrize("fault", BEFORE + DURING + AFTER, ids=str)
async def test_a_cut_connection_leaves_one_effect_and_returns_its_response(post: Post, fault: Fault) -> None:
    async with shop() as here:
        struck = here.proxy.put(fault)
        response = await post(here.url)

    assert (response.status_code, response.json()) == (201, {"order": 1, "item": BODY["item"]})
    assert struck.struck >= 1
    assert here.done == [BODY["item"]]
    assert ("idempotency-replayed" in response.headers) is (fault in AFTER)


@BOTH
async def test_a_retry_during_the_first_request_waits_for_its_response(post: Post) -> None:
    async with shop() as here:
        here.may_finish.clear()
        posting = asyncio.create_task(post(here.url))
        await here.started.wait()
        here.proxy.reset()
        await eventually(lambda: here.store.calls["reserve"] > 1)
        here.may_finish.set()
        response = await posting

    assert response.headers["idempotency-replayed"] == "true"
    assert len(here.done) == 1


@BOTH
async def test_a_temporary_store_outage_delays_the_single_effect(post: Post) -> None:
    async with shop() as here:
        here.store.down = {"reserve"}
        posting = asyncio.create_task(post(here.url))
        await eventually(lambda: here.store.calls["reserve"] > 1)
        here.store.down = set()
        response = await posting

    assert (response.status_code, len(here.done)) == (201, 1)


@BOTH
async def test_errors_of_a_gateway_are_retried(post: Post) -> None:
    async with shop() as here:
        here.refusals = [Response(status_code=status) for status in (502, 503, 504, 429)]
        response = await post(here.url)

    assert (response.status_code, len(here.done)) == (201, 1)


async def test_a_permanent_network_failure_leaves_at_most_one_effect() -> None:
    async with shop() as here:
        here.proxy.put(Cut(b"POST", times=None))
        transport = RetryingTransport(httpx.AsyncHTTPTransport(), retries=2, longest=timedelta(seconds=30))
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(httpx.TransportError):
                await client.post(here.url, json=BODY)
        assert here.proxy.accepted == 3
    assert len(here.done) == 1


async def test_a_streaming_response_is_not_buffered() -> None:
    async with shop() as here:
        transport = RetryingTransport(httpx.AsyncHTTPTransport())
        async with httpx.AsyncClient(transport=transport) as client:
            url = here.url.replace("orders", "watch")
            async with client.stream("POST", url) as response:
                assert not response.is_closed
                assert b"".join([part async for part in response.aiter_raw()]) == b"xxx"
