"""Whose key it is: what one caller got, no other one gets, and no way of writing a path gets round the guard."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone, by_authorization
from tests.support.http_shop import KEY, problem_in, shop


def x_user(connection: HTTPConnection) -> str:
    return connection.headers.get("x-user", "")


def _connection(*headers: tuple[str, str]) -> HTTPConnection:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return HTTPConnection({"type": "http", "headers": encoded})


async def test_what_one_caller_got_no_other_one_gets_whatever_he_sends() -> None:
    async def secret(request: Request) -> Response:
        return PlainTextResponse(f"for {request.headers['x-user']} alone")

    async with shop(secret, identity=x_user) as here:
        await here.order(headers={"X-User": "ada"})
        for user in ("bob", "", "ADA", "ada ", "ada:POST", "ada%3A", "a:da", "ad\u0430".encode().decode("latin-1")):
            told = await here.client.post("/orders", content=b"{}", headers=[(b"x-user", user.encode("latin-1")), _KEY])
            # A server strips what surrounds a value: to HTTP, that is the same caller.
            if user.strip() != "ada":
                assert "idempotency-replayed" not in told.headers, user
                assert "for ada alone" not in told.text, user


_KEY = (b"idempotency-key", KEY["Idempotency-Key"].encode())


async def test_a_caller_whose_name_is_a_dash_is_not_the_one_without_a_name() -> None:
    async with shop(identity=x_user) as here:
        await here.order(headers={"X-User": "-"})
        await here.order()
        assert len(here.bodies) == 2


async def test_key_path_and_name_do_not_run_into_each_other() -> None:
    async with shop(identity=x_user) as here:
        for user, path in (("a", "/orders/b/refund"), ("a:POST:/orders/b/refund", "/orders"), ("a:POST", "/orders")):
            await here.order(path=path, headers={"X-User": user})
        assert len(here.bodies) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([("authorization", "a")], [("authorization", "b")]),
        ([("authorization", "a")], []),
        ([("authorization", "a"), ("authorization", "b")], [("authorization", "a")]),
        ([("authorization", "a"), ("authorization", "b")], [("authorization", "a, b")]),
    ],
)
def test_by_authorization_every_such_header_counts(one: Any, other: Any) -> None:
    identity = by_authorization(anonymous="share")
    assert identity(_connection(*one)) != identity(_connection(*other))


def test_no_credential_is_in_a_key() -> None:
    assert "s3cret" not in by_authorization(_connection(("authorization", "Bearer s3cret")))


def test_who_asks_has_to_be_said() -> None:
    with pytest.raises(TypeError, match="identity"):
        IdempotencyKeyMiddleware(Starlette(), object())  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("told", [None, 17, b"ada"])
async def test_an_identity_that_is_no_string_is_a_mistake_of_the_application(told: Any) -> None:
    async with shop(identity=lambda _: told) as here:
        assert (await here.order()).status_code == 500
        assert not here.bodies
        assert not here.store.calls


async def test_identity_may_refuse_and_its_refusal_is_the_answer() -> None:
    async def user_of(connection: HTTPConnection) -> str:
        raise HTTPException(401, "no such token", {"WWW-Authenticate": "Bearer"})

    async with shop(identity=user_of) as here:
        response = await here.order()
        assert problem_in(response, 401)["title"] == "no such token"
        assert response.headers["www-authenticate"] == "Bearer"
        assert not here.store.calls


async def test_an_identity_that_fails_has_done_nothing() -> None:
    def user_of(connection: HTTPConnection) -> str:
        raise RuntimeError("the directory of users is down")

    async with shop(identity=user_of) as here:
        assert (await here.order()).status_code == 500
        assert not here.bodies
        assert not here.store.calls


async def test_who_asks_is_asked_before_a_body_is_held_in_memory() -> None:
    def user_of(connection: HTTPConnection) -> str:
        raise HTTPException(401)

    async def never(*_: object) -> None:
        raise AssertionError

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [_KEY], "query_string": b""}
    await IdempotencyKeyMiddleware(never, manager, identity=user_of)(scope, never, send)
    assert told[0]["status"] == 401


async def test_one_key_at_two_orders_of_a_query_is_not_guessed_to_be_one_request() -> None:
    async with shop() as here:
        await here.order(path="/orders?a=1&b=2")
        problem_in(await here.order(path="/orders?b=2&a=1"), 422)


async def test_a_path_is_what_the_application_sees_however_it_was_encoded() -> None:
    async with shop() as here:
        await here.order(path="/orders/a%20b/refund")
        await here.order(path="/%6Frders/a%20b/refund")
        assert len(here.bodies) == 1
        for other in ("ä", "%E4", "a%2520b", "%C3%A4%00"):
            assert "idempotency-replayed" not in (await here.order(path=f"/orders/{other}/refund")).headers


@pytest.mark.parametrize("path", ["/orders", "/orders/", "//orders", "/orders//", "/%6Frders"])
async def test_no_way_of_writing_a_path_gets_round_a_key_that_is_required(path: str) -> None:
    async with shop(paths=["/orders"], required=True) as here:
        problem_in(await here.client.post(f"http://shop{path}"), 400)
        assert not here.bodies


@pytest.mark.parametrize("path", ["/order", "/orders/1", "/x/orders", "/ordersx"])
async def test_another_path_is_not_guarded_by_likeness(path: str) -> None:
    async with shop(paths=["/orders"], required=True) as here:
        assert (await here.client.post(path)).status_code == 404


def _mounted(outer: IdempotencyManager | None, inner: IdempotencyManager | None, **options: Any) -> Starlette:
    async def done(request: Request) -> Response:
        return PlainTextResponse(request.scope["root_path"])

    def guard(manager: IdempotencyManager | None) -> list[Middleware]:
        given = {"identity": anyone, "required": True, **options}
        return [Middleware(IdempotencyKeyMiddleware, manager=manager, **given)] if manager else []

    routes = [Route("/orders", done, methods=["POST"])]
    shops = [Mount(f"/{name}", app=Starlette(routes=routes, middleware=guard(inner))) for name in ("one", "two")]
    return Starlette(routes=[*shops, *routes], middleware=guard(outer))


async def _asked(app: Any, path: str, root: str = "") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root), base_url="http://shop") as client:
        return await client.post(path, headers=KEY)


def _manager() -> IdempotencyManager:
    return IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")


async def test_the_paths_of_an_application_that_is_mounted_are_its_own() -> None:
    app = _mounted(None, _manager(), paths=["/orders"])
    for path in ("/one/orders", "/two/orders"):
        first, again = await _asked(app, path), await _asked(app, path)
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert first.text == again.text == path.removesuffix("/orders")


async def test_an_application_and_one_that_is_mounted_in_it_may_both_be_guarded() -> None:
    manager = _manager()
    app = _mounted(manager, manager.in_scope("mounted"))
    assert (await _asked(app, "/one/orders")).text == "/one"
    assert (await _asked(app, "/one/orders")).headers.get_list("idempotency-replayed") == ["true"]


@pytest.mark.parametrize(("path", "root"), [("/api/orders", "/api"), ("/orders", "/api")])
async def test_behind_a_proxy_paths_are_found_with_and_without_its_prefix(path: str, root: str) -> None:
    app = IdempotencyKeyMiddleware(_mounted(None, None), _manager(), identity=anyone, required=True, paths=["/orders"])
    assert (await _asked(app, path, root)).status_code == 200
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root), base_url="http://shop") as client:
        problem_in_plain = await client.post(path)
    assert problem_in_plain.status_code == 400


async def test_the_root_of_an_application_is_not_the_path_of_the_same_name_in_it() -> None:
    manager, seen = _manager(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await PlainTextResponse("done")(scope, receive, send)

    guarded = IdempotencyKeyMiddleware(app, manager, identity=anyone)
    await _asked(guarded, "/api", root="/api")
    await _asked(guarded, "/api/api", root="/api")
    assert seen == ["/api", "/api/api"]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_what_is_no_request_goes_through_untouched(kind: str) -> None:
    seen: list[object] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    scope, receive, send = {"type": kind}, object(), object()
    guarded = IdempotencyKeyMiddleware(app, _manager(), identity=anyone, required=True)
    await guarded(scope, receive, send)
    assert seen == [scope, receive, send]


async def test_a_key_is_the_same_before_and_behind_a_proxy_that_takes_its_prefix_away() -> None:
    manager = _manager()
    app = IdempotencyKeyMiddleware(_mounted(None, None), manager, identity=anyone)
    assert "idempotency-replayed" not in (await _asked(app, "/api/orders", "/api")).headers
    assert (await _asked(app, "/orders", "/api")).headers["idempotency-replayed"] == "true"


def test_no_two_of_caller_path_and_key_make_one_record() -> None:
    manager = _manager()
    guarded = IdempotencyKeyMiddleware(Starlette(), manager, identity=anyone)
    parts = [
        "",
        "a",
        "a:a",
        "a:",
        ":a",
        ":",
        "a:POST:/a",
        "a:POST:/a:a",
        "%3A",
        "a%3Aa",
        "-",
        "a/a",
        "é",
        "\u0430",
        "#a",
    ]

    def record(who: str, path: str, key: str) -> str:
        scope = {"type": "http", "method": "POST", "path": f"/{path}", "headers": [], "query_string": b""}
        return manager.space.full(guarded._work(manager, HTTPConnection(scope), who, key, b"").key)

    asked = list(itertools.product(parts, repeat=3))
    assert len({record(*parts) for parts in asked}) == len(asked)
