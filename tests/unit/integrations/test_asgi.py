"""The ASGI middleware for the `Idempotency-Key` header: retries, keys and failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.http_problems import Problems
from integr8s_idem.records import Completed, StoredResult
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.http_shop import KEY, problem_in, shop


async def test_a_retry_gets_the_stored_response_without_running_again() -> None:
    async with shop() as here:
        first, again = await here.order(), await here.order()

        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content == b'{"order":1}'
        assert again.headers["location"] == "/orders/1"
        assert again.headers["content-type"] == first.headers["content-type"]
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert len(here.bodies) == 1


async def test_client_specific_headers_are_not_replayed() -> None:
    async with shop() as here:
        assert (await here.order()).headers["set-cookie"] == "a=b"
        assert "set-cookie" not in (await here.order()).headers


@pytest.mark.parametrize(
    "value",
    [
        "",
        '""',
        "8e03978e",
        '"8e03978e',
        "'8e03978e'",
        '"a" "b"',
        '"a";x=1',
        '"ä"',
        '"' + "x" * 256 + '"',
        "?1",
        "1",
        ":YQ==:",
    ],
)
async def test_a_malformed_key_is_rejected(value: str) -> None:
    async with shop() as here:
        response = await here.client.post("/orders", headers=[(b"Idempotency-Key", value.encode("latin-1"))])
        assert problem_in(response, 400)["title"] == "Idempotency-Key is malformed"
        assert not here.bodies


async def test_two_keys_in_one_request_are_rejected() -> None:
    async with shop() as here:
        headers = [("Idempotency-Key", '"a"'), ("Idempotency-Key", '"b"')]
        problem_in(await here.client.post("/orders", headers=headers), 400)


async def test_a_missing_key_is_rejected_if_required() -> None:
    async with shop(required=True) as here:
        assert problem_in(await here.client.post("/orders"), 400)["title"] == "Idempotency-Key is missing"
        assert (await here.client.get("/orders")).status_code == 201
        assert len(here.bodies) == 1


async def test_requests_without_an_optional_key_run_every_time() -> None:
    async with shop() as here:
        await here.client.post("/orders")
        await here.client.post("/orders")
        assert len(here.bodies) == 2


@pytest.mark.parametrize(("value", "key"), [('"a b"', "a b"), (r'"a\"b\\c"', r'a"b\c'), (' "x" ', "x")])
async def test_a_key_is_a_string_of_rfc_8941(value: str, key: str) -> None:
    async with shop() as here:
        await here.client.post("/orders", headers={"Idempotency-Key": value})
        [record] = [record async for record in here.store.scan("")]
        assert record.key.endswith(f":{quote(key)}")


async def test_unquoted_keys_are_accepted_with_bare_keys() -> None:
    async with shop(bare_keys=True) as here:
        for _ in range(2):
            await here.client.post("/orders", headers={"Idempotency-Key": "8e03978e"})
        await here.client.post("/orders", headers={"Idempotency-Key": '"8e03978e"'})
        assert len(here.bodies) == 1


async def test_a_key_reused_with_another_payload_is_rejected() -> None:
    async with shop() as here:
        await here.order(b'{"amount": 1}')
        problem = problem_in(await here.order(b'{"amount": 2}'), 422)
        assert problem["title"] == "Idempotency-Key is already used"
        problem_in(await here.order(b'{"amount": 1}', path="/orders?x=1"), 422)
        assert len(here.bodies) == 1


async def test_a_retry_of_a_running_request_gets_409_with_retry_after() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with shop(slow) as here:
        first = asyncio.create_task(here.order())
        await started.wait()
        early = await here.order()
        problem_in(early, 409)
        assert early.headers["retry-after"] == "1"
        go_on.set()
        assert (await first).text == (await here.order()).text == "done"
        assert len(here.bodies) == 1


async def test_a_retry_waits_for_the_first_response_with_wait() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with shop(slow, wait=timedelta(seconds=60)) as here:
        first = asyncio.create_task(here.order())
        await started.wait()
        retry = asyncio.create_task(here.order())
        go_on.set()
        assert (await first).text == (await retry).text == "done"
        assert len(here.bodies) == 1


async def test_keys_are_bound_to_caller_method_and_path() -> None:
    async with shop() as here:
        await here.order()
        await here.order(headers={"Authorization": "Bearer other"})
        await here.order(path="/orders/1/refund")
        await here.client.patch("/orders", content=b"{}", headers=KEY)
        assert len(here.bodies) == 4
        await here.order(headers={"Authorization": "Bearer other"})
        assert len(here.bodies) == 4


async def test_the_identity_function_identifies_the_caller() -> None:
    async def user_of(connection: HTTPConnection) -> str:
        return connection.headers["x-user"]

    async with shop(identity=user_of) as here:
        await here.order(headers={"X-User": "ada", "Authorization": "Bearer 1"})
        await here.order(headers={"X-User": "ada", "Authorization": "Bearer 2"})
        await here.order(headers={"X-User": "bob", "Authorization": "Bearer 1"})
        assert len(here.bodies) == 2


@pytest.mark.parametrize(
    ("status", "runs"),
    [
        (200, 1),
        (204, 1),
        (302, 1),
        (400, 1),
        (410, 1),
        (422, 1),
        (401, 2),
        (403, 2),
        (404, 2),
        (405, 2),
        (408, 2),
        (409, 2),
        (429, 2),
        (500, 2),
        (503, 2),
    ],
)
async def test_final_statuses_are_stored_and_transient_errors_are_not(status: int, runs: int) -> None:
    async def answer(request: Request) -> Response:
        return Response(status_code=status)

    async with shop(answer) as here:
        assert (await here.order()).status_code == (await here.order()).status_code == status
        assert len(here.bodies) == runs


async def test_the_stored_option_selects_the_statuses_to_store() -> None:
    async def answer(request: Request) -> Response:
        return Response(status_code=500)

    async with shop(answer, stored=lambda _: True) as here:
        await here.order()
        assert (await here.order()).headers["idempotency-replayed"] == "true"
        assert len(here.bodies) == 1


async def test_a_failing_request_may_be_retried_without_limit() -> None:
    async def answer(request: Request) -> Response:
        if len(here.bodies) < 10:
            raise RuntimeError("no")
        return PlainTextResponse("done")

    async with shop(answer, config={"max_attempts": 3}) as here:
        assert [(await here.order()).status_code for _ in range(9)] == [500] * 9
        assert (await here.order()).text == "done"


async def test_a_request_body_arrives_whole_and_a_longer_one_is_rejected() -> None:
    async with shop(max_request_bytes=1000) as here:
        await here.order(b"x" * 1000)
        assert here.bodies == [b"x" * 1000]
        problem_in(await here.order(b"x" * 1001), 413)


async def test_a_response_too_large_to_store_still_prevents_a_second_run() -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse("x" * 2000)

    async with shop(answer, config={"max_result_size_bytes": 1000}) as here:
        assert (await here.order()).text == "x" * 2000
        assert "its response is not available" in problem_in(await here.order(), 409)["title"]
        assert len(here.bodies) == 1


async def test_a_streaming_response_is_passed_through_and_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        yield "b"

    async def answer(request: Request) -> Response:
        return StreamingResponse(parts())

    async with shop(answer) as here:
        with caplog.at_level(logging.WARNING):
            assert (await here.order()).text == "ab"
        assert "was not stored, so a retry runs again: it streams" in caplog.text
        assert (await here.order()).text == "ab"
        assert len(here.bodies) == 2


async def test_a_response_in_parts_with_a_content_length_is_stored() -> None:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        yield "b"

    async def answer(request: Request) -> Response:
        return StreamingResponse(parts(), headers={"content-length": "2"})

    async with shop(answer) as here:
        assert (await here.order()).text == (await here.order()).text == "ab"
        assert len(here.bodies) == 1


async def test_the_response_is_sent_after_it_is_stored() -> None:
    async with shop() as here:
        here.store.held["complete"] = asyncio.Event()
        first = asyncio.create_task(here.order())
        while not here.store.calls["complete"]:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
        assert not first.done()
        here.store.held["complete"].set()
        assert (await first).status_code == 201


async def test_requests_get_503_while_the_store_is_down() -> None:
    async with shop() as here:
        here.store.down = {"reserve"}
        response = await here.order()
        assert "was not processed" in problem_in(response, 503)["detail"]
        assert response.headers["retry-after"] == "1"
        assert not here.bodies
        here.store.down = set()
        assert (await here.order()).status_code == 201


async def test_the_response_is_sent_even_if_it_cannot_be_stored() -> None:
    async with shop(config={"processing_timeout_seconds": 0.3, "default_ttl_seconds": 60}) as here:
        here.store.down = {"complete"}
        assert (await here.order()).status_code == 201


async def test_only_the_given_paths_are_guarded() -> None:
    async with shop(paths=["/orders/{order}/refund"], required=True) as here:
        assert (await here.client.post("/orders")).status_code == 201
        assert (await here.client.post("/orders/7/refund")).status_code == 400


async def test_a_middleware_inside_dishkas_middleware_is_rejected() -> None:
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")

    async def never(*_: object) -> None:
        raise AssertionError

    middleware = IdempotencyKeyMiddleware(never, manager, identity=anyone)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"dishka_container": object()}}
    with pytest.raises(ApplicationError, match=r"after setup_dishka\(container, app\)"):
        await middleware(scope, never, never)


async def test_a_client_that_disconnects_while_sending_reserves_nothing() -> None:
    store = FlakyStore(MemoryIdempotencyRepository())
    manager = IdempotencyManager(repository=store, scope="shop")

    async def never(*_: object) -> None:
        raise AssertionError

    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    headers = [(b"idempotency-key", b'"a"')]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    await IdempotencyKeyMiddleware(never, manager, identity=anyone)(scope, receive, never)
    assert not store.calls


def test_an_unreadable_stored_response_is_logged_and_the_request_not_run_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = Completed(key="k", attempt=1, completed_at=datetime.now(UTC), result=StoredResult(b"{}"))
    assert Problems().for_outcome(done).status == 409
    assert "the response stored for k cannot be read" in caplog.text


def test_the_middleware_needs_a_manager_or_a_container() -> None:
    with pytest.raises(ApplicationError, match="needs either a manager or a container"):
        IdempotencyKeyMiddleware(Starlette(), identity=anyone)


async def test_a_thousand_requests_with_fifty_keys_run_fifty_times() -> None:
    async def answer(request: Request) -> Response:
        await asyncio.sleep(0.01)
        return PlainTextResponse(request.headers["idempotency-key"])

    async with shop(answer, wait=timedelta(seconds=60)) as here:
        keys = [f'"{number % 50}"' for number in range(1000)]
        asked = (here.client.post("/orders", headers={"Idempotency-Key": key}) for key in keys)
        responses = await asyncio.gather(*asked)
        assert [response.text for response in responses] == keys
        assert len(here.bodies) == 50
