"""The `Idempotency-Key` header for ASGI applications: FastAPI, Starlette, Litestar.

    app.add_middleware(IdempotencyKeyMiddleware, manager=manager, required=True, identity=user_of)

The middleware implements draft-ietf-httpapi-idempotency-key-header: a retry with the same key gets the first response
again.  A retry while the first request is in progress gets 409, a key reused with another payload 422, and a missing or
malformed key 400.

The response is sent after it is stored, and it is stored after the application has returned, that is, after the scopes
that it opened have been closed and committed.  Therefore this middleware must be outside Dishka's middleware.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal, TypeAlias, overload

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from integr8s_idem._util.context_vars import Container
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.http_answers import Answers
from integr8s_idem.integrations.http_exchange import Exchange, StorageRules, current_exchange
from integr8s_idem.integrations.http_problems import Problems
from integr8s_idem.integrations.http_requests import (
    RequestHeaders,
    body_of,
    full_path,
    headers_of,
    host_of,
    key_in,
    normalized,
    path_within,
    without_body_extensions,
)
from integr8s_idem.integrations.http_responses import PASSING, PER_CONNECTION
from integr8s_idem.integrations.http_startup import EXAMPLE, refuse_startup, reported_at_startup, start_and_check
from integr8s_idem.keys import EntryPoint, Key
from integr8s_idem.keys.fingerprints import fingerprint

Identity: TypeAlias = Callable[[HTTPConnection], str | Awaitable[str]]
"""Returns the identity of the caller; each caller has separate keys."""


@overload
def by_authorization(connection: HTTPConnection, *, anonymous: Literal["refuse", "share"] = "refuse") -> str: ...
@overload
def by_authorization(*, anonymous: Literal["refuse", "share"] = "refuse") -> Identity: ...
def by_authorization(
    connection: HTTPConnection | None = None, *, anonymous: Literal["refuse", "share"] = "refuse"
) -> str | Identity:
    """Identify the caller by the `Authorization` header.

    Pass `identity=by_authorization` or `identity=by_authorization(anonymous="share")`.  The header is not verified
    here: put your authentication outside this middleware.  A retry with a renewed token counts as another caller.

    Args:
        connection: The request, passed by the middleware.
        anonymous: How to treat requests without the header: `"refuse"` answers them with 401; `"share"` treats all of
            them as one caller, so that anyone who knows a key and its request gets the stored response.

    Raises:
        HTTPException: 401, if the request has no `Authorization` header and `anonymous` is `"refuse"`.
        ApplicationError: `anonymous` has another value.
    """
    if anonymous not in ("refuse", "share"):
        raise ApplicationError(f'by_authorization takes anonymous="refuse" or anonymous="share", not {anonymous!r}')
    if connection is None:
        return by_authorization if anonymous == "refuse" else _by_authorization_if_any
    given = "\n".join(connection.headers.getlist("authorization"))
    if not given.strip() and anonymous == "refuse":
        raise HTTPException(401, "Authorization is missing", {"WWW-Authenticate": "Bearer"})
    return hashlib.sha256(given.encode("latin-1")).hexdigest()


def _by_authorization_if_any(connection: HTTPConnection) -> str:
    return by_authorization(connection, anonymous="share")


def key_of_request(caller: str, host: str | None, method: str, path: str, key: str) -> Key:
    """Return the store's key for the `Idempotency-Key` of a request; `host` is `None` if all hosts share keys."""
    hosts = () if host is None else (host,)
    return Key.of_entry(EntryPoint.HTTP, caller, *hosts, method, path, key, name=f"{method} {path} {key}")


def anyone(_: HTTPConnection) -> str:
    """Treat all callers as one: anyone who knows a key and its request gets the stored response."""
    return ""


def before_errors(status: int) -> bool:
    """Whether to store a response: not server errors, authentication errors, unknown routes or requests to retry."""
    return status < 500 and status not in {401, 403, 404, 405, 408, 409, 423, 425, 429}


def check_lease() -> None:
    """Abort a guarded request whose lease has expired or is about to.

    Call it in an endpoint or a dependency immediately before a side effect.  The middleware makes this check itself
    when it calls the application, but a plain `def` endpoint starts later, in a thread.  In requests that are not
    guarded the function does nothing.

        @app.post("/charges")
        def charge(order: Order) -> Receipt:
            check_lease()
            return bank.charge(order)

    You may call it in any thread and repeatedly, before each side effect.

    Raises:
        LeaseLostError: The lease has expired or is about to.  Do not catch it: the client gets 503 with `Retry-After`
            in any case, and a retry with the same key runs again or gets the response of the process that took over.
    """
    exchange = current_exchange()
    if exchange is not None:
        exchange.check_lease()


class IdempotencyKeyMiddleware:
    """Middleware that processes each request with an `Idempotency-Key` once and answers retries with its response."""

    _setup_error: ApplicationError | None = None
    """Error of the constructor, reported at startup."""

    @reported_at_startup
    def __init__(
        self,
        app: Any,
        manager: IdempotencyManager | None = None,
        *,
        identity: Identity,
        container: Container | None = None,
        required: bool = False,
        methods: Collection[str] = ("POST", "PATCH"),
        paths: Collection[str] | None = None,
        wait: Duration | None = None,
        ttl: Duration | None = None,
        stored: Callable[[int], bool] = before_errors,
        unstored_headers: Collection[str] = (),
        replace_unstored_headers: bool = False,
        share_hosts: bool = False,
        bare_keys: bool = False,
        max_request_bytes: int = 1_048_576,
        max_open_keys: int | None = 1_000,
        documentation: str = "",
    ) -> None:
        """
        Args:
            manager: Guards the requests; its `max_result_size_bytes` limits the size of stored responses.
            identity: Identifies the caller, so that no caller gets the response of another: `by_authorization`,
                `anyone`, or your own function, which may reject a request with an `HTTPException`.
            container: A Dishka `AsyncContainer` that provides the manager, instead of `manager`.
            required: Whether to reject requests without a key; otherwise they are processed unguarded.
            methods: The HTTP methods to guard.
            paths: Path templates to guard, such as `/orders/{order_id}/refund`, in the syntax of the application's
                routes; all paths if `None`.
            wait: How long a retry waits for the first request before it gets 409; not at all if `None`.
            ttl: How long a response is kept, by the store's clock; as configured if `None`.
            stored: Whether to store a response with this status.  Other responses are passed on, and a retry runs
                again.
            unstored_headers: Response headers that are not stored, in addition to the defaults (`Set-Cookie`,
                `Authorization`, `Date`, ...).  Names are case-insensitive.
            replace_unstored_headers: Whether `unstored_headers` replaces the defaults.  Hop-by-hop headers such as
                `Transfer-Encoding` are never stored.
            share_hosts: Whether a key identifies the same request on every host of this application, as named by the
                `Host` header.  By default each host has separate keys.
            bare_keys: Whether to accept `Idempotency-Key: 8e03978e`, without the quotes of the draft.
            max_request_bytes: Limit for the body of a guarded request, which is held in memory; a longer one gets 413.
            max_open_keys: Limit for the requests with a key that one caller may have open in this process; further
                requests get 429 with `Retry-After`.  `None` sets no limit.
            documentation: URL of a page that explains the keys to your clients; problem responses link to it.

        Raises:
            ApplicationError: Neither a manager nor a container is given, or both are; `ttl` is shorter than the
                lease; `unstored_headers` is one string; or `max_open_keys` is less than 1.  With `add_middleware` the
                startup fails instead, as it does for a container without a manager.
        """
        if (manager is None) == (container is None):
            raise ApplicationError(
                f"IdempotencyKeyMiddleware needs either a manager or a container that provides one. {EXAMPLE}"
            )
        if not callable(identity):
            raise ApplicationError(
                "IdempotencyKeyMiddleware needs an identity function, which identifies the caller of a request: "
                f"by_authorization, anyone, or your own function, not {identity!r}. {EXAMPLE}"
            )
        if isinstance(unstored_headers, str):
            raise ApplicationError(f"unstored_headers must be a list of names: write [{unstored_headers!r}]")
        if max_open_keys is not None and max_open_keys < 1:
            raise ApplicationError(f"max_open_keys must be at least 1, or None for no limit, not {max_open_keys!r}")
        if manager is not None and ttl is not None:
            manager.checked_ttl(ttl)
        self.app = app
        self._manager = manager
        self._container = container
        self._required = required
        self._identity = identity
        self._methods = frozenset(method.upper() for method in methods)
        self._paths = None if paths is None else [compile_path(normalized(path))[0] for path in paths]
        self._ttl = duration(ttl, "ttl")
        defaults = PER_CONNECTION if replace_unstored_headers else PASSING
        self._rules = StorageRules(stored, defaults | {name.lower() for name in unstored_headers})
        self._share_hosts = share_hosts
        self._bare_keys = bare_keys
        self._max_request_bytes = max_request_bytes
        self._max_open_keys = max_open_keys
        self._open_keys: dict[str, int] = {}
        self._problems = Problems(documentation)
        self._answers = Answers(self._problems, duration(wait, "wait"))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # each framework has its own types for these
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        if self._setup_error is not None:
            raise self._setup_error
        if scope["type"] == "http" and scope["method"] in self._methods and self._guards(scope):
            headers = headers_of(scope)
            if headers.keys or self._required:
                await self._guard(headers, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan on to the application, and fail the startup if requests could not be guarded.

        Raises:
            ApplicationError: The startup failed; the server has been notified.
        """
        if self._setup_error is not None:
            await receive()
            await refuse_startup(self._setup_error, send)
        elif self._container is None:
            await self.app(scope, receive, send)
        else:
            await start_and_check(self.app, scope, receive, send, self._manager_of_container)

    async def _manager_of_container(self) -> IdempotencyManager:
        assert self._container is not None
        manager: IdempotencyManager = await self._container.get(IdempotencyManager)
        if self._ttl is not None:
            manager.checked_ttl(self._ttl)
        self._manager = manager
        return manager

    def _guards(self, scope: Scope) -> bool:
        """Whether the path is guarded.

        Raises:
            ApplicationError: This middleware is inside Dishka's.
        """
        if self._paths is not None:
            path = normalized(path_within(scope))
            if not any(each.match(path) for each in self._paths):
                return False
        if "dishka_container" in (scope.get("state") or ()):
            raise ApplicationError(
                "IdempotencyKeyMiddleware is inside Dishka's middleware and would store a response before its scope "
                "has committed: add it to the application, not to a route, and after setup_dishka(container, app); in "
                "Litestar write app.asgi_handler = IdempotencyKeyMiddleware(app.asgi_handler, manager)"
            )
        return True

    async def _guard(self, headers: RequestHeaders, scope: Scope, receive: Receive, send: Send) -> None:
        key = key_in(headers.keys, bare=self._bare_keys)
        if key is None:
            await (self._problems.malformed_key() if headers.keys else self._problems.missing_key()).send(send)
            return
        try:
            caller = await self._caller_of(scope)
        except HTTPException as error:
            await self._problems.not_let_in(error).send(send)
            return
        open_keys = self._open_keys.get(caller, 0)
        if self._max_open_keys is not None and open_keys >= self._max_open_keys:
            await self._problems.too_many(self._max_open_keys).send(send)
            return
        self._open_keys[caller] = open_keys + 1
        try:
            exchange = await self._exchange(headers, caller, key, scope, receive, send)
            if exchange is not None:
                await self._answers.answer(exchange)
        finally:
            self._close_key(caller)

    def _close_key(self, caller: str) -> None:
        left = self._open_keys[caller] - 1
        if left:
            self._open_keys[caller] = left
        else:
            del self._open_keys[caller]  # otherwise every caller would stay in memory

    async def _caller_of(self, scope: Scope) -> str:
        caller: object = self._identity(HTTPConnection(scope))
        if not isinstance(caller, str) and inspect.isawaitable(caller):
            caller = await caller
        if not isinstance(caller, str):
            # Converting it to a string would turn unidentified callers into one caller named "None".
            raise ApplicationError(f"identity must return a string, not {type(caller).__name__}")
        return caller

    async def _exchange(
        self, headers: RequestHeaders, caller: str, key: str, scope: Scope, receive: Receive, send: Send
    ) -> Exchange | None:
        """Read the body.  `None` if the client disconnected, or got a problem."""
        body = await body_of(receive, self._max_request_bytes)
        if body is None:
            return None
        if len(body) > self._max_request_bytes:
            await self._problems.too_large(self._max_request_bytes).send(send)
            return None
        manager = self._manager
        if manager is None:
            manager = await self._manager_of_container()
        content_type = headers.content_types[0] if headers.content_types else ""
        payload = b"\n".join((scope.get("query_string", b""), content_type.encode("latin-1"), body))
        host = None if self._share_hosts else host_of(headers.hosts, scope)
        work = Work(
            manager.space.key(key_of_request(caller, host, scope["method"], full_path(scope), key)),
            fingerprint(payload),
            self._ttl,
            gives_up=False,
        )
        return Exchange(self.app, without_body_extensions(scope), receive, send, body, manager, work, self._rules)
