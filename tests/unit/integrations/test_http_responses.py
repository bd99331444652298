"""How the ASGI middleware captures, stores and replays different kinds of responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from tests.support.conditions import eventually
from tests.support.http_shop import KEY, problem_in, shop

Message = dict[str, Any]


async def _messages(app: Any, extensions: dict[str, Any] | None = None) -> list[Message]:
    """Return the ASGI messages that `app` sends for a request with a key."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(name.lower().encode(), value.encode()) for name, value in KEY.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    await app({**scope, "extensions": extensions or {}, "asgi": {"spec_version": "2.4"}}, receive, send)
    return sent


def _guarded(app: Any) -> IdempotencyKeyMiddleware:
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    return IdempotencyKeyMiddleware(app, manager, identity=anyone)


def _app_sending(*messages: Message) -> tuple[Any, list[Message]]:
    """Return an application that sends `messages`, and a list of the scopes it received."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        seen.append(scope)
        for message in messages:
            await send(dict(message))

    return app, seen


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
BODY = {"type": "http.response.body", "body": b"done", "more_body": False}


@pytest.mark.parametrize("status", [204, 304])
async def test_a_response_whose_status_allows_no_body_is_replayed_without_it(status: int) -> None:
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"4"), (b"etag", b"1")]}
    app, seen = _app_sending(start, {"type": "http.response.body", "body": b"null"})
    guarded = _guarded(app)
    await _messages(guarded)
    replayed = await _messages(guarded)
    assert len(seen) == 1
    assert replayed[0]["status"] == status
    assert (b"etag", b"1") in replayed[0]["headers"]
    assert b"content-length" not in dict(replayed[0]["headers"])
    assert replayed[1]["body"] == b""


async def test_a_response_too_large_to_store_is_sent_after_the_application_has_returned() -> None:
    is_committed = False
    sent: list[tuple[str, bool]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal is_committed
        await PlainTextResponse("x" * 2000)(scope, receive, send)
        is_committed = True

    async def send(message: Message) -> None:
        sent.append((message["type"], is_committed))

    config = IdempotencyConfig(max_result_size_bytes=1000)
    manager = IdempotencyManager(config, MemoryIdempotencyRepository(), scope="shop")
    guarded = IdempotencyKeyMiddleware(app, manager, identity=anyone)
    headers = [(name.lower().encode(), value.encode()) for name, value in KEY.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    await guarded(scope, _empty_body, send)
    assert sent == [("http.response.start", True), ("http.response.body", True)]


async def _empty_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def test_spaces_around_the_value_of_a_header_do_not_prevent_the_replay() -> None:
    start = {"type": "http.response.start", "status": 201, "headers": [(b"x-name", b" Ann\t")]}
    app, _ = _app_sending(start, {"type": "http.response.body", "body": b"ok"})
    guarded = _guarded(app)
    await _messages(guarded)
    replayed = await _messages(guarded)
    assert (replayed[0]["status"], replayed[1]["body"]) == (201, b"ok")
    assert (b"x-name", b"Ann") in replayed[0]["headers"]


@pytest.mark.parametrize("extension", ["http.response.pathsend", "http.response.zerocopysend"])
async def test_a_file_response_is_captured_even_if_the_server_supports_path_send(
    tmp_path: Path, extension: str
) -> None:
    file = tmp_path / "invoice.pdf"
    file.write_bytes(b"%PDF")
    runs = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(extension in scope["extensions"])
        await FileResponse(file)(scope, receive, send)

    guarded = _guarded(app)
    for _ in range(2):
        sent = await _messages(guarded, {extension: {}, "other": {}})
        assert b"".join(message.get("body", b"") for message in sent) == b"%PDF"
    assert runs == [False]


async def test_headers_from_an_iterator_reach_the_application_too() -> None:
    received = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend(scope["headers"])
        await PlainTextResponse("done")(scope, receive, send)

    guarded, headers = _guarded(app), [(name.lower().encode(), value.encode()) for name, value in KEY.items()]

    async def with_iterator(scope: Any, receive: Any, send: Any) -> None:
        await guarded({**scope, "headers": iter(scope["headers"])}, receive, send)

    for _ in range(2):
        assert b"".join(message.get("body", b"") for message in await _messages(with_iterator)) == b"done"
    assert received == headers


async def test_a_body_is_stored_as_it_was_sent() -> None:
    """The application may send a view of a buffer that it fills again."""
    buffer = bytearray(b"done")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({**BODY, "body": memoryview(buffer)})
        buffer[:] = b"lost"

    guarded = _guarded(app)
    for _ in range(2):
        assert [message.get("body") for message in await _messages(guarded)] == [None, b"done"]


async def test_responses_with_trailers_are_passed_through_and_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    trailers = {"type": "http.response.trailers", "headers": [(b"digest", b"x")], "more_trailers": False}
    said = ({**START, "trailers": True}, BODY, trailers)
    app, seen = _app_sending(*said)
    guarded = _guarded(app)
    for _ in range(2):
        assert await _messages(guarded, {"http.response.trailers": {}}) == list(said)
    assert len(seen) == 2
    assert "it uses http.response.trailers" in caplog.text


@pytest.mark.parametrize("kind", ["http.response.debug", "http.response.early_hint", "http.response.push"])
async def test_what_is_said_beside_a_response_leaves_at_once_and_the_response_is_remembered(kind: str) -> None:
    app, seen = _app_sending({"type": kind}, START, BODY)
    guarded = _guarded(app)
    assert [message["type"] for message in await _messages(guarded)] == [kind, START["type"], BODY["type"]]
    again = await _messages(guarded)
    assert again[0]["headers"][-1] == (b"idempotency-replayed", b"true")
    assert len(seen) == 1


async def test_an_application_that_sends_nothing_has_no_outcome() -> None:
    app, seen = _app_sending()
    guarded = _guarded(app)
    assert await _messages(guarded) == await _messages(guarded) == []
    assert len(seen) == 2


async def test_repeated_headers_are_replayed_and_cookies_are_not() -> None:
    async def answer(request: Request) -> Response:
        response = PlainTextResponse("done")
        for value in ("<a>", "<b>"):
            response.headers.append("link", value)
        response.set_cookie("session", "s3cret")
        response.set_cookie("other", "x")
        response.headers["WWW-Authenticate"] = "Bearer"
        response.headers["X-Name"] = "Zoë"
        return response

    async with shop(answer) as here:
        first = await here.order()
        assert len(first.headers.get_list("set-cookie")) == 2
        again = await here.order()
        assert again.headers.get_list("link") == ["<a>", "<b>"]
        assert again.headers["x-name"] == "Zoë"
        assert "set-cookie" not in again.headers
        assert "www-authenticate" not in again.headers
        [record] = [record async for record in here.store.scan("")]
        assert record.result is not None
        assert b"s3cret" not in record.result.body


async def test_the_headers_to_leave_out_are_configurable() -> None:
    async with shop(unstored_headers={"location"}, replace_unstored_headers=True) as here:
        await here.order()
        again = await here.order()
        assert "location" not in again.headers
        assert again.headers["set-cookie"] == "a=b"


@pytest.mark.parametrize("status", [204, 205, 304])
async def test_a_response_without_a_body_is_replayed_without_a_body(status: int) -> None:
    async def answer(request: Request) -> Response:
        return Response(status_code=status, headers={"ETag": '"1"'})

    async with shop(answer) as here:
        for response in (await here.order(), await here.order()):
            assert (response.status_code, response.content, response.headers["etag"]) == (status, b"", '"1"')
        assert len(here.bodies) == 1


@pytest.mark.parametrize("body", [b"", b"\n", b"\n\n[1]\n", bytes(range(256)) * 100], ids=len)
async def test_a_body_is_replayed_byte_for_byte(body: bytes) -> None:
    async def answer(request: Request) -> Response:
        return Response(body)

    async with shop(answer) as here:
        assert (await here.order()).content == (await here.order()).content == body
        assert len(here.bodies) == 1


async def test_a_background_task_belongs_to_the_request() -> None:
    """The response is sent after the task, because the middleware cannot know whether the task commits."""
    go_on, ended = asyncio.Event(), []

    async def mail() -> None:
        await go_on.wait()
        ended.append(True)

    async def answer(request: Request) -> Response:
        return PlainTextResponse("done", background=BackgroundTask(mail))

    async with shop(answer) as here:
        first = asyncio.create_task(here.order())
        await eventually(lambda: here.bodies)
        assert (await here.order()).status_code == 409
        assert not first.done()
        go_on.set()
        assert (await first).text == (await here.order()).text == "done"
        assert ended == [True]


async def test_a_failing_background_task_fails_the_request_and_a_retry_runs_again() -> None:
    async def mail() -> None:
        raise RuntimeError("no such address")

    async def answer(request: Request) -> Response:
        return PlainTextResponse("done", background=BackgroundTask(mail))

    async with shop(answer) as here:
        assert [(await here.order()).status_code for _ in range(2)] == [500, 500]
        assert len(here.bodies) == 2


class PassThrough(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        await request.body()
        response: Response = await call_next(request)
        response.headers["x-passed"] = "1"
        return response


@pytest.mark.parametrize("position", ["inside", "outside"])
async def test_a_base_http_middleware_works_inside_and_outside(position: str) -> None:
    options: Any = {position: [Middleware(PassThrough)]}
    async with shop(**options) as here:
        first, again = await here.order(b"body"), await here.order(b"body")
        assert first.headers["x-passed"] == again.headers["x-passed"] == "1"
        assert again.headers["idempotency-replayed"] == "true"
        assert here.bodies == [b"body"]


async def test_middleware_that_depends_on_the_client_belongs_outside() -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse("x" * 2000)

    async with shop(answer, outside=[Middleware(GZipMiddleware)]) as here:
        first = await here.order(headers={"Accept-Encoding": "gzip"})
        again = await here.order(headers={"Accept-Encoding": "identity"})
        assert (first.headers["content-encoding"], again.headers.get("content-encoding")) == ("gzip", None)
        assert first.text == again.text == "x" * 2000
        assert len(here.bodies) == 1


@pytest.mark.parametrize("debug", [True, False])
async def test_an_exception_is_answered_by_the_application_and_a_retry_runs(debug: bool) -> None:
    async def answer(request: Request) -> Response:
        if len(here.bodies) == 1:
            raise RuntimeError("broken")
        return PlainTextResponse("done")

    async with shop(answer, debug=debug) as here:
        first = await here.order()
        assert first.status_code == 500
        assert ("broken" in first.text) is debug
        assert (await here.order()).text == "done"


async def test_the_error_page_of_the_application_is_sent() -> None:
    async def fails(request: Request) -> Response:
        raise RuntimeError("broken")

    async def said(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "custom"}, status_code=500)

    routes = [Route("/", fails, methods=["POST"])]
    app = _guarded(Starlette(routes=routes, exception_handlers={Exception: said}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        response = await client.post("/", headers=KEY)
    assert (response.status_code, response.json()) == (500, {"error": "custom"})


async def test_a_response_is_not_sent_if_the_application_then_fails() -> None:
    """For example, if the scope of an endpoint fails to commit."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("done", status_code=201)(scope, receive, send)
        raise RuntimeError("the transaction did not commit")

    transport = httpx.ASGITransport(_guarded(app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        assert (await client.post("/", headers=KEY)).status_code == 500


async def test_an_interrupted_stream_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        raise RuntimeError("broken")

    async def answer(request: Request) -> Response:
        return StreamingResponse(parts())

    async with shop(answer) as here:
        with caplog.at_level(logging.WARNING):
            assert [(await here.order()).text for _ in range(2)] == ["a", "a"]
        assert len(here.bodies) == 2


async def test_a_key_that_was_given_up_gets_its_own_problem() -> None:
    async def answer(request: Request) -> Response:
        raise RuntimeError("broken")

    async with shop(answer, config={"on_failure": "block"}) as here:
        assert (await here.order()).status_code == 500
        assert problem_in(await here.order(), 409)["title"] == "The request was given up"
        assert len(here.bodies) == 1


async def test_a_streamed_response_is_not_a_failure_that_blocks_its_key() -> None:
    async def parts() -> AsyncIterator[str]:
        yield "a"

    async def answer(request: Request) -> Response:
        return StreamingResponse(parts())

    async with shop(answer, config={"on_failure": "block"}) as here:
        assert [(await here.order()).text for _ in range(2)] == ["a", "a"]


async def test_a_request_taken_over_by_another_worker_gets_503() -> None:
    """The side effects of the first run may have happened; the outcome is that of the new owner."""

    async def answer(request: Request) -> Response:
        [asked] = here.store.requests
        await here.store.inner.delete([asked.key])
        await here.store.inner.reserve([replace(asked, token=b"another workers ", owner="another")])
        return PlainTextResponse("done")

    async with shop(answer) as here:
        response = await here.order()
        assert "You may retry" in problem_in(response, 503)["detail"]
        problem_in(await here.order(), 409)
        assert len(here.bodies) == 1


async def test_a_cancelled_request_may_be_retried_immediately() -> None:
    started = asyncio.Event()

    async def answer(request: Request) -> Response:
        if not started.is_set():
            started.set()
            await asyncio.Event().wait()
        return PlainTextResponse("done")

    async with shop(answer) as here:
        first = asyncio.create_task(here.order())
        await started.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await here.manager.close()
        assert (await here.order()).text == "done"
        assert len(here.bodies) == 2


async def test_a_key_used_within_its_own_request_fails_instead_of_waiting() -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(str((await here.order()).status_code))

    async with shop(answer, wait=timedelta(seconds=60)) as here:
        assert (await here.order()).text == "500"
        assert len(here.bodies) == 1


async def test_no_response_is_stored_if_result_caching_is_disabled() -> None:
    async with shop(config={"enable_result_caching": False}) as here:
        assert (await here.order()).status_code == 201
        assert "its response is not available" in problem_in(await here.order(), 409)["title"]
        [record] = [record async for record in here.store.scan("")]
        assert record.result is None
        assert len(here.bodies) == 1
