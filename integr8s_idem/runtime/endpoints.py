"""The HTTP endpoints `/metrics`, `/healthz` and `/readyz` of a worker process."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, TypeAlias

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from integr8s_idem._util.tcp_server import Acceptor, Connections
from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.worker.health import Health

CLOSE_SECONDS: Final = 1
"""Maximum wait for running requests at shutdown."""

REQUEST_SECONDS: Final = 5
"""Maximum time for a client to send a request line and headers, after it has connected or read a response."""

RESPONSE_SECONDS: Final = 60
"""Maximum time of a response, until the client has read it."""

MOST_CONNECTIONS: Final = 100
"""Maximum open connections; one more closes the oldest one without a request, or else the oldest one."""

_BACKLOG: Final = 4_096
"""Maximum connections that wait to be accepted; the operating system may allow fewer."""

Refresh: TypeAlias = Callable[[str], Awaitable[None]]


async def _is_current(path: str) -> None:
    """Do nothing: health and metrics of this process are always current."""


class Endpoints:
    """Serves the endpoints within an `async with` block, in the running event loop.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 selects a free one, which the property `port` returns.
        health: Called in the event loop for every probe; must not block.
        registry: Collector of the metrics.
        refresh: Awaited before each answer, with its path, to update what `health` and `registry` return.

    Raises:
        SettingsError: At the start of the block: cannot listen on the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        health: Callable[[], Health],
        registry: CollectorRegistry = REGISTRY,
        refresh: Refresh | None = None,
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._app = _application(health, registry, refresh or _is_current)

    @property
    def port(self) -> int:
        """The actual port, within the block."""
        return self._port

    async def __aenter__(self) -> Endpoints:
        self._listener = await _listen(self._host, self._wanted_port)
        self._port: int = self._listener.getsockname()[1]
        self._server = _Server(_configuration(self._app))
        # Clients that connect before the task starts wait in the backlog of the socket.
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="endpoints")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        try:
            await self._serving
        finally:
            await self._server.abort()
            self._listener.close()


class _Server(uvicorn.Server):
    """A server that does not handle signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []
        self._open = Connections(MOST_CONNECTIONS)
        self._acceptors: list[Acceptor] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # After SIGTERM the worker drains, and probes are answered until it has ended.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or []:
            acceptor = Acceptor(listening, self._protocol, self._open, "the port of /metrics and /healthz")
            acceptor.start()
            self._acceptors.append(acceptor)
        self.started = True

    def _protocol(self) -> _BoundedProtocol:
        return _BoundedProtocol(self.config, self.server_state, {}, open_connections=self._open)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._accept_no_more()
        await super().shutdown(sockets)

    async def abort(self) -> None:
        """Abort the remaining connections, for example of a scraper that does not read its response."""
        await self._accept_no_more()
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _accept_no_more(self) -> None:
        while self._acceptors:
            await self._acceptors.pop().stop()


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.setLevel(logging.ERROR)  # uvicorn logs a warning for each malformed request, which any client can send


class _BoundedProtocol(H11Protocol):
    """HTTP with limits on time and connections, and without an access log.

    uvicorn's option for the access log would disable it for the whole process.
    """

    def __init__(self, *args: Any, open_connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False
        self.logger = _http_logger
        self._open_connections = open_connections
        self._limit: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no request in progress."""
        cycle: RequestResponseCycle | None = self.cycle  # annotated in uvicorn as never `None`
        return cycle is None or cycle.response_complete

    def abort(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_connections.add(self)
        self._limit_to(REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._open_connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_waiting = self.is_waiting
        super().data_received(data)
        if was_waiting and not self.is_waiting:
            self._limit_to(RESPONSE_SECONDS)

    def on_response_complete(self) -> None:
        is_read = self.transport.get_write_buffer_size() == 0
        self._limit_to(REQUEST_SECONDS if is_read else RESPONSE_SECONDS)
        super().on_response_complete()
        if not self.is_waiting:  # the next request had already arrived
            self._limit_to(RESPONSE_SECONDS)

    def _limit_to(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.abort)


def _configuration(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


async def _listen(host: str, port: int) -> socket.socket:
    """Create a listening socket here, so that errors can name the setting."""
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
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        what = f"{port} on {host} is already in use; choose another port, or 0 for a free one"
    elif error.errno == errno.EACCES:
        what = f"{port} on {host} is not permitted for this user; choose a port above 1023, or 0 for a free one"
    else:
        mistake = SettingsMistake("telemetry.metrics_host", f'cannot listen on "{host}": {error.strerror or error}')
        return SettingsError("settings", [mistake])
    return SettingsError("settings", [SettingsMistake("telemetry.metrics_port", what)])


def _application(health: Callable[[], Health], registry: CollectorRegistry, refresh: Refresh) -> Starlette:
    async def metrics(request: Request) -> Response:
        await refresh("/metrics")
        # In a thread: thousands of series would block the event loop too long.
        page, content_type = await run_in_threadpool(_page, registry, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        await refresh("/healthz")
        now = health()
        return _answer(now, good=now.live)

    async def readyz(request: Request) -> Response:
        await refresh("/readyz")
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
    # prometheus_client's own negotiation of the format raises on version parameters that it cannot parse.
    if "application/openmetrics-text" in accept:
        page: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _answer(health: Health, *, good: bool) -> Response:
    body: dict[str, Any] = {
        "live": health.live,
        "ready": health.ready,
        "services": [asdict(service) for service in health.services],
    }
    if health.processes:
        body["worker_processes"] = [asdict(process) for process in health.processes]
    return JSONResponse(body, status_code=200 if good else 503, headers={"cache-control": "no-store"})
