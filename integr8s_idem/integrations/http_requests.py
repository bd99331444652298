"""Requests with an idempotency key: their identity, body and address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integr8s_idem.integrations.http_responses import Captured

_BODY_EXTENSIONS: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""ASGI extensions that would send a body past this middleware."""
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


@dataclass(slots=True)
class GuardedRequest:
    """A request and the response of the application."""

    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    body: bytes
    captured: Captured | None = None

    @property
    def has_started(self) -> bool:
        """Whether the response has started to stream to the client."""
        return self.captured is not None and self.captured.passing

    @property
    def answered_with_error(self) -> bool:
        """Whether the application has sent a complete 5xx response before it raised."""
        return self.captured is not None and self.captured.status is not None and self.captured.status >= 500

    async def run(self, longest_body: int) -> Captured:
        """Call the application and capture its response."""
        first = True

        async def receive() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": self.body, "more_body": False}
            return await self.receive()

        self.captured = Captured(self.send, longest_body)
        await self.app(self.scope, receive, self.captured)
        return self.captured

    async def send_held_back(self) -> None:
        """Send the response unless it was streamed."""
        if self.captured is not None and (response := self.captured.response) is not None:
            await response.send(self.send)


async def body_of(receive: Receive, longest: int) -> bytes | None:
    """Return the body, or more than `longest` bytes of a longer one; `None` if the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > longest or not message.get("more_body", False):
            return bytes(body)


def host_of(connection: HTTPConnection) -> str:
    """Return the requested host without the default port of its scheme."""
    host = ",".join(connection.headers.getlist("host")).strip().lower()
    return host.removesuffix(_DEFAULT_PORTS.get(connection.scope.get("scheme", "http"), ""))


def path_within(scope: Scope) -> str:
    """Return the path as seen by the application's routes; servers may or may not prepend the root path."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else path


def normalized(path: str) -> str:
    """Remove the extra slashes that some routers ignore; they must not bypass the guard."""
    return "/" + "/".join(part for part in path.split("/") if part)


def without_body_extensions(scope: Scope) -> Scope:
    """Return `scope` without the extensions that would send a body past this middleware."""
    offered = scope.get("extensions") or {}
    if not offered.keys() & _BODY_EXTENSIONS:
        return scope
    return {**scope, "extensions": {name: value for name, value in offered.items() if name not in _BODY_EXTENSIONS}}
