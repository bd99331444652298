"""`/metrics`, `/healthz` and `/readyz` of a worker process."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.listening import accept_no_more
from integr8s_idem.worker.health import Health

CLOSE_SECONDS: Final = 1
"""How long a scrape under way may go on at closing."""


class Endpoints:
    """Serves while its `async with` block runs, inside the running event loop.

    Args:
        host: Address to listen on.
        port: 0 takes a free one; see `port` for which.
        health: Asked at every probe, in the event loop: answers at once, from memory.
        registry: Whose metrics are served.

    Raises:
        SettingsError: On entering: the address cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, *, health: Callable[[], Health], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._app = _application(health, registry)

    @property
    def port(self) -> int:
        """The real port, once entered."""
        return self._port

    async def __aenter__(self) -> Endpoints:
        self._listener = await _listen(self._host, self._wanted_port)
        self._port: int = self._listener.getsockname()[1]
        self._server = _Server(_configuration(self._app))
        # Whoever connects before the task has begun is kept by the listening socket.
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="endpoints")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            self._server.abort()
            self._listener.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to its host."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # SIGTERM means that the worker drains, and its probes are answered until it is done.
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await accept_no_more(sockets or [])
        await super().shutdown(sockets)

    def abort(self) -> None:
        """Cut what outlived its time: a scraper that reads no more, or everything after a cancellation."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _QuietProtocol(H11Protocol):
    """HTTP without access log.  The server's own switch would silence all of the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False


def _configuration(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_QuietProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


async def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound here so that a failure can name the setting."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        what = f"{port} on {host} is taken by another process; choose another, or 0 for a free one"
    elif error.errno == errno.EACCES:
        what = f"{port} on {host} is not allowed to this user; choose one above 1023, or 0 for a free one"
    else:
        mistake = SettingsMistake("telemetry.metrics_host", f'cannot listen on "{host}": {error.strerror or error}')
        return SettingsError("settings", [mistake])
    return SettingsError("settings", [SettingsMistake("telemetry.metrics_port", what)])


def _application(health: Callable[[], Health], registry: CollectorRegistry) -> Starlette:
    def metrics(request: Request) -> Response:
        # A plain function runs in a thread: thousands of series take longer than a loop may stand.
        page, content_type = _page(registry, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        now = health()
        return _answer(now, good=now.live)

    async def readyz(request: Request) -> Response:
        now = health()
        return _answer(now, good=now.ready)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ]
    )


def _page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    # The client library's own choice of a format raises on versions that it cannot read.
    if "application/openmetrics-text" in accept:
        page: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _answer(health: Health, *, good: bool) -> Response:
    body = {
        "live": health.live,
        "ready": health.ready,
        "services": [asdict(service) for service in health.services],
    }
    return JSONResponse(body, status_code=200 if good else 503, headers={"cache-control": "no-store"})
