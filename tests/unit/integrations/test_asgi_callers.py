"""The ASGI middleware separates callers, hosts and paths."""

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
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone, by_authorization, key_of_request
from tests.support.http_shop import KEY, problem_in, shop


def x_user(connection: HTTPConnection) -> str:
    return connection.headers.get("x-user", "")


def _connection(*headers: tuple[str, str]) -> HTTPConnection:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return HTTPConnection({"type": "http", "headers": encoded})


async def test_no_caller_gets_the_response_of_another() -> None:
    async def secret(request: Request) -> Response:
        return PlainTextResponse(f"for {request.headers['x-user']} alone")

    async with shop(secret, identity=x_user) as here:
        await here.order(headers={"X-User": "ada"})
        for user in ("bob", "", "ADA", "ada ", "ada:POST", "ada%3A", "a:da", "ad\u0430".encode().decode("latin-1")):
            response = await here.client.post(
                "/orders", content=b"{}", headers=[(b"x-user", user.encode("latin-1")), _KEY]
            )
            # Servers strip whitespace around header values, so this is the same caller.
            if user.strip() != "ada":
                assert "idempotency-replayed" not in response.headers, user
                assert "for ada alone" not in response.text, user


_KEY = (b"idempotency-key", KEY["Idempotency-Key"].encode())


async def test_a_caller_named_dash_is_not_the_anonymous_caller() -> None:
    async with shop(identity=x_user) as here:
        await here.order(headers={"X-User": "-"})
        await here.order()
        assert len(here.bodies) == 2


async def test_caller_path_and_key_are_delimited() -> None:
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
def test_by_authorization_uses_all_authorization_headers(one: Any, other: Any) -> None:
    identity = by_authorization(anonymous="share")
    assert identity(_connection(*one)) != identity(_connection(*other))


def test_keys_do_not_contain_credentials() -> None:
    assert "s3cret" not in by_authorization(_connection(("authorization", "Bearer s3cret")))


def test_identity_is_a_required_argument() -> None:
    with pytest.raises(TypeError, match="identity"):
        IdempotencyKeyMiddleware(Starlette(), object())  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("caller", [None, 17, b"ada"])
async def test_an_identity_that_is_not_a_string_is_an_application_error(caller: Any) -> None:
    async with shop(identity=lambda _: caller) as here:
        assert (await here.order()).status_code == 500
        assert not here.bodies
        assert not here.store.calls


async def test_identity_may_reject_a_request_with_an_http_exception() -> None:
    async def user_of(connection: HTTPConnection) -> str:
        raise HTTPException(401, "no such token", {"WWW-Authenticate": "Bearer"})

    async with shop(identity=user_of) as here:
        response = await here.order()
        assert problem_in(response, 401)["title"] == "no such token"
        assert response.headers["www-authenticate"] == "Bearer"
        assert not here.store.calls


async def test_nothing_runs_if_identity_raises() -> None:
    def user_of(connection: HTTPConnection) -> str:
        raise RuntimeError("the directory of users is down")

    async with shop(identity=user_of) as here:
        assert (await here.order()).status_code == 500
        assert not here.bodies
        assert not here.store.calls


async def test_the_caller_is_identified_before_the_body_is_read() -> None:
    def user_of(connection: HTTPConnection) -> str:
        raise HTTPException(401)

    async def never(*_: object) -> None:
        raise AssertionError

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [_KEY], "query_string": b""}
    await IdempotencyKeyMiddleware(never, manager, identity=user_of)(scope, never, send)
    assert messages[0]["status"] == 401


async def test_reordered_query_parameters_are_another_request() -> None:
    async with shop() as here:
        await here.order(path="/orders?a=1&b=2")
        problem_in(await here.order(path="/orders?b=2&a=1"), 422)


async def test_keys_use_the_decoded_path() -> None:
    async with shop() as here:
        await here.order(path="/orders/a%20b/refund")
        await here.order(path="/%6Frders/a%20b/refund")
        assert len(here.bodies) == 1
        for other in ("ä", "%E4", "a%2520b", "%C3%A4%00"):
            assert "idempotency-replayed" not in (await here.order(path=f"/orders/{other}/refund")).headers


@pytest.mark.parametrize("path", ["/orders", "/orders/", "//orders", "/orders//", "/%6Frders"])
async def test_alternative_spellings_of_a_path_still_require_a_key(path: str) -> None:
    async with shop(paths=["/orders"], required=True) as here:
        problem_in(await here.client.post(f"http://shop{path}"), 400)
        assert not here.bodies


@pytest.mark.parametrize("path", ["/order", "/orders/1", "/x/orders", "/ordersx"])
async def test_similar_paths_are_not_guarded(path: str) -> None:
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


async def _post(app: Any, path: str, root: str = "") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root), base_url="http://shop") as client:
        return await client.post(path, headers=KEY)


def _manager() -> IdempotencyManager:
    return IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")


async def test_mounted_applications_have_separate_keys() -> None:
    app = _mounted(None, _manager(), paths=["/orders"])
    for path in ("/one/orders", "/two/orders"):
        first, again = await _post(app, path), await _post(app, path)
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert first.text == again.text == path.removesuffix("/orders")


async def test_an_application_and_its_mounted_application_may_both_be_guarded() -> None:
    manager = _manager()
    app = _mounted(manager, manager.in_scope("mounted"))
    assert (await _post(app, "/one/orders")).text == "/one"
    assert (await _post(app, "/one/orders")).headers.get_list("idempotency-replayed") == ["true"]


@pytest.mark.parametrize(("path", "root"), [("/api/orders", "/api"), ("/orders", "/api")])
async def test_paths_match_with_and_without_a_proxy_prefix(path: str, root: str) -> None:
    app = IdempotencyKeyMiddleware(_mounted(None, None), _manager(), identity=anyone, required=True, paths=["/orders"])
    assert (await _post(app, path, root)).status_code == 200
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root), base_url="http://shop") as client:
        response = await client.post(path)
    assert response.status_code == 400


async def test_the_root_path_differs_from_a_route_of_the_same_name() -> None:
    manager, seen = _manager(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await PlainTextResponse("done")(scope, receive, send)

    guarded = IdempotencyKeyMiddleware(app, manager, identity=anyone)
    await _post(guarded, "/api", root="/api")
    await _post(guarded, "/api/api", root="/api")
    assert seen == ["/api", "/api/api"]


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_messages_other_than_requests_pass_unchanged(kind: str) -> None:
    seen: list[object] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    scope, receive, send = {"type": kind}, object(), object()
    guarded = IdempotencyKeyMiddleware(app, _manager(), identity=anyone, required=True)
    await guarded(scope, receive, send)
    assert seen == [scope, receive, send]


async def test_a_proxy_that_strips_its_prefix_does_not_change_the_key() -> None:
    manager = _manager()
    app = IdempotencyKeyMiddleware(_mounted(None, None), manager, identity=anyone)
    assert "idempotency-replayed" not in (await _post(app, "/api/orders", "/api")).headers
    assert (await _post(app, "/orders", "/api")).headers["idempotency-replayed"] == "true"


def test_different_callers_paths_and_keys_never_share_a_record() -> None:
    manager = _manager()
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

    def record(caller: str, path: str, key: str) -> str:
        return manager.space.full(manager.space.key(key_of_request(caller, "shop", "POST", f"/{path}", key)))

    combinations = list(itertools.product(parts, repeat=3))
    assert len({record(*each) for each in combinations}) == len(combinations)
