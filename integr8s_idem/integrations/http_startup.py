"""Errors in the setup of the HTTP middleware, which fail the startup of the application."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, cast

from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from integr8s_idem.errors import ApplicationError

logger = logging.getLogger(__name__)

P = ParamSpec("P")

Check: TypeAlias = Callable[[], Awaitable[object]]
"""Raises if requests could not be guarded."""

EXAMPLE: Final = "Write app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=user_of)"


def reported_at_startup(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
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
                error if isinstance(error, ApplicationError) else ApplicationError(f"{error}. {EXAMPLE}")
            )

    return cast("Callable[Concatenate[Any, P], None]", construct)


def _belongs_to_starlette(app: Any) -> bool:
    """Whether `app` is the application inside the middleware of Starlette or FastAPI, and not a route."""
    while app is not None and not isinstance(app, ExceptionMiddleware):
        app = getattr(app, "app", None)
    return app is not None


async def refuse_startup(failure: ApplicationError, send: Send) -> None:
    """Fail the startup.

    Raises:
        ApplicationError: `failure`; the server has been notified.
    """
    await send({"type": "lifespan.startup.failed", "message": str(failure)})
    raise failure


async def start_and_check(app: ASGIApp, scope: Scope, receive: Receive, send: Send, check: Check) -> None:
    """Start the application, then make the check: the startup may provide what it needs.

    Raises:
        ApplicationError: The check failed; the application has shut down, and the server has been notified.
    """
    failures: list[ApplicationError] = []

    async def receive_until_failure() -> Message:
        # Let the application close the resources that its startup opened.
        return {"type": "lifespan.shutdown"} if failures else await receive()

    async def send_until_failure(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete" and (failure := await _failure_of(check)):
            failures.append(failure)
        if not failures:
            await send(message)

    try:
        await app(scope, receive_until_failure, send_until_failure)
    except Exception:
        if not failures:
            raise
        logger.exception("the application failed to shut down after IdempotencyKeyMiddleware had failed to start")
    if failures:
        await refuse_startup(failures[0], send)


async def _failure_of(check: Check) -> ApplicationError | None:
    try:
        await check()
    except ApplicationError as error:
        return error
    except Exception as error:  # noqa: BLE001  # raised by Dishka or by a provider
        failure = ApplicationError(f"the container of IdempotencyKeyMiddleware cannot provide a manager: {error}")
        failure.__cause__ = error
        return failure
    return None
