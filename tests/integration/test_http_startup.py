"""An incomplete middleware configuration fails the startup of the application, not each request."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from dishka import AsyncContainer, Provider, Scope, make_async_container
from fastapi import FastAPI
from litestar import Litestar
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from tests.support.conditions import eventually
from tests.support.http_server import client_of

FOLDER = Path(__file__).parents[2]
KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
GUARD: Any = IdempotencyKeyMiddleware
"""`Any`, so that tests can omit required arguments."""


def _manager() -> IdempotencyManager:
    return IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")


def _without_manager() -> AsyncContainer:
    return make_async_container()


def _failing() -> AsyncContainer:
    def connect() -> IdempotencyManager:
        raise ConnectionError("the vault is sealed")

    provider = Provider(scope=Scope.APP)
    provider.provide(connect)
    return make_async_container(provider)


def _full() -> AsyncContainer:
    provider = Provider(scope=Scope.APP)
    provider.provide(_manager)
    return make_async_container(provider)


SHORT = timedelta(milliseconds=1)
BY_ARGUMENTS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"manager": _manager()}, "identity"),
    (lambda: {"manager": _manager(), "identity": None}, "needs an identity"),
    (lambda: {"identity": anyone}, "needs either a manager"),
    (
        lambda: {"identity": anyone, "manager": _manager(), "container": _full()},
        "needs either a manager",
    ),
    (lambda: {"identity": anyone, "manager": _manager(), "unknown_option": True}, "unknown_option"),
    (lambda: {"identity": anyone, "manager": _manager(), "ttl": SHORT}, "shorter than the lease"),
]
BY_CONTAINER: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"identity": anyone, "container": _without_manager()}, "IdempotencyManager"),
    (lambda: {"identity": anyone, "container": _failing()}, "the vault is sealed"),
    (lambda: {"identity": anyone, "container": _full(), "ttl": SHORT}, "shorter than the lease"),
]


class Life:
    """Records the lifespan events of an application."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @asynccontextmanager
    async def span(self, _: Any) -> AsyncIterator[None]:
        self.seen.append("opened")
        yield
        self.seen.append("closed")


async def _answer(request: Request) -> Response:
    return JSONResponse("done")


def _fastapi(life: Life, **options: Any) -> Any:
    app = FastAPI(lifespan=life.span)
    app.add_route("/", _answer, methods=["POST"])
    app.add_middleware(GUARD, **options)
    return app


def _starlette(life: Life, **options: Any) -> Any:
    return Starlette(
        routes=[Route("/", _answer, methods=["POST"])], lifespan=life.span, middleware=[Middleware(GUARD, **options)]
    )


def _within_others(life: Life, **options: Any) -> Any:
    app = _starlette(life, **options)
    app.add_middleware(GUARD, manager=_manager(), identity=anyone, paths=["/others"])
    app.user_middleware.append(Middleware(GUARD, manager=_manager(), identity=anyone, paths=["/others"]))
    return app


APPLICATIONS = [_fastapi, _starlette, _within_others]


async def _served(app: Any, **options: Any) -> uvicorn.Server:
    """Start a server that refuses to serve, and return it."""
    config = uvicorn.Config(app, port=0, ws="none", log_config=None, **options)
    server = uvicorn.Server(config)
    async with asyncio.timeout(10):
        with suppress(SystemExit):
            await server._serve()  # unlike `serve`, installs no signal handlers
    return server


@pytest.mark.parametrize("make", APPLICATIONS)
@pytest.mark.parametrize("lifespan", ["auto", "on"])
@pytest.mark.parametrize(("options", "error"), [*BY_ARGUMENTS, *BY_CONTAINER])
async def test_the_server_exits_with_a_clear_error(
    make: Any, lifespan: Any, options: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        server = await _served(make(Life(), **options()), lifespan=lifespan)

    assert not server.started
    assert server.lifespan.should_exit
    assert error in caplog.text


@pytest.mark.parametrize("make", APPLICATIONS)
@pytest.mark.parametrize(("options", "error"), [*BY_ARGUMENTS, *BY_CONTAINER])
async def test_without_a_lifespan_a_request_fails_with_the_same_error(
    make: Any, options: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life()
    async with client_of(make(life, **options()), lifespan="off") as client:
        for _ in range(2):
            assert (await client.post("/", headers=KEY)).status_code == 500
    assert error in caplog.text
    assert life.seen == []


@pytest.mark.parametrize(("options", "error"), [*BY_ARGUMENTS, *BY_CONTAINER])
async def test_a_failed_startup_is_sent_to_the_lifespan_and_raised(options: Any, error: str) -> None:
    """Test clients run the lifespan themselves."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ApplicationError, match=error):
        await _starlette(Life(), **options())({"type": "lifespan", "state": {}}, receive, send)
    [message] = sent
    assert message["type"] == "lifespan.startup.failed"
    assert error in message["message"]


@pytest.mark.parametrize(("options", "error"), BY_CONTAINER)
async def test_the_lifespan_of_the_application_is_closed_after_the_error(options: Any, error: str) -> None:
    life = Life()
    await _served(_starlette(life, **options()))
    assert life.seen == ["opened", "closed"]


async def test_an_error_while_closing_does_not_hide_the_startup_error(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def span(_: Any) -> AsyncIterator[None]:
        yield
        raise OSError("not closed")

    life = Life()
    life.span = span  # type: ignore[method-assign]
    server = await _served(_starlette(life, identity=anyone, container=_without_manager()))
    assert server.lifespan.should_exit
    assert "cannot provide a manager" in caplog.text
    await eventually(lambda: "not closed" in caplog.text)


async def test_the_container_is_used_after_the_startup_of_the_application() -> None:
    filled: list[IdempotencyManager] = []
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: filled[0], provides=IdempotencyManager)

    @asynccontextmanager
    async def span(_: Any) -> AsyncIterator[None]:
        filled.append(_manager())
        yield

    life = Life()
    life.span = span  # type: ignore[method-assign]
    async with client_of(_starlette(life, identity=anyone, container=make_async_container(provider))) as client:
        assert (await client.post("/", headers=KEY)).status_code == 200
        assert (await client.post("/", headers=KEY)).headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("make", APPLICATIONS)
async def test_an_application_with_a_container_starts_and_stops(make: Any) -> None:
    life = Life()
    async with client_of(make(life, identity=anyone, container=_full()), lifespan="on") as client:
        assert (await client.post("/", headers=KEY)).status_code == 200
        assert life.seen == ["opened"]
    assert life.seen == ["opened", "closed"]


@pytest.mark.parametrize(("options", "error"), BY_ARGUMENTS)
async def test_without_a_lifespan_the_constructor_raises_the_error(options: Any, error: str) -> None:
    """Also in a running event loop, in which uvicorn imports an application."""
    routes = [Route("/", _answer, methods=["POST"])]
    raises_error = pytest.raises((ApplicationError, TypeError), match=error)
    with raises_error:
        GUARD(Starlette(), **options())
    with raises_error:
        Route("/", _answer, middleware=[Middleware(GUARD, **options())])
    with raises_error:
        Mount("/v1", routes=routes, middleware=[Middleware(GUARD, **options())])
    with raises_error:
        Litestar(middleware=[DefineMiddleware(GUARD, **options())], logging_config=None)


def test_the_command_uvicorn_exits_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from fastapi import FastAPI\n"
        "from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository\n"
        "from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware\n"
        "app = FastAPI()\n"
        "manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope='shop')\n"
        "app.add_middleware(IdempotencyKeyMiddleware, manager=manager)\n"
    )
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", "0", "--app-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert "missing 1 required keyword-only argument: 'identity'" in ended.stderr
    assert "identity=user_of" in ended.stderr
    assert "Application startup failed. Exiting." in ended.stderr
