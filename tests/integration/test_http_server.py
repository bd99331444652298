"""The middleware on a real HTTP server and, where it matters, with real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.support.conditions import eventually
from tests.support.http_server import client_of, serving
from tests.support.http_shop import KEY, Answer

HEAD = b'POST / HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: "a"\r\n'


def _guarded(answer: Answer, manager: IdempotencyManager | None = None, **options: Any) -> Any:
    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    manager = manager or IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    return IdempotencyKeyMiddleware(app, manager, **{"identity": anyone, **options})


class Echo:
    """Answers with the request body and records it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.started, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_finish.set()

    async def answer(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.started.set()
        await self.may_finish.wait()
        return Response(self.bodies[-1], media_type="application/octet-stream")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def _response(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Status, headers and body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return head[0].split(" ", 2)[1], headers, body


async def _request(port: int, key: str) -> tuple[str, dict[str, str], bytes]:
    async with connected(port) as (reader, writer):
        writer.write(HEAD.replace(b'"a"', key.encode()) + b"Content-Length: 0\r\n\r\n")
        return await _response(reader)


async def test_chunked_and_whole_bodies_have_the_same_fingerprint() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1000

    echo = Echo()
    async with client_of(_guarded(echo.answer)) as client:
        chunked = await client.post("/", content=parts(), headers=KEY)
        whole = await client.post("/", content=b"x" * 3000, headers=KEY)
    assert chunked.content == whole.content == b"x" * 3000
    assert whole.headers["idempotency-replayed"] == "true"
    assert len(echo.bodies) == 1


async def test_100_continue_is_sent_only_for_a_valid_key() -> None:
    echo = Echo()
    async with serving(_guarded(echo.answer)) as port:
        async with connected(port) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(b"body")
            assert (await _response(reader))[::2] == ("200", b"body")
        async with connected(port) as (reader, writer):
            head = HEAD.replace(b'"a"', b"a")
            writer.write(head + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
            assert (await _response(reader))[0] == "400"
    assert echo.bodies == [b"body"]


async def test_a_key_cannot_split_a_header() -> None:
    echo = Echo()
    async with serving(_guarded(echo.answer)) as port:
        for value in (b'"a\r\nb"', b'"a\rb"', b'"a\nX-User: ada"', b'"a\0b"', b'"a\tb"'):
            async with connected(port) as (reader, writer):
                writer.write(HEAD.replace(b'"a"', value) + b"Content-Length: 0\r\n\r\n")
                assert (await _response(reader))[0] == "400", value
    assert not echo.bodies


async def test_a_request_with_an_incomplete_body_is_not_handled() -> None:
    echo = Echo()
    async with serving(_guarded(echo.answer)) as port:
        async with connected(port) as (_, writer):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\nbo")
            await writer.drain()
        async with connected(port) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\nbody")
            assert "idempotency-replayed" not in (await _response(reader))[1]
    assert echo.bodies == [b"body"]


async def test_a_client_that_disconnects_gets_the_response_when_it_retries() -> None:
    echo = Echo()
    echo.may_finish.clear()
    async with serving(_guarded(echo.answer, wait=timedelta(seconds=60))) as port:
        async with connected(port) as (_, writer):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\nbody")
            await echo.started.wait()
        echo.may_finish.set()
        async with connected(port) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\nbody")
            status, headers, body = await _response(reader)
    assert (status, headers["idempotency-replayed"], body) == ("200", "true", b"body")
    assert len(echo.bodies) == 1


async def test_a_request_aborted_on_disconnect_is_handled_again_on_a_retry() -> None:
    runs, gone = [], asyncio.Event()

    async def answer(request: Request) -> Response:
        runs.append(True)
        if len(runs) == 1:
            while not await request.is_disconnected():  # noqa: ASYNC110  # there is no notification
                await asyncio.sleep(0.01)
            gone.set()
            raise ClientDisconnect
        return PlainTextResponse("done")

    async with serving(_guarded(answer)) as port:
        async with connected(port) as (_, writer):
            writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
            await eventually(lambda: runs)
        await gone.wait()
        while (status := await _request(port, '"a"'))[0] == "409":  # noqa: ASYNC110  # the server's task ends by itself
            await asyncio.sleep(0.01)
    assert status[::2] == ("200", b"done")
    assert len(runs) == 2


@pytest.mark.parametrize("status", [200, 204, 304])
async def test_a_response_without_a_body_keeps_the_connection_usable(status: int) -> None:
    async def answer(request: Request) -> Response:
        response = Response(status_code=status)
        for name in ("a", "b"):
            response.set_cookie(name, "1")
        return response

    async with client_of(_guarded(answer)) as client:
        first, again = [await client.post("/", headers=KEY) for _ in range(2)]
        assert len(first.headers.get_list("set-cookie")) == 2
        assert "set-cookie" not in again.headers
        assert [(response.status_code, response.content) for response in (first, again)] == [(status, b"")] * 2
        assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("megabytes", [1, 8])
async def test_a_response_of_any_size_arrives_whole_and_is_replayed_if_stored(megabytes: int) -> None:
    size, runs = megabytes * 1_000_000, []

    async def answer(request: Request) -> Response:
        runs.append(True)
        return Response(b"x" * size)

    async with client_of(_guarded(answer)) as client:
        first, again = [await client.post("/", headers=KEY) for _ in range(2)]
    assert len(first.content) == size
    assert (again.status_code, len(again.content) == size) == ((200, True) if megabytes == 1 else (409, False))
    assert len(runs) == 1


async def test_a_file_response_is_replayed_after_the_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "invoice"
    file.write_bytes(b"invoice 1")

    async def answer(request: Request) -> Response:
        return FileResponse(file)

    async with client_of(_guarded(answer)) as client:
        first = await client.post("/", headers=KEY)
        file.write_bytes(b"invoice 2")
        assert first.content == (await client.post("/", headers=KEY)).content == b"invoice 1"


async def test_server_sent_events_arrive_one_by_one() -> None:
    may_finish = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await may_finish.wait()
        yield b"data: 2\n\n"

    async def answer(request: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    async with client_of(_guarded(answer)) as client, client.stream("POST", "/", headers=KEY) as response:
        seen = response.aiter_raw()
        assert await anext(seen) == b"data: 1\n\n"
        may_finish.set()
        assert await anext(seen) == b"data: 2\n\n"


async def test_a_thousand_requests_with_fifty_keys_to_two_servers_run_fifty_times(
    redis_url: str, redis_client: Redis
) -> None:
    """The servers share only Redis, like two processes."""

    async def answer(request: Request) -> Response:
        key = request.headers["idempotency-key"]
        done = await redis_client.hincrby("effects", key, 1)
        await asyncio.sleep(0.05)
        return PlainTextResponse(f"{key} {done}")

    async with AsyncExitStack() as stack:
        ports = []
        for _ in range(2):
            client = await stack.enter_async_context(Redis.from_url(redis_url))
            # With a thousand clients and two servers, one turn of the event loop may exceed the default timeout.
            store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=60))
            manager = IdempotencyManager(IdempotencyConfig(), store, scope="shop")
            stack.push_async_callback(manager.close)
            app = _guarded(answer, manager, wait=timedelta(seconds=100))
            ports.append(await stack.enter_async_context(serving(app)))
        keys = [f'"{number % 50}"' for number in range(1000)]
        # Each key on both servers, all concurrently.
        responses = await asyncio.gather(*(_request(ports[number // 50 % 2], key) for number, key in enumerate(keys)))

    assert [body.decode() for _, _, body in responses] == [f"{key} 1" for key in keys]
    assert Counter(headers.get("idempotency-replayed") for _, headers, _ in responses) == {None: 50, "true": 950}
    assert await redis_client.hgetall("effects") == {key.encode(): b"1" for key in keys}
