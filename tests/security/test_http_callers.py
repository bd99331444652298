"""HTTP: a caller never gets a response of another caller, and is never blocked by one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response

from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone, by_authorization
from integr8s_idem.records import Completion, Reserved
from tests.support.http_shop import Shop, problem_in, shop

pytestmark = pytest.mark.scenario(127, 129)


async def named(request: Request) -> Response:
    return PlainTextResponse(f"for {request.headers.get('x-name')}", headers={"Set-Cookie": "a=b", "X-Token": "t"})


async def records_expire(here: Shop) -> None:
    """Return once the store is empty; the record of a refusal expires after a millisecond."""
    async with asyncio.timeout(30):
        while [record async for record in here.store.scan("")]:  # noqa: ASYNC110  # an expiry is not an event
            await asyncio.sleep(0.01)


async def test_callers_without_authorization_are_not_one_caller() -> None:
    async with shop(named, identity=by_authorization) as here:
        for name in ("alice", "bob"):
            response = await here.order(headers={"X-Name": name})
            assert problem_in(response, 401)["title"] == "Authorization is missing"
            assert response.headers["www-authenticate"] == "Bearer"
        assert not here.bodies
        assert not here.store.calls


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_authorization_header_is_rejected_like_a_missing_one(value: str) -> None:
    connection = HTTPConnection({"type": "http", "headers": [(b"authorization", value.encode())]})
    with pytest.raises(HTTPException) as refused:
        by_authorization(connection)
    assert refused.value.status_code == 401


async def test_callers_without_authorization_share_keys_if_configured() -> None:
    async with shop(named, identity=by_authorization(anonymous="share")) as here:
        await here.order(headers={"X-Name": "alice"})
        assert (await here.order(headers={"X-Name": "bob"})).text == "for alice"
        assert (await here.order(headers={"X-Name": "ann", "Authorization": "Bearer ann"})).text == "for ann"


def test_an_unknown_option_for_anonymous_callers_is_rejected() -> None:
    with pytest.raises(ApplicationError, match="anonymous"):
        by_authorization(anonymous="shared")  # type: ignore[call-overload]


async def test_a_key_belongs_to_the_host_that_it_was_sent_to() -> None:
    async with shop(named, identity=anyone) as here:
        first = await here.order(path="http://one.example/orders", headers={"X-Name": "one"})
        other = await here.order(path="http://two.example/orders", headers={"X-Name": "two"})
        assert (first.text, other.text) == ("for one", "for two")
        assert len(here.bodies) == 2


@pytest.mark.parametrize("host", ["SHOP.example", "shop.example:80"])
async def test_different_spellings_of_a_host_share_keys(host: str) -> None:
    async with shop(named, identity=anyone) as here:
        await here.order(headers={"Host": "shop.example"})
        assert (await here.order(headers={"Host": host})).headers["idempotency-replayed"] == "true"
        assert "idempotency-replayed" not in (await here.order(headers={"Host": "shop.example:81"})).headers


async def test_hosts_share_keys_if_configured() -> None:
    async with shop(named, identity=anyone, share_hosts=True) as here:
        await here.order(headers={"Host": "one.example", "X-Name": "one"})
        assert (await here.order(headers={"Host": "two.example"})).text == "for one"


async def test_unstored_headers_are_added_to_the_defaults_in_any_case() -> None:
    async with shop(named, unstored_headers=["X-TOKEN"]) as here:
        assert (await here.order()).headers["x-token"] == "t"
        again = await here.order()
        assert again.headers["idempotency-replayed"] == "true"
        assert "x-token" not in again.headers
        assert "set-cookie" not in again.headers


async def test_unstored_headers_replace_the_defaults_if_configured() -> None:
    async with shop(named, unstored_headers=["X-Token"], replace_unstored_headers=True) as here:
        await here.order()
        again = await here.order()
        assert again.headers["set-cookie"] == "a=b"
        assert "x-token" not in again.headers


def test_one_string_is_not_accepted_as_a_collection_of_headers() -> None:
    options: Any = {"manager": object(), "identity": anyone, "unstored_headers": "X-Token"}
    with pytest.raises(ApplicationError, match=r"\['X-Token'\]"):
        IdempotencyKeyMiddleware(object(), **options)


@pytest.mark.parametrize("status", [401, 403, 404, 405, 409, 429])
@pytest.mark.parametrize("config", [{}, {"on_failure": "block"}], ids=["retry", "block"])
async def test_a_flood_of_refused_requests_leaves_no_records(status: int, config: dict[str, Any]) -> None:
    async def refuse(request: Request) -> Response:
        return Response(status_code=status)

    async with shop(refuse, config=config) as here:
        for number in range(20):
            headers = {"Idempotency-Key": f'"{number}"'}
            assert (await here.client.post("/orders", headers=headers)).status_code == status
        await records_expire(here)
        assert len(here.bodies) == 20


async def test_a_flood_of_unknown_paths_and_methods_leaves_no_records() -> None:
    async with shop(methods=["POST", "DELETE"]) as here:
        for number in range(20):
            headers = {"Idempotency-Key": f'"{number}"'}
            assert (await here.client.post(f"/unknown/{number}", headers=headers)).status_code == 404
            assert (await here.client.delete("/orders", headers=headers)).status_code == 405
        await records_expire(here)
        assert here.store.calls["complete"] == 40


async def test_404_is_stored_if_configured() -> None:
    async def missing(request: Request) -> Response:
        return Response(status_code=404)

    async with shop(missing, stored=lambda status: status < 500) as here:
        await here.order()
        assert (await here.order()).headers["idempotency-replayed"] == "true"
        assert len(here.bodies) == 1


async def test_a_duplicate_that_finds_the_record_of_a_refusal_can_be_retried() -> None:
    """The record would expire within a millisecond; the test keeps it."""

    async def refuse(request: Request) -> Response:
        return Response(status_code=404)

    async with shop(refuse) as here:
        await here.order()
        await records_expire(here)
        [reserved] = await here.store.inner.reserve(here.store.requests)
        assert isinstance(reserved, Reserved)
        await here.store.inner.complete([Completion(reservation=reserved, ttl=timedelta(hours=1))])
        response = await here.order()
        problem_in(response, 409)
        assert response.headers["retry-after"] == "1"


async def test_a_caller_with_too_many_open_requests_gets_429_and_others_are_served() -> None:
    entered, may_respond = asyncio.Semaphore(0), asyncio.Event()

    async def slow(request: Request) -> Response:
        entered.release()
        await may_respond.wait()
        return PlainTextResponse("done")

    async with shop(slow, max_open_keys=2) as here:

        async def ask(caller: str, number: int) -> Any:
            headers = {"Authorization": caller, "Idempotency-Key": f'"{number}"'}
            return await here.client.post("/orders", headers=headers)

        open_requests = [asyncio.create_task(ask("mallory", number)) for number in range(2)]
        for _ in open_requests:
            await entered.acquire()
        refused = await ask("mallory", 2)
        assert problem_in(refused, 429)["title"] == "Too many open requests"
        assert refused.headers["retry-after"] == "1"
        other = asyncio.create_task(ask("ann", 0))
        await entered.acquire()
        may_respond.set()
        assert [(await each).status_code for each in (*open_requests, other)] == [200] * 3
        assert (await ask("mallory", 2)).status_code == 200


async def test_requests_with_endless_bodies_count_as_open() -> None:
    waiting, sent = asyncio.Event(), list[Any]()

    async def receive() -> Any:
        waiting.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async with shop() as here:
        guarded = IdempotencyKeyMiddleware(object(), here.manager, identity=anyone, max_open_keys=1)
        headers = [(b"idempotency-key", b'"k"')]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
        first = asyncio.create_task(guarded(scope, receive, send))
        await waiting.wait()
        await guarded(scope, receive, send)
        assert sent[0]["status"] == 429
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not guarded._open_keys


@pytest.mark.parametrize("most", [0, -1])
def test_a_limit_that_allows_no_requests_is_rejected(most: int) -> None:
    options: Any = {"manager": object(), "identity": anyone, "max_open_keys": most}
    with pytest.raises(ApplicationError, match="max_open_keys"):
        IdempotencyKeyMiddleware(object(), **options)
