"""A client that retries with one key."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import httpx
import pytest

from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.httpx import (
    LONGEST_BODY,
    BlockingRetryingTransport,
    RetryingTransport,
    idempotency_key,
)
from integr8s_idem.testing.virtual_time import virtual_time


class Server:
    """Gives the answers that it was told, in order, and then 200; an exception is raised."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.keys: list[str | None] = []
        self.bodies: list[bytes] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("idempotency-key"))
        self.bodies.append(request.content)
        answer = self.answers.pop(0) if self.answers else httpx.Response(200)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _client(server: Server, **options: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=RetryingTransport(httpx.MockTransport(server), **options))  # type: ignore[arg-type]


NO_ANSWER = httpx.ReadError("cut")


@virtual_time
async def test_a_request_without_an_answer_is_sent_again_with_its_key_and_body() -> None:
    server = Server(NO_ANSWER, httpx.Response(503), httpx.Response(409, headers={"retry-after": "1"}))
    async with _client(server) as client:
        response = await client.post("http://shop/orders", json={"a": 1})
    assert response.status_code == 200
    assert len(server.keys) == 4
    assert len(set(server.keys)) == 1
    assert server.keys[0] is not None
    assert server.keys[0].startswith('"')
    assert set(server.bodies) == {b'{"a":1}'}


@virtual_time
async def test_two_requests_have_two_keys() -> None:
    server = Server()
    async with _client(server) as client:
        await client.post("http://shop/orders")
        await client.post("http://shop/orders")
    assert len(set(server.keys)) == 2


@virtual_time
async def test_a_key_that_was_given_stays() -> None:
    server = Server(NO_ANSWER)
    async with _client(server) as client:
        await client.put("http://shop/orders/1", headers={"Idempotency-Key": idempotency_key("order:1")})
    assert server.keys == ['"order:1"', '"order:1"']


@virtual_time
async def test_what_changes_nothing_is_left_alone() -> None:
    server = Server(NO_ANSWER)
    async with _client(server) as client:
        with pytest.raises(httpx.ReadError):
            await client.get("http://shop/orders")
    assert server.keys == [None]


@virtual_time
@pytest.mark.parametrize("status", [400, 409, 422, 500])
async def test_an_answer_that_stays_the_same_is_given_back(status: int) -> None:
    server = Server(httpx.Response(status))
    async with _client(server) as client:
        assert (await client.post("http://shop/orders")).status_code == status
    assert len(server.keys) == 1


@virtual_time
async def test_the_pause_that_the_server_asks_for_is_kept() -> None:
    server = Server(httpx.Response(429, headers={"retry-after": "7"}))
    async with _client(server) as client:
        await client.post("http://shop/orders")
    assert asyncio.get_running_loop().time() == pytest.approx(7, abs=0.01)


@virtual_time
async def test_patience_ends() -> None:
    down = [NO_ANSWER] * 100
    server = Server(*down)
    async with _client(server, retries=3) as client:
        with pytest.raises(httpx.ReadError):
            await client.post("http://shop/orders")
    assert len(server.keys) == 4


def test_a_blocking_client_does_the_same() -> None:
    server = Server(NO_ANSWER, httpx.Response(503))
    transport = BlockingRetryingTransport(httpx.MockTransport(server), longest=timedelta(seconds=30))
    with httpx.Client(transport=transport) as client:
        assert client.post("http://shop/orders", json={"a": 1}).status_code == 200
    assert len(server.keys) == 3
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize(("text", "value"), [("a", '"a"'), ('a"b\\c', r'"a\"b\\c"')])
def test_a_key_is_quoted(text: str, value: str) -> None:
    assert idempotency_key(text) == value


@pytest.mark.parametrize("text", ["", "ä", "a\nb"])
def test_a_key_that_cannot_be_sent_is_refused(text: str) -> None:
    with pytest.raises(ApplicationError, match="printable ASCII"):
        idempotency_key(text)


class Torn(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __iter__(self) -> Iterator[bytes]:
        yield b"a p"
        raise httpx.RemoteProtocolError("cut")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"a p"
        raise httpx.RemoteProtocolError("cut")


def _torn(**headers: str) -> httpx.Response:
    return httpx.Response(201, headers=headers, stream=Torn())


@virtual_time
async def test_a_response_that_breaks_off_is_asked_for_again() -> None:
    whole = httpx.Response(201, headers={"content-encoding": "gzip"}, content=gzip.compress(b"a pound"))
    server = Server(_torn(**{"content-length": "7"}), whole)
    async with _client(server) as client:
        response = await client.post("http://shop/orders")
    assert (response.status_code, response.text) == (201, "a pound")
    assert len(server.keys) == 2
    assert len(set(server.keys)) == 1


def test_a_blocking_client_asks_for_it_again_too() -> None:
    server = Server(_torn(**{"content-length": "7"}), httpx.Response(201, content=b"a pound"))
    with httpx.Client(transport=BlockingRetryingTransport(httpx.MockTransport(server))) as client:
        assert client.post("http://shop/orders").text == "a pound"
    assert len(server.keys) == 2


@virtual_time
@pytest.mark.parametrize("headers", [{}, {"content-length": str(LONGEST_BODY + 1)}])
async def test_a_response_that_streams_or_is_long_is_handed_on_as_it_comes(headers: dict[str, str]) -> None:
    server = Server(_torn(**headers))
    async with _client(server) as client, client.stream("POST", "http://shop/orders") as response:
        parts = response.aiter_bytes()
        assert await anext(parts) == b"a p"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(parts)
    assert len(server.keys) == 1
