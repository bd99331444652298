"""httpx transports that retry requests with one key."""

from __future__ import annotations

import asyncio
import gzip
from datetime import timedelta

import httpx
import pytest

from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.httpx import BlockingRetryingTransport, RetryingTransport, idempotency_key
from integr8s_idem.testing.virtual_time import virtual_time


class Server:
    """Returns or raises the scripted answers in order, then returns 200."""

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
async def test_a_request_without_a_response_is_retried_with_the_same_key_and_body() -> None:
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
async def test_an_existing_key_is_kept() -> None:
    server = Server(NO_ANSWER)
    async with _client(server) as client:
        await client.put("http://shop/orders/1", headers={"Idempotency-Key": idempotency_key("order:1")})
    assert server.keys == ['"order:1"', '"order:1"']


@virtual_time
async def test_safe_methods_are_not_retried() -> None:
    server = Server(NO_ANSWER)
    async with _client(server) as client:
        with pytest.raises(httpx.ReadError):
            await client.get("http://shop/orders")
    assert server.keys == [None]


@virtual_time
@pytest.mark.parametrize("status", [400, 409, 422, 500])
async def test_final_responses_are_returned_without_retries(status: int) -> None:
    server = Server(httpx.Response(status))
    async with _client(server) as client:
        assert (await client.post("http://shop/orders")).status_code == status
    assert len(server.keys) == 1


@virtual_time
async def test_the_retry_after_header_is_respected() -> None:
    server = Server(httpx.Response(429, headers={"retry-after": "7"}))
    async with _client(server) as client:
        await client.post("http://shop/orders")
    assert asyncio.get_running_loop().time() == pytest.approx(7, abs=0.01)


@virtual_time
async def test_a_retry_after_beyond_the_time_limit_ends_the_retries() -> None:
    server = Server(httpx.Response(503, headers={"retry-after": "3600"}))
    async with _client(server, longest=timedelta(seconds=60)) as client:
        assert (await client.post("http://shop/orders")).status_code == 503
    assert len(server.keys) == 1


@virtual_time
async def test_a_request_that_cannot_be_sent_is_not_retried() -> None:
    server = Server(httpx.UnsupportedProtocol("no such protocol"))
    async with _client(server) as client:
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.post("http://shop/orders")
    assert len(server.keys) == 1


@virtual_time
async def test_a_buffered_response_equals_the_original() -> None:
    packed = gzip.compress(b"done")
    headers = {"content-encoding": "gzip", "set-cookie": "a=b", "content-length": str(len(packed))}
    server = Server(httpx.Response(201, headers=headers, stream=httpx.ByteStream(packed)))
    async with _client(server) as client:
        response = await client.post("http://shop/orders")
        assert (response.status_code, response.text, response.headers["content-encoding"]) == (201, "done", "gzip")
        assert client.cookies["a"] == "b"
        assert response.elapsed >= timedelta(0)


@virtual_time
async def test_retries_are_limited() -> None:
    down = [NO_ANSWER] * 100
    server = Server(*down)
    async with _client(server, retries=3) as client:
        with pytest.raises(httpx.ReadError):
            await client.post("http://shop/orders")
    assert len(server.keys) == 4


def test_a_blocking_client_retries_as_well() -> None:
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
def test_a_key_that_cannot_be_sent_is_rejected(text: str) -> None:
    with pytest.raises(ApplicationError, match="printable ASCII"):
        idempotency_key(text)
