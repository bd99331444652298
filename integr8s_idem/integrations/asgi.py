"""The `Idempotency-Key` header for ASGI applications: FastAPI, Starlette, Litestar.

    app.add_middleware(IdempotencyKeyMiddleware, manager=manager, required=True, identity=user_of)

As draft-ietf-httpapi-idempotency-key-header has it: a retry with the same key gets the first response again, one that
comes too early gets 409, one with another payload 422, and a key that is missing or malformed 400.

The response leaves once it is remembered, and it is remembered once the application has returned: after the scopes
that it opened are closed, and what they commit is committed.  So this middleware stands outside of Dishka's.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integr8s_idem.config import OnInProgress
from integr8s_idem.current import Container
from integr8s_idem.errors import (
    ApplicationError,
    InProgressError,
    LeaseLostError,
    ResultNotStoredError,
    StoreError,
)
from integr8s_idem.integrations.http_responses import PASSING, Captured, Response, problem, response_of
from integr8s_idem.keys import Key, escaped, fingerprint
from integr8s_idem.manager import IdempotencyManager
from integr8s_idem.records import Completed, Corrupt, Failed, InProgress, KeyReused, StoredResult
from integr8s_idem.work import Attempt, Executed, HandlerFailed, Outcome, Work

logger = logging.getLogger(__name__)

Identity: TypeAlias = Callable[[HTTPConnection], str | Awaitable[str]]
"""Says who asks: keys of two callers never meet."""

LONGEST_KEY: Final = 255
"""Characters of a key as a client sends it."""

RETRY_SOON: Final = 1
"""Seconds after which a client may ask again, where nothing better is known."""

_TOO_LARGE: Final = object()
"""A result that no store takes: it is dropped, and the protection stays."""

_QUOTED: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
"""A string of RFC 8941, section 3.3.3, without parameters, of which the draft defines none."""

_BARE: Final = re.compile(r"[\x21\x23-\x7e]+")


def by_authorization(connection: HTTPConnection) -> str:
    """Who asks, by the `Authorization` header.  Where tokens are renewed, a retry with a new one is another caller."""
    return hashlib.sha256(connection.headers.get("authorization", "").encode("latin-1")).hexdigest()


def before_errors(status: int) -> bool:
    """Whether a response is an outcome: not one of the server's errors, nor one that says to come again."""
    return status < 500 and status not in {408, 409, 423, 425, 429}


class IdempotencyKeyMiddleware:
    """Does each request with an `Idempotency-Key` once, and answers its retries with the first response."""

    def __init__(
        self,
        app: ASGIApp,
        manager: IdempotencyManager | None = None,
        *,
        container: Container | None = None,
        required: bool = False,
        identity: Identity = by_authorization,
        methods: Collection[str] = ("POST", "PATCH"),
        paths: Collection[str] | None = None,
        wait: timedelta | None = None,
        ttl: timedelta | None = None,
        stored: Callable[[int], bool] = before_errors,
        unstored_headers: Collection[str] = PASSING,
        bare_keys: bool = False,
        max_request_bytes: int = 1_048_576,
    ) -> None:
        """
        Args:
            manager: Guards the requests; its `max_result_size_bytes` bounds the responses that are kept.
            container: A Dishka `AsyncContainer` that has one, instead.
            required: Whether a request without a key is refused; otherwise it is done unguarded.
            identity: Who asks, so that nobody is answered with what another caller got.
            methods: Those that are guarded.
            paths: Templates such as `/orders/{order_id}/refund`, if not all are guarded.
            wait: How long a retry waits for the first request before it gets 409; not at all if `None`.
            ttl: How long a response is remembered, by the store's clock; as configured if `None`.
            stored: Whether a response with this status is the outcome.  Another one is passed on, and a retry runs.
            unstored_headers: In lower case; not given again.
            bare_keys: Whether `Idempotency-Key: 8e03978e` will do, without the quotes of the draft.
            max_request_bytes: A longer body of a guarded request gets 413: it is held in memory.

        Raises:
            ApplicationError: Neither a manager nor a container is given, or both are.
        """
        if (manager is None) == (container is None):
            raise ApplicationError(
                "IdempotencyKeyMiddleware needs a manager, or a container that has one: "
                "app.add_middleware(IdempotencyKeyMiddleware, manager=manager)"
            )
        self.app = app
        self._manager = manager
        self._container = container
        self._required = required
        self._identity = identity
        self._methods = frozenset(method.upper() for method in methods)
        self._paths = None if paths is None else [compile_path(path)[0] for path in paths]
        self._wait = wait
        self._ttl = ttl
        self._stored = stored
        self._unstored_headers = frozenset(unstored_headers)
        self._bare_keys = bare_keys
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._guards(scope):
            await self.app(scope, receive, send)
            return
        if "dishka_container" in scope.get("state", {}):
            raise ApplicationError(
                "IdempotencyKeyMiddleware stands within Dishka's middleware, and would remember a response before its "
                "scope has committed: add it after setup_dishka(container, app)"
            )
        connection = HTTPConnection(scope)
        given = connection.headers.getlist("idempotency-key")
        if not given and not self._required:
            await self.app(scope, receive, send)
            return
        key = self._key_in(given)
        if isinstance(key, Response):
            await key.send(send)
            return
        body = await _body_of(receive, self._max_request_bytes)
        if body is None:
            return  # the client has gone before it had said what it wants
        if len(body) > self._max_request_bytes:
            await self._too_large().send(send)
            return
        request = _Request(self.app, scope, receive, send, body)
        work = await self._work(await self._manager_of(), connection, key, body)
        await self._answer(request, work)

    def _guards(self, scope: Scope) -> bool:
        if scope["method"] not in self._methods:
            return False
        return self._paths is None or any(path.match(scope["path"]) for path in self._paths)

    def _key_in(self, given: list[str]) -> str | Response:
        if not given:
            return _bad_key("Idempotency-Key is missing", "This operation needs an Idempotency-Key header.")
        value = given[0].strip(" \t")
        if len(given) == 1 and (quoted := _QUOTED.fullmatch(value)) and 0 < len(value) - 2 <= LONGEST_KEY:
            return re.sub(r"\\(.)", r"\1", quoted[1])
        if len(given) == 1 and self._bare_keys and len(value) <= LONGEST_KEY and _BARE.fullmatch(value):
            return value
        return _bad_key(
            "Idempotency-Key is malformed",
            f"It is one string in double quotes, of 1 to {LONGEST_KEY} characters of ASCII, "
            'such as "8e03978e-40d5-43dd-bc93-6894a57f9324".',
        )

    async def _manager_of(self) -> IdempotencyManager:
        if self._manager is None:
            assert self._container is not None
            self._manager = await self._container.get(IdempotencyManager)
        return self._manager

    async def _work(self, manager: IdempotencyManager, connection: HTTPConnection, key: str, body: bytes) -> Work:
        scope = connection.scope
        who = self._identity(connection)
        if inspect.isawaitable(who):
            who = await who
        parts = ("http", who or "-", scope["method"], scope.get("root_path", "") + scope["path"], key)
        payload = b"\n".join(
            (scope.get("query_string", b""), connection.headers.get("content-type", "").encode("latin-1"), body)
        )
        return Work(
            manager.space.key(Key(":" + ":".join(map(escaped, parts)), f"{scope['method']} {scope['path']} {key}")),
            fingerprint(payload),
            None if self._ttl is None else manager.checked_ttl(self._ttl),
            gives_up=False,
        )

    def _too_large(self) -> Response:
        detail = f"A request with an Idempotency-Key has at most {self._max_request_bytes} bytes."
        return problem(413, "Request is too large", detail, section="too-large")

    async def _answer(self, request: _Request, work: Work) -> None:
        manager = await self._manager_of()

        async def one_pass() -> Outcome[object]:
            return await manager.passes.execute(work, lambda attempt: self._run(request, manager, attempt))

        policy = OnInProgress.RAISE if self._wait is None else OnInProgress.WAIT
        try:
            outcome = await manager.outcome(work, one_pass, on_in_progress=policy, wait_timeout=self._wait)
        except InProgressError:
            await _in_progress().send(request.send)
        except ResultNotStoredError as error:
            # The caller is told what has happened, and has no reason to try again.
            logger.error("%s", error)
            await request.send_held_back()
        except (StoreError, LeaseLostError) as error:
            logger.error("%s", error)
            if not request.begun:
                await _unavailable(error).send(request.send)
        else:
            await self._end(request, outcome)

    async def _run(self, request: _Request, manager: IdempotencyManager, _: Attempt) -> object:
        captured = await request.run(manager.config.max_result_size_bytes)
        if captured.status is None or captured.streams or not self._stored(captured.status):
            raise _NoOutcomeError(captured.streams)
        if captured.response is None:
            return _TOO_LARGE
        return captured.response.stored(self._unstored_headers)

    async def _end(self, request: _Request, outcome: Outcome[object]) -> None:
        match outcome:
            case Executed():
                await request.send_held_back()
            case HandlerFailed(error=_NoOutcomeError() as error):
                if error.streams:
                    logger.warning(
                        "the response to %s %s was not remembered, and a retry does it again: %s",
                        request.scope["method"],
                        request.scope["path"],
                        error.streams,
                    )
                await request.send_held_back()
            case HandlerFailed():
                raise outcome.error
            case _:
                await _again(outcome).send(request.send)


class _NoOutcomeError(Exception):
    """The response is none that is remembered."""

    def __init__(self, streams: str) -> None:
        super().__init__(streams)
        self.streams = streams
        """Why it could not be held back, if that is so."""


@dataclass(slots=True)
class _Request:
    """One request, and the response of the application to it."""

    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    body: bytes
    captured: Captured | None = None

    @property
    def begun(self) -> bool:
        """Whether a response is on its way to the client."""
        return self.captured is not None and self.captured.passing

    async def run(self, longest_body: int) -> Captured:
        """Have the application answer."""
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
        """Let the response leave, if it has not."""
        if self.captured is not None and (response := self.captured.response) is not None:
            await response.send(self.send)


async def _body_of(receive: Receive, longest: int) -> bytes | None:
    """The body, or the beginning of one that is longer than that; `None` if the client has gone before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > longest or not message.get("more_body", False):
            return bytes(body)


def _bad_key(title: str, detail: str) -> Response:
    return problem(400, title, detail, section="bad-key")


def _in_progress() -> Response:
    return problem(
        409,
        "A request is outstanding for this Idempotency-Key",
        "The first request with this key is being processed still. Retry when it is done.",
        section="in-progress",
        headers={"retry-after": str(RETRY_SOON)},
    )


def _unavailable(error: StoreError | LeaseLostError) -> Response:
    return problem(
        503,
        "Retries cannot be told apart now",
        "The request may be retried with the same Idempotency-Key."
        if isinstance(error, LeaseLostError)
        else "The request was not processed. It may be retried with the same Idempotency-Key.",
        section="unavailable",
        headers={"retry-after": str(RETRY_SOON)},
    )


def _again(outcome: Completed | Failed | KeyReused | Corrupt | InProgress) -> Response:
    match outcome:
        case Completed(result=StoredResult() as result):
            try:
                return response_of(result)
            except ValueError as error:
                logger.error("the response stored for %s cannot be read: %s", outcome.key, error)
                return _done_without_response("It cannot be read any more.")
        case Completed():
            return _done_without_response("It was not kept.")
        case KeyReused():
            return problem(
                422,
                "Idempotency-Key is already used",
                "This key was used for another request. Retry the same request, or make a new key.",
                section="key-reused",
            )
        case Failed():
            return _done_without_response("It was given up.")
        case _:
            logger.error("the record of a request cannot be read: %s", outcome)
            return problem(500, "The record of this request cannot be read", "", section="unreadable")


def _done_without_response(why: str) -> Response:
    return problem(
        409, "The request was processed, and its response is gone", f"{why} Do not repeat it.", section="no-response"
    )
