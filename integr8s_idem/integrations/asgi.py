"""The `Idempotency-Key` header for ASGI applications: FastAPI, Starlette, Litestar.

    app.add_middleware(IdempotencyKeyMiddleware, manager=manager, required=True, identity=user_of)

As draft-ietf-httpapi-idempotency-key-header has it: a retry with the same key gets the first response again, one that
comes too early gets 409, one with another payload 422, and a key that is missing or malformed 400.

The response leaves once it is remembered, and it is remembered once the application has returned: after the scopes
that it opened are closed, and what they commit is committed.  So this middleware stands outside of Dishka's.
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
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, cast, overload

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from integr8s_idem.integrations.http_responses import PASSING, PER_CONNECTION, Captured
from integr8s_idem.keys import EntryPoint, Key, fingerprint
from integr8s_idem.records import Completed

logger = logging.getLogger(__name__)

P = ParamSpec("P")

Identity: TypeAlias = Callable[[HTTPConnection], str | Awaitable[str]]
"""Says who asks: keys of two callers never meet."""

_QUOTED: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
"""A string of RFC 8941, section 3.3.3, without parameters, of which the draft defines none."""

_BARE: Final = re.compile(r"[\x21\x23-\x7e]+")

_LOOKS_AT_A_REFUSAL: Final = 3
_LOOK_SECONDS: Final = 0.005
"""The record of a refused request expires after a millisecond of the store's clock."""

_BODY_ELSEWHERE: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Extensions by which a body would not come through our hands."""


@overload
def by_authorization(connection: HTTPConnection, *, anonymous: Literal["refuse", "share"] = "refuse") -> str: ...
@overload
def by_authorization(*, anonymous: Literal["refuse", "share"] = "refuse") -> Identity: ...
def by_authorization(
    connection: HTTPConnection | None = None, *, anonymous: Literal["refuse", "share"] = "refuse"
) -> str | Identity:
    """Identify the caller by the `Authorization` header.

    Write `identity=by_authorization`, or `identity=by_authorization(anonymous="share")`.  The header is not verified
    here: put your authentication outside.  Where tokens are renewed, a retry with a new token is another caller.

    Args:
        connection: The request; the middleware passes it.
        anonymous: What requests without the header get: `"refuse"` answers them with 401, `"share"` treats all of
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


def key_of_request(who: str, host: str | None, method: str, path: str, key: str) -> Key:
    """The key of a request with the `Idempotency-Key` `key`; `host` is `None` where all hosts share keys."""
    hosts = () if host is None else (host,)
    return Key.of_entry(EntryPoint.HTTP, who, *hosts, method, path, key, name=f"{method} {path} {key}")


def anyone(_: HTTPConnection) -> str:
    """All callers are one: whoever knows a key, and the request that it was used for, is given the response."""
    return ""


def before_errors(status: int) -> bool:
    """Whether a response is stored: not if the server failed, refused the caller, knew no route or asks for a retry."""
    return status < 500 and status not in {401, 403, 404, 405, 408, 409, 423, 425, 429}


def check_lease() -> None:
    """Refuse to go on with a guarded request whose lease has ended or is about to.

    Call it in an endpoint or a dependency immediately before an effect.  The guard makes this check itself when it
    calls the application; a plain `def` endpoint starts later, in a thread.  In a request that is not guarded it does
    nothing.

        @app.post("/charges")
        def charge(order: Order) -> Receipt:
            check_lease()
            return bank.charge(order)

    May be called in any thread, and more than once: before each effect.

    Raises:
        LeaseLostError: Do not catch it.  Whatever the application answers, the client gets 503 with `Retry-After`, and
            a retry with the same key runs, or gets the response of the process that took over.
    """
    check = _LEASE_CHECK.get()
    if check is not None:
        check.make()


def _reported_at_startup(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A constructor whose errors fail the startup of the application.

    Starlette and FastAPI call it when the server starts the application's lifespan, and servers such as uvicorn take an
    exception there for an application that has no lifespan: they would serve, and each request would fail.
    """

    @wraps(init)
    def construct(self: Any, *args: P.args, **options: P.kwargs) -> None:
        try:
            init(self, *args, **options)
        except (ApplicationError, TypeError) as error:
            self.app = args[0] if args else options.get("app")
            if not _belongs_to_starlette(self.app):
                raise
            self._mistake = error if isinstance(error, ApplicationError) else ApplicationError(f"{error}. {_EXAMPLE}")

    return cast("Callable[Concatenate[Any, P], None]", construct)


def _belongs_to_starlette(app: Any) -> bool:
    """Whether `app` is what Starlette and FastAPI have within their middleware, as opposed to that of a route."""
    while app is not None and not isinstance(app, ExceptionMiddleware):
        app = getattr(app, "app", None)
    return app is not None


_EXAMPLE: Final = "Write app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=user_of)"


class IdempotencyKeyMiddleware:
    """Does each request with an `Idempotency-Key` once, and answers its retries with the first response."""

    _mistake: ApplicationError | None = None
    """Why it guards nothing; known when it was made, and reported at the startup."""

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
            manager: Guards the requests; its `max_result_size_bytes` bounds the responses that are kept.
            identity: Who asks, so that nobody is answered with what another caller got: `by_authorization`, `anyone`,
                or a function of your own, which may refuse by an `HTTPException`.
            container: A Dishka `AsyncContainer` that has one, instead.
            required: Whether a request without a key is refused; otherwise it is done unguarded.
            methods: Those that are guarded.
            paths: Templates such as `/orders/{order_id}/refund`, as the application's routes have them, if not all
                are guarded.
            wait: How long a retry waits for the first request before it gets 409; not at all if `None`.
            ttl: How long a response is remembered, by the store's clock; as configured if `None`.
            stored: Whether a response with this status is the outcome.  Another one is passed on, and a retry runs.
            unstored_headers: Response headers that are not stored, in addition to the defaults (`Set-Cookie`,
                `Authorization`, `Date`, ...).  Upper and lower case are the same.
            replace_unstored_headers: Whether `unstored_headers` replaces the defaults.  Headers of one connection,
                such as `Transfer-Encoding`, are never stored.
            share_hosts: Whether a key means the same request at every host of this application, as named by the
                `Host` header.  By default each host has keys of its own.
            bare_keys: Whether `Idempotency-Key: 8e03978e` will do, without the quotes of the draft.
            max_request_bytes: A longer body of a guarded request gets 413: it is held in memory.
            max_open_keys: Most requests with a key that one caller has open in this process; the next one gets 429 with
                `Retry-After`.  `None` sets no limit.
            documentation: A URL where your clients read how to use their keys; refusals link to it.

        Raises:
            ApplicationError: Neither a manager nor a container is given, or both are; `ttl` is shorter than the
                lease; `unstored_headers` is one string; or `max_open_keys` is less than 1.  With `add_middleware` the
                startup fails instead, as it does for a container without a manager.
        """
        if (manager is None) == (container is None):
            raise ApplicationError(
                f"IdempotencyKeyMiddleware needs either a manager or a container that has one. {_EXAMPLE}"
            )
        if not callable(identity):
            raise ApplicationError(
                "IdempotencyKeyMiddleware needs an identity, which says who sends a request: by_authorization, anyone, "
                f"or a function of yours, and not {identity!r}. {_EXAMPLE}"
            )
        if isinstance(unstored_headers, str):
            raise ApplicationError(f"unstored_headers takes several names: write [{unstored_headers!r}]")
        if max_open_keys is not None and max_open_keys < 1:
            raise ApplicationError(f"max_open_keys is at least 1, or None for no limit, not {max_open_keys!r}")
        if manager is not None and ttl is not None:
            manager.checked_ttl(ttl)
        self.app = app
        self._manager = manager
        self._container = container
        self._required = required
        self._identity = identity
        self._methods = frozenset(method.upper() for method in methods)
        self._paths = None if paths is None else [compile_path(_plain(path))[0] for path in paths]
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
        if self._mistake is not None:
            raise self._mistake
        if scope["type"] != "http" or not self._guards(scope):
            await self.app(scope, receive, send)
            return
        if "dishka_container" in (scope.get("state") or {}):
            raise ApplicationError(
                "IdempotencyKeyMiddleware stands within Dishka's middleware, and would remember a response before its "
                "scope has committed: for the application, not a route, add it after setup_dishka(container, app); in "
                "Litestar by app.asgi_handler = IdempotencyKeyMiddleware(app.asgi_handler, manager)"
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
            who = await self._who(connection)
        except HTTPException as error:
            await self._problems.not_let_in(error).send(send)
            return
        if self._max_open_keys is not None and self._open_keys[who] >= self._max_open_keys:
            await self._problems.too_many(self._max_open_keys).send(send)
            return
        with self._opened(who):
            await self._guard(connection, who, key, receive, send)

    @contextmanager
    def _opened(self, who: str) -> Iterator[None]:
        """Count one more request that `who` has open."""
        self._open_keys[who] += 1
        try:
            yield
        finally:
            self._open_keys[who] -= 1
            if not self._open_keys[who]:
                del self._open_keys[who]  # or each caller ever seen would stay in memory

    async def _guard(self, connection: HTTPConnection, who: str, key: str, receive: Receive, send: Send) -> None:
        body = await _body_of(receive, self._max_request_bytes)
        if body is None:
            return  # the client has gone before it had said what it wants
        if len(body) > self._max_request_bytes:
            await self._problems.too_large(self._max_request_bytes).send(send)
            return
        manager = await self._manager_of()
        request = _Request(self.app, _held_back(connection.scope), receive, send, body)
        await self._answer(manager, request, self._work(manager, connection, who, key, body))

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan on to the application, whose startup fails if requests could not be guarded.

        Raises:
            ApplicationError: It fails; the server has been notified.
        """
        failure = self._mistake
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
        """Start the application, then ask the container for its manager: the startup may be what provides it."""
        failures: list[ApplicationError] = []

        async def receive_until_failure() -> Message:
            # The application closes what its startup has opened.
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
            logger.exception("the application failed to shut down after its guard had failed to start")
        return failures[0] if failures else None

    async def _failure_to_start(self) -> ApplicationError | None:
        try:
            manager = await self._manager_of()
            if self._ttl is not None:
                manager.checked_ttl(self._ttl)
        except ApplicationError as error:
            return error
        except Exception as error:  # noqa: BLE001  # of Dishka's, or of a provider
            failure = ApplicationError(f"the container of IdempotencyKeyMiddleware gives no manager: {error}")
            failure.__cause__ = error
            return failure
        return None

    def _guards(self, scope: Scope) -> bool:
        if scope["method"] not in self._methods:
            return False
        return self._paths is None or any(path.match(_plain(_path_within(scope))) for path in self._paths)

    def _key_in(self, given: list[str]) -> str | None:
        if len(given) != 1:
            return None
        value = given[0].strip(" \t")
        if (quoted := _QUOTED.fullmatch(value)) and 0 < len(value) - 2 <= LONGEST_KEY:
            return re.sub(r"\\(.)", r"\1", quoted[1])
        return value if self._bare_keys and len(value) <= LONGEST_KEY and _BARE.fullmatch(value) else None

    async def _who(self, connection: HTTPConnection) -> str:
        told: object = self._identity(connection)
        if inspect.isawaitable(told):
            told = await told
        if not isinstance(told, str):
            # Were it made a string here, a caller without a name would be one called "None".
            raise ApplicationError(f"identity says who asks by a string, and said {type(told).__name__}")
        return told

    async def _manager_of(self) -> IdempotencyManager:
        if self._manager is None:
            assert self._container is not None
            self._manager = await self._container.get(IdempotencyManager)
        return self._manager

    def _work(self, manager: IdempotencyManager, connection: HTTPConnection, who: str, key: str, body: bytes) -> Work:
        scope = connection.scope
        path = scope.get("root_path", "").rstrip("/") + _path_within(scope)
        host = None if self._share_hosts else _host_of(connection)
        payload = b"\n".join(
            (scope.get("query_string", b""), connection.headers.get("content-type", "").encode("latin-1"), body)
        )
        return Work(
            manager.space.key(key_of_request(who, host, scope["method"], path, key)),
            fingerprint(payload),
            None if self._ttl is None else manager.checked_ttl(self._ttl),
            gives_up=False,
        )

    async def _answer(self, manager: IdempotencyManager, request: _Request, work: Work) -> None:
        async def one_pass() -> Outcome[object]:
            return await manager.executor.execute(work, lambda attempt: self._run(request, manager, work, attempt))

        policy = OnInProgress.RAISE if self._wait is None else OnInProgress.WAIT
        try:
            for _ in range(_LOOKS_AT_A_REFUSAL):
                outcome = await manager.outcome(work, one_pass, on_in_progress=policy, wait_timeout=self._wait)
                if not _was_refused(outcome, manager):
                    break
                await asyncio.sleep(_LOOK_SECONDS)
        except InProgressError:
            await self._problems.in_progress().send(request.send)
        except ResultNotStoredError as error:
            # The caller is told what has happened, and has no reason to try again.
            logger.error("%s", error)
            await request.send_held_back()
        except (StoreError, LeaseLostError) as error:
            logger.error("%s", error)
            if not request.begun:
                await self._problems.unavailable(error).send(request.send)
        else:
            if _was_refused(outcome, manager):
                await self._problems.in_progress().send(request.send)
            else:
                await self._end(request, outcome)

    async def _run(self, request: _Request, manager: IdempotencyManager, work: Work, attempt: Attempt) -> object:
        with _LeaseCheck(run_of(attempt), manager.scope):
            captured = await request.run(manager.config.max_result_size_bytes)
        if captured.status is None or captured.streams:
            raise _NoOutcomeError(captured.streams)
        if not self._stored(captured.status):
            if captured.status >= 500:
                raise _NoOutcomeError(captured.streams)
            # A refusal leaves no record: a flood of them must not fill the store.
            work.forgotten = True
            return NOT_KEPT
        if captured.response is None or not manager.config.enable_result_caching:
            return NOT_KEPT
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
                        printable(request.scope["path"]),
                        printable(error.streams),
                    )
                await request.send_held_back()
            case HandlerFailed():
                if request.answered_by_an_error:
                    await request.send_held_back()
                raise outcome.error
            case _:
                await self._problems.again(outcome).send(request.send)


def _was_refused(outcome: Outcome[object], manager: IdempotencyManager) -> bool:
    """Whether another request with this key has just been refused, and its record is about to vanish."""
    # Where responses are kept, only such a record has neither a response nor a note that it was too large.
    is_bare = isinstance(outcome, Completed) and outcome.result is None and not outcome.result_dropped
    return is_bare and manager.config.enable_result_caching


class _LeaseCheck:
    """The check of one run of the application.  Leaving the block raises its refusal, if there was one."""

    def __init__(self, run: ActiveRun | None, scope: str) -> None:
        self._run = run
        self._scope = scope
        self._refusal: LeaseLostError | None = None

    def make(self) -> None:
        """Look at the lease now.

        Raises:
            LeaseLostError: Too little is left of it.
        """
        run = self._run
        if run is None or run.lease is None:
            return  # a policy lets it run without a lease
        if run.is_over or run.lease.is_late():
            held = run.attempt
            lease = run.lease.reservation.lease
            self._refusal = LeaseLostError(held.label, held.number, lease, self._scope, late=True)
            raise self._refusal

    def __enter__(self) -> None:
        self._token = _LEASE_CHECK.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LEASE_CHECK.reset(self._token)
        # A framework may have made a response of it, or another error; a cancellation goes on.
        if self._refusal is None or error is self._refusal or not isinstance(error, Exception | None):
            return
        raise self._refusal from error


_LEASE_CHECK: ContextVar[_LeaseCheck | None] = ContextVar("the check of the request being answered", default=None)
"""Threads and tasks of the application inherit it."""


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

    @property
    def answered_by_an_error(self) -> bool:
        """Whether the response says that the application failed; after any other one it has failed nevertheless."""
        return self.captured is not None and self.captured.status is not None and self.captured.status >= 500

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


_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def _host_of(connection: HTTPConnection) -> str:
    """The host that the client asked for, without the port that its scheme implies."""
    host = ",".join(connection.headers.getlist("host")).strip().lower()
    return host.removesuffix(_DEFAULT_PORTS.get(connection.scope.get("scheme", "http"), ""))


def _path_within(scope: Scope) -> str:
    """The path as the application's routes have it, whether or not the server puts the root path before it."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else path


def _plain(path: str) -> str:
    """Without the slashes that some routers overlook, so that nobody gets round the guard by them."""
    return "/" + "/".join(part for part in path.split("/") if part)


def _held_back(scope: Scope) -> Scope:
    """`scope` for an application whose response comes to us whole."""
    offered = scope.get("extensions") or {}
    if not offered.keys() & _BODY_ELSEWHERE:
        return scope
    return {**scope, "extensions": {name: how for name, how in offered.items() if name not in _BODY_ELSEWHERE}}
