"""`@idempotent`: a function that does its work once per key, wherever it is called.

    @idempotent(key="refund:{order_id}", ttl=timedelta(days=1), lock_timeout=timedelta(seconds=10))
    async def refund(order_id: str, amount: Decimal) -> Refund: ...

    await refund("7", Decimal("30"))      # does it
    await refund("7", Decimal("30"))      # the same Refund, and nothing is done

What stands behind it is `IdempotencyManager.run_work`, as behind every other way in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar, cast

from integr8s_idem._util.context_vars import CURRENT, Container
from integr8s_idem.config import OnFailure, OnInProgress, chosen
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import materialized, refuse_generator, return_type_of, why_unreadable
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.functions.argument_keys import Arguments, FingerprintSource, KeySource, fingerprint_maker, key_maker
from integr8s_idem.functions.sync_bridge import Here, in_a_loop, is_async, own_loop, refuse_awaitable, wait_for

__all__ = ["idempotent"]

P = ParamSpec("P")
T = TypeVar("T")


def idempotent(
    *,
    key: KeySource,
    ttl: Duration | None = None,
    lock_timeout: Duration | None = None,
    scope: str | None = None,
    fingerprint: FingerprintSource | None = None,
    re_execute_on_read: bool = False,
    on_failure: OnFailure | Literal["retry", "block"] | None = None,
    manager: IdempotencyManager | None = None,
    container: Container | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Do the work of a function once per key; every other caller gets the first one's result.

    For `async def` and `def`, functions and methods.  A plain `def` runs in the thread that calls it, and that
    must not be the event loop's.  A result comes back as the type that the function's return annotation names.

    The manager is that of an argument of the call, if one is an `IdempotencyManager` (as `FromDishka[...]` fills
    it in); that of the decorator; that of `container`; or that of the container of the event being handled.

    Args:
        key: Names the work: a template over the parameters (`"refund:{order.id}"`), dotted fields
            (`["order.id", "currency"]`), or a function, which is given the arguments that its parameters name.
        ttl: How long the outcome is remembered, by the store's clock: a `timedelta`, or seconds; as configured if
            `None`.
        lock_timeout: How long to wait for a running twin, by this process's clock; as configured if `None`.
        scope: Who does the work, if not the manager's scope.
        fingerprint: What a second use of the key must bring again: dotted fields, or what a function of the
            arguments returns.  Without it equal keys mean equal work.
        re_execute_on_read: Remember no outcome, a failure neither: a later call runs again, but never while another
            one runs.
        on_failure: What a failed run means for the next call; as configured if `None`.
        manager: Guards the function.
        container: A Dishka `AsyncContainer` that has a manager.

    Raises:
        InvalidKeyError: At decoration: the key names what the function does not take.
        ApplicationError: At decoration: contradicting arguments, a result that can never come back as the return
            annotation says, or a generator, which returns before its work.
            At a call: nobody has named a manager, the call asks for the key that it is itself working on, or
            a plain function is called in the event loop's thread.
        IdempotencyConflictError: At a call: a twin is running still after `lock_timeout`.
        IdempotencyError: At a call: as `IdempotencyManager.run`.
    """
    kept, longest_wait = duration(ttl, "ttl"), duration(lock_timeout, "lock_timeout")
    _check_options(manager, container, kept)
    block = None if on_failure is None else chosen(OnFailure, on_failure, "on_failure")
    if re_execute_on_read and (ttl is not None or block is not None):
        raise ApplicationError(
            "re_execute_on_read remembers no outcome, so that ttl and on_failure mean nothing to it: leave them out"
        )

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = getattr(function, "__qualname__", repr(function))
        _refuse_what_cannot_be_guarded(function, name)
        signature = inspect.signature(function)
        guard = _Guard(
            function,
            name,
            signature,
            key_maker(key, signature, name),
            fingerprint_maker(fingerprint, signature, name),
            kept,
            longest_wait,
            scope,
            re_execute_on_read,
            block,
            manager,
            container,
        )
        if is_async(function):

            @functools.wraps(function)
            async def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await guard.run(args, kwargs)

            return cast("Callable[P, T]", guarded)

        @functools.wraps(function)
        def guarded_plain(*args: P.args, **kwargs: P.kwargs) -> T:
            return cast("T", guard.run_plain(args, kwargs))

        return guarded_plain

    return decorate


def _check_options(manager: IdempotencyManager | None, container: Container | None, ttl: timedelta | None) -> None:
    if manager is not None and container is not None:
        raise ApplicationError("@idempotent takes a manager or a container that has one, not both")
    if manager is not None and ttl is not None:
        manager.checked_ttl(ttl)


def _refuse_what_cannot_be_guarded(function: Callable[..., object], name: str) -> None:
    if inspect.isclass(function):
        raise ApplicationError(f"{name} is a class, and what it makes cannot be given again: guard one of its methods")
    if isinstance(function, staticmethod | classmethod):
        raise ApplicationError(f"put @idempotent below @{type(function).__name__} of {name}, nearest to the function")
    refuse_generator(function)
    if (why := why_unreadable(return_type_of(function))) is not None:
        raise ApplicationError(f"{name} returns what cannot be read again for a second caller: {why}")


@dataclass(frozen=True, slots=True)
class _Guard:
    """One decorated function and how it is guarded."""

    function: Callable[..., Any]
    name: str
    signature: inspect.Signature
    key: Callable[[Arguments], str]
    fingerprint: Callable[[Arguments], bytes | None]
    ttl: timedelta | None
    lock_timeout: timedelta | None
    scope: str | None
    forgotten: bool
    on_failure: OnFailure | None
    manager: IdempotencyManager | None
    container: Container | None

    async def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call(args, kwargs)

        async def work(_: Attempt) -> Any:
            return await self.function(*args, **kwargs)

        return await self._run(await self._manager_of(call), call, work)

    def run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_a_loop():
            raise ApplicationError(
                f"{self.name} is a plain function, and its guard would stop the event loop that it is called in: "
                f"write `await asyncio.to_thread({self.name.rpartition('.')[2]}, …)`, or make it an async def"
            )
        call = self._call(args, kwargs)
        manager = self._known(call) or wait_for(own_loop(), lambda _: self._manager_of(call))

        async def guard(here: Here) -> Any:
            async def work(attempt: Attempt) -> Any:
                # A lazy iterator runs in the thread of its function, and does not block the event loop.
                value = await here(lambda: materialized(self.function(*args, **kwargs), self.function), attempt)
                refuse_awaitable(value, self.function)
                return value

            return await self._run(manager, call, work)

        return wait_for(manager.running_loop or own_loop(), guard)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # Dishka's frameworks add parameters to the signature of what they inject into, and give some of them.
        injected = hasattr(self.function, "__dishka_injected__")
        return Arguments(self.signature, args, kwargs, injected=injected)

    async def _run(
        self, manager: IdempotencyManager, call: Arguments, work: Callable[[Attempt], Awaitable[Any]]
    ) -> Any:
        if self.scope is not None:
            manager = manager.in_scope(self.scope)
        ttl = None if self.ttl is None else manager.checked_ttl(self.ttl)
        asked = Work(
            manager.space.key(self.key(call)),
            self.fingerprint(call),
            ttl,
            on_failure=self.on_failure,
            forgotten=self.forgotten,
        )
        return await manager.run_work(
            asked, work, returns=self.function, on_in_progress=self._policy(manager), wait_timeout=self.lock_timeout
        )

    def _policy(self, manager: IdempotencyManager) -> OnInProgress:
        """To skip is no answer here: a caller wants a value of the type that the function names."""
        asked = self.lock_timeout is not None or manager.config.on_in_progress is OnInProgress.SKIP
        return OnInProgress.WAIT if asked else manager.config.on_in_progress

    def _known(self, call: Arguments) -> IdempotencyManager | None:
        given = (value for value in call.named.values() if isinstance(value, IdempotencyManager))
        return next(given, self.manager)

    async def _manager_of(self, call: Arguments) -> IdempotencyManager:
        if (known := self._known(call)) is not None:
            return known
        container = self.container or CURRENT.get(None)
        if container is None:
            raise ApplicationError(
                f"nobody has named a manager for {self.name}: write @idempotent(…, manager=manager), or "
                "container=container, or give the function a parameter of type IdempotencyManager"
            )
        return cast("IdempotencyManager", await container.get(IdempotencyManager))
