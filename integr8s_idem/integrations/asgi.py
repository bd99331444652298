"""The `Idempotency-Key` header for ASGI applications: FastAPI, Starlette, Litestar.

    app.add_middleware(IdempotencyKeyMiddleware, manager=manager, required=True, identity=user_of)

The middleware implements draft-ietf-httpapi-idempotency-key-header: a retry with the same key gets the first response
again.  A retry while the first request is in progress gets 409, a key reused with another payload 422, and a missing or
malformed key 400.

The response is sent after it is stored, and it is stored after the application has returned, that is, after the scopes
that it opened have been closed and committed.  Therefore this middleware must be outside Dishka's middleware.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, cast, overload

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from integr8s_idem._util.context_vars import Container
from integr8s_idem._util.escaping import printable
from integr8s_idem.config import OnInProgress
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.active_runs import ActiveRun, run_of
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import NOT_KEPT
from integr8s_idem.engine.work import Attempt, Executed, HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    InProgressError,
    LeaseLostError,
    ResultNotStoredError,
    StoreError,
)
from integr8s_idem.integrations.http_problems import LONGEST_KEY, Problems
from integr8s_idem.integrations.http_requests import (
    GuardedRequest,
    body_of,
    host_of,
    normalized,
    path_within,
    without_body_extensions,
)
from integr8s_idem.integrations.http_responses import PASSING, PER_CONNECTION
from integr8s_idem.keys import EntryPoint, Key
from integr8s_idem.keys.fingerprints import fingerprint
from integr8s_idem.records import Completed

logger = logging.getLogger(__name__)

P = ParamSpec("P")

Identity: TypeAlias = Callable[[HTTPConnection], str | Awaitable[str]]
"""Returns the identity of the caller; each caller has separate keys."""

_QUOTED: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
"""A string of RFC 8941, section 3.3.3, without parameters, of which the draft defines none."""

_BARE: Final = re.compile(r"[\x21\x23-\x7e]+")

_REJECTION_RETRIES: Final = 3
_REJECTION_RETRY_SECONDS: Final = 0.005
"""Pause between retries; the record of a rejected request expires after a millisecond of the store's clock."""


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
    check = _LEASE_CHECK.get()
    if check is not None:
        check.make()


def _reported_at_startup(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Wrap a constructor so that its errors fail the startup of the application.

    Starlette and FastAPI construct middleware when the server starts the lifespan.  Servers such as uvicorn interpret
    an exception there as missing support for the lifespan protocol: they would serve, and each request would fail.
    """

    @wraps(init)
    def construct(self: Any, *args: P.args, **options: P.kwargs) -> None:
        try:
            init(self, *args, **options)
        except (ApplicationError, TypeError) as error:
            self.app = args[0] if args else options.get("app")
            if not _belongs_to_starlette(self.app):
                raise
            self._setup_error = (
                error if isinstance(error, ApplicationError) else ApplicationError(f"{error}. {_EXAMPLE}")
            )

    return cast("Callable[Concatenate[Any, P], None]", construct)


def _belongs_to_starlette(app: Any) -> bool:
    """Whether `app` is the application inside the middleware of Starlette or FastAPI, and not a route."""
    while app is not None and not isinstance(app, ExceptionMiddleware):
        app = getattr(app, "app", None)
    return app is not None


_EXAMPLE: Final = "Write app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=user_of)"


class IdempotencyKeyMiddleware:
    """Middleware that processes each request with an `Idempotency-Key` once and answers retries with its response."""

    _setup_error: ApplicationError | None = None
    """Error of the constructor, reported at startup."""

    @_reported_at_startup
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
                f"IdempotencyKeyMiddleware needs either a manager or a container that provides one. {_EXAMPLE}"
            )
        if not callable(identity):
            raise ApplicationError(
                "IdempotencyKeyMiddleware needs an identity function, which identifies the caller of a request: "
                f"by_authorization, anyone, or your own function, not {identity!r}. {_EXAMPLE}"
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
        self._wait = duration(wait, "wait")
        self._ttl = duration(ttl, "ttl")
        self._stored = stored
        defaults = PER_CONNECTION if replace_unstored_headers else PASSING
        self._unstored_headers = defaults | {name.lower() for name in unstored_headers}
        self._share_hosts = share_hosts
        self._bare_keys = bare_keys
        self._max_request_bytes = max_request_bytes
        self._max_open_keys = max_open_keys
        self._open_keys: Counter[str] = Counter()
        self._problems = Problems(documentation)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # each framework has its own types for these
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        if self._setup_error is not None:
            raise self._setup_error
        if scope["type"] != "http" or not self._guards(scope):
            await self.app(scope, receive, send)
            return
        if "dishka_container" in (scope.get("state") or {}):
            raise ApplicationError(
                "IdempotencyKeyMiddleware is inside Dishka's middleware and would store a response before its scope "
                "has committed: add it to the application, not to a route, and after setup_dishka(container, app); in "
                "Litestar write app.asgi_handler = IdempotencyKeyMiddleware(app.asgi_handler, manager)"
            )
        connection = HTTPConnection(scope)
        given = connection.headers.getlist("idempotency-key")
        if not given and not self._required:
            await self.app(scope, receive, send)
            return
        if (key := self._key_in(given)) is None:
            await (self._problems.malformed_key() if given else self._problems.missing_key()).send(send)
            return
        try:
            caller = await self._caller_of(connection)
        except HTTPException as error:
            await self._problems.not_let_in(error).send(send)
            return
        if self._max_open_keys is not None and self._open_keys[caller] >= self._max_open_keys:
            await self._problems.too_many(self._max_open_keys).send(send)
            return
        with self._count_open_key(caller):
            await self._guard(connection, caller, key, receive, send)

    @contextmanager
    def _count_open_key(self, caller: str) -> Iterator[None]:
        """Count an open request of `caller` within the block."""
        self._open_keys[caller] += 1
        try:
            yield
        finally:
            self._open_keys[caller] -= 1
            if not self._open_keys[caller]:
                del self._open_keys[caller]  # otherwise every caller would stay in memory

    async def _guard(self, connection: HTTPConnection, caller: str, key: str, receive: Receive, send: Send) -> None:
        body = await body_of(receive, self._max_request_bytes)
        if body is None:
            return  # the client disconnected before it had sent its request
        if len(body) > self._max_request_bytes:
            await self._problems.too_large(self._max_request_bytes).send(send)
            return
        manager = await self._manager_of()
        request = GuardedRequest(self.app, without_body_extensions(connection.scope), receive, send, body)
        await self._answer(manager, request, self._work(manager, connection, caller, key, body))

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan on to the application, and fail the startup if requests could not be guarded.

        Raises:
            ApplicationError: The startup failed; the server has been notified.
        """
        failure = self._setup_error
        if failure is not None:
            await receive()
        elif self._container is None:
            await self.app(scope, receive, send)
        else:
            failure = await self._start_with_container(scope, receive, send)
        if failure is not None:
            await send({"type": "lifespan.startup.failed", "message": str(failure)})
            raise failure

    async def _start_with_container(self, scope: Scope, receive: Receive, send: Send) -> ApplicationError | None:
        """Start the application, then get the manager from the container: the startup may make it available."""
        failures: list[ApplicationError] = []

        async def receive_until_failure() -> Message:
            # Let the application close the resources that its startup opened.
            return {"type": "lifespan.shutdown"} if failures else await receive()

        async def send_until_failure(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete" and (failure := await self._failure_to_start()):
                failures.append(failure)
            if not failures:
                await send(message)

        try:
            await self.app(scope, receive_until_failure, send_until_failure)
        except Exception:
            if not failures:
                raise
            logger.exception("the application failed to shut down after IdempotencyKeyMiddleware had failed to start")
        return failures[0] if failures else None

    async def _failure_to_start(self) -> ApplicationError | None:
        try:
            manager = await self._manager_of()
            if self._ttl is not None:
                manager.checked_ttl(self._ttl)
        except ApplicationError as error:
            return error
        except Exception as error:  # noqa: BLE001  # raised by Dishka or by a provider
            failure = ApplicationError(f"the container of IdempotencyKeyMiddleware cannot provide a manager: {error}")
            failure.__cause__ = error
            return failure
        return None

    def _guards(self, scope: Scope) -> bool:
        if scope["method"] not in self._methods:
            return False
        return self._paths is None or any(path.match(normalized(path_within(scope))) for path in self._paths)

    def _key_in(self, given: list[str]) -> str | None:
        if len(given) != 1:
            return None
        value = given[0].strip(" \t")
        if (quoted := _QUOTED.fullmatch(value)) and 0 < len(value) - 2 <= LONGEST_KEY:
            return re.sub(r"\\(.)", r"\1", quoted[1])
        return value if self._bare_keys and len(value) <= LONGEST_KEY and _BARE.fullmatch(value) else None

    async def _caller_of(self, connection: HTTPConnection) -> str:
        caller: object = self._identity(connection)
        if inspect.isawaitable(caller):
            caller = await caller
        if not isinstance(caller, str):
            # Converting it to a string would turn unidentified callers into one caller named "None".
            raise ApplicationError(f"identity must return a string, not {type(caller).__name__}")
        return caller

    async def _manager_of(self) -> IdempotencyManager:
        if self._manager is None:
            assert self._container is not None
            self._manager = await self._container.get(IdempotencyManager)
        return self._manager

    def _work(
        self, manager: IdempotencyManager, connection: HTTPConnection, caller: str, key: str, body: bytes
    ) -> Work:
        scope = connection.scope
        path = scope.get("root_path", "").rstrip("/") + path_within(scope)
        host = None if self._share_hosts else host_of(connection)
        payload = b"\n".join(
            (scope.get("query_string", b""), connection.headers.get("content-type", "").encode("latin-1"), body)
        )
        return Work(
            manager.space.key(key_of_request(caller, host, scope["method"], path, key)),
            fingerprint(payload),
            None if self._ttl is None else manager.checked_ttl(self._ttl),
            gives_up=False,
        )

    async def _answer(self, manager: IdempotencyManager, request: GuardedRequest, work: Work) -> None:
        async def execute() -> Outcome[object]:
            return await manager.executor.execute(work, lambda attempt: self._run(request, manager, work, attempt))

        policy = OnInProgress.RAISE if self._wait is None else OnInProgress.WAIT
        try:
            for _ in range(_REJECTION_RETRIES):
                outcome = await manager.outcome(work, execute, on_in_progress=policy, wait_timeout=self._wait)
                if not _was_rejected(outcome, manager):
                    break
                await asyncio.sleep(_REJECTION_RETRY_SECONDS)
        except InProgressError:
            await self._problems.in_progress().send(request.send)
        except ResultNotStoredError as error:
            # The work is done and the client gets its response, so there is no reason to retry.
            logger.error("%s", error)
            await request.send_held_back()
        except (StoreError, LeaseLostError) as error:
            logger.error("%s", error)
            if not request.has_started:
                await self._problems.unavailable(error).send(request.send)
        else:
            if _was_rejected(outcome, manager):
                await self._problems.in_progress().send(request.send)
            else:
                await self._end(request, outcome)

    async def _run(self, request: GuardedRequest, manager: IdempotencyManager, work: Work, attempt: Attempt) -> object:
        with _LeaseCheck(run_of(attempt), manager.scope):
            captured = await request.run(manager.config.max_result_size_bytes)
        if captured.status is None or captured.streams:
            raise _NoOutcomeError(captured.streams)
        if not self._stored(captured.status):
            if captured.status >= 500:
                raise _NoOutcomeError(captured.streams)
            # A rejected request leaves no record, so that a flood of them does not fill the store.
            work.forgotten = True
            return NOT_KEPT
        if captured.response is None or not manager.config.enable_result_caching:
            return NOT_KEPT
        return captured.response.stored(self._unstored_headers)

    async def _end(self, request: GuardedRequest, outcome: Outcome[object]) -> None:
        match outcome:
            case Executed():
                await request.send_held_back()
            case HandlerFailed(error=_NoOutcomeError() as error):
                if error.streams:
                    logger.warning(
                        "the response to %s %s was not stored, so a retry runs again: %s",
                        request.scope["method"],
                        printable(request.scope["path"]),
                        printable(error.streams),
                    )
                await request.send_held_back()
            case HandlerFailed():
                if request.answered_with_error:
                    await request.send_held_back()
                raise outcome.error
            case _:
                await self._problems.for_outcome(outcome).send(request.send)


def _was_rejected(outcome: Outcome[object], manager: IdempotencyManager) -> bool:
    """Whether another request with this key has just been rejected, so that its record is about to expire."""
    # If responses are stored, only such a record has neither a response nor the mark of a dropped one.
    is_bare = isinstance(outcome, Completed) and outcome.result is None and not outcome.result_dropped
    return is_bare and manager.config.enable_result_caching


class _LeaseCheck:
    """The lease check of one run of the application.  If the check failed, exiting the block raises its error."""

    def __init__(self, run: ActiveRun | None, scope: str) -> None:
        self._run = run
        self._scope = scope
        self._error: LeaseLostError | None = None

    def make(self) -> None:
        """Check the lease now.

        Raises:
            LeaseLostError: The lease has expired or is about to.
        """
        run = self._run
        if run is None or run.lease is None:
            return  # the configured policy allows runs without a lease
        if run.is_over or run.lease.is_late():
            attempt = run.attempt
            lease = run.lease.reservation.lease
            self._error = LeaseLostError(attempt.label, attempt.number, lease, self._scope, late=True)
            raise self._error

    def __enter__(self) -> None:
        self._token = _LEASE_CHECK.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LEASE_CHECK.reset(self._token)
        # A framework may have converted the error to a response or to another error.  Cancellations propagate.
        if self._error is None or error is self._error or not isinstance(error, Exception | None):
            return
        raise self._error from error


_LEASE_CHECK: ContextVar[_LeaseCheck | None] = ContextVar("lease check of the current request", default=None)
"""Inherited by threads and tasks of the application."""


class _NoOutcomeError(Exception):
    """The response is not to be stored."""

    def __init__(self, streams: str) -> None:
        super().__init__(streams)
        self.streams = streams
        """Why the response was streamed; empty if it was not."""
