"""Guarded requests: the run of the application, its response, and its lease."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integr8s_idem.engine.active_runs import ActiveRun, run_of
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import NOT_KEPT
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import LeaseLostError
from integr8s_idem.integrations.http_responses import Response

_ASIDE: Final = frozenset({"http.response.debug", "http.response.early_hint", "http.response.push"})
"""ASGI messages that are not part of the response itself."""


class NoOutcomeError(Exception):
    """The application has failed: with a server error, or without a complete response."""


class StorageRules(NamedTuple):
    """Which responses are stored, and with which headers."""

    is_stored: Callable[[int], bool]
    """Whether to store a response with this status."""
    unstored_headers: Collection[str]
    """Names in lower case."""


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, and the response of the application, which is held back until it is stored.

    Streaming responses are passed through immediately, because buffering would change their behavior.
    """

    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    body: bytes
    manager: IdempotencyManager
    work: Work
    rules: StorageRules
    has_started: bool = False
    """Whether the response has started to stream to the client: its messages are passed through as they arrive."""
    streams: str = ""
    """Why the response cannot be replayed; empty if it can."""
    _is_read: bool = False
    """Whether the application has read the request."""
    _start: Message | None = None
    _body: bytearray = field(default_factory=bytearray)
    """The part of the response that is held back."""
    _is_complete: bool = False
    _response: Response | None = None
    """The response as it was stored."""
    _run: ActiveRun | None = None
    _late: LeaseLostError | None = None
    """The error of a failed lease check."""

    # The response.

    @property
    def status(self) -> int | None:
        """Status of a complete response."""
        return int(self._start["status"]) if self._start is not None and self._is_complete else None

    def _held_back(self) -> Response | None:
        """Return the complete response if it is held back."""
        start = self._start
        if start is None or not self._is_complete or self.has_started:
            return None
        return Response(int(start["status"]), list(start.get("headers", ())), bytes(self._body))

    async def send_held_back(self) -> None:
        """Send the response unless it was streamed."""
        response = self._response or self._held_back()
        if response is not None:
            await response.send(self.send)

    # The run.

    async def run(self, attempt: Attempt) -> object:
        """Call the application, once at most, and return what to store of its response.

        Raises:
            NoOutcomeError: The application has failed, and a retry runs again unless failures block the key.
            LeaseLostError: A lease check has failed.
            Exception: Any error of the application.
        """
        self._run = run_of(attempt)
        token = _CURRENT.set(self)
        try:
            await self.app(self.scope, self._receive_body, self._capture)
        except Exception as error:
            if self._late is not None and error is not self._late:
                raise self._late from error  # a framework may have converted it
            raise
        finally:
            _CURRENT.reset(token)
        if self._late is not None:
            raise self._late  # a framework may have converted it to a response
        return self._result()

    def check_lease(self) -> None:
        """Check the lease of the run now.

        Raises:
            LeaseLostError: The lease has expired or is about to.
        """
        run = self._run
        if run is None or run.lease is None:
            return  # the configured policy allows runs without a lease
        if run.is_over or run.lease.is_late():
            attempt, lease = run.attempt, run.lease.reservation.lease
            self._late = LeaseLostError(attempt.label, attempt.number, lease, self.manager.scope, late=True)
            raise self._late

    def _result(self) -> object:
        status = self.status
        if status is None:
            raise NoOutcomeError
        if self.streams or not self.rules.is_stored(status):
            if status >= 500:
                raise NoOutcomeError
            # It has not failed, and a retry runs again.  A rejected request leaves no record, so that a flood of them
            # does not fill the store.
            self.work.forgotten = True
            return NOT_KEPT
        response = self._response = self._held_back()
        if response is None or not self.manager.config.enable_result_caching:
            return NOT_KEPT
        return response.stored(self.rules.unstored_headers)

    async def _receive_body(self) -> Message:
        """Receive for the application, which gets the whole body in one message."""
        if self._is_read:
            return await self.receive()
        self._is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def _capture(self, message: Message) -> None:
        """Send for the application."""
        kind = message["type"]
        if kind == "http.response.body":
            self._is_complete = not message.get("more_body", False)
            if not self.has_started:
                self._body += message.get("body", b"")
                if not self._is_complete and not self._has_length():
                    self.streams = "it streams without a content-length"
                # A complete response is in memory anyway; the client must not get it before the work is committed.
                is_too_large = len(self._body) > self.manager.config.max_result_size_bytes
                if self.streams or (is_too_large and not self._is_complete):
                    await self._pass_through()
                return
        elif kind == "http.response.start":
            self._start = message
            if not self.has_started:
                return
        elif kind not in _ASIDE:
            self.streams = f"it uses {kind}"
            if not self.has_started:
                await self._pass_through()
        await self.send(message)

    def _has_length(self) -> bool:
        assert self._start is not None, "a body comes after its start"
        return any(name.lower() == b"content-length" for name, _ in self._start.get("headers", ()))

    async def _pass_through(self) -> None:
        self.has_started = True
        if self._start is not None:
            await self.send(self._start)
            if self._body:
                body, more = bytes(self._body), not self._is_complete
                await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self._body.clear()


_CURRENT: ContextVar[Exchange | None] = ContextVar("guarded request of the current code", default=None)
"""Inherited by threads and tasks of the application."""


def current_exchange() -> Exchange | None:
    """Return the guarded request that the current code processes, if any."""
    return _CURRENT.get()
