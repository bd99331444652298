"""`@idempotent`: run a function once per key, across all processes.

    @idempotent(key="refund:{order_id}", ttl=timedelta(days=1), lock_timeout=timedelta(seconds=10))
    async def refund(order_id: str, amount: Decimal) -> Refund: ...

    await refund("7", Decimal("30"))      # runs the function
    await refund("7", Decimal("30"))      # returns the same Refund without running it

Like the other entry points, it calls `IdempotencyManager.run_work`.
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
from integr8s_idem.engine.reconciliation import Question
from integr8s_idem.engine.results import materialized, refuse_generator, return_type_of, why_unreadable
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.functions.argument_keys import FingerprintSource, KeySource, fingerprint_maker, key_maker
from integr8s_idem.functions.arguments import Arguments
from integr8s_idem.functions.reconcilers import reconciler
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
    reconcile: Callable[..., object] | None = None,
    manager: IdempotencyManager | None = None,
    container: Container | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Run a function once per key; every other caller gets the result of the first run.

    Decorate functions and methods, `async def` or `def`.  A plain `def` runs in the calling thread, which must not run
    an event loop.  Stored results are converted to the type of the function's return annotation.

    The manager is, in this order: an argument of the call that is an `IdempotencyManager` (for example injected by
    `FromDishka[...]`), `manager`, the manager of `container`, or that of the container of the event being handled.

    Args:
        key: Identifies the work: a template with parameter names (`"refund:{order.id}"`), dotted fields
            (`["order.id", "currency"]`), or a function, which receives the arguments that its parameters name.
        ttl: How long the outcome is kept, by the store's clock: a `timedelta`, or seconds; as configured if `None`.
        lock_timeout: How long to wait for a concurrent duplicate, by this process's clock; as configured if `None`.
        scope: Scope of the key, instead of the manager's scope.
        fingerprint: The payload that a later use of the key must match: dotted fields, or a function of the arguments.
            Without it calls with equal keys are duplicates.  Records made with other fields are not compared.
        re_execute_on_read: Store no outcome, not even a failure: a later call runs again, but never concurrently.
        on_failure: What a failed run means for the next call; as configured if `None`.
        reconcile: Finds out whether an earlier attempt has had its effect, and is asked before each run that may repeat
            it; see `integr8s_idem.reconciliation`.  It is `async def` or `def` like the function, and receives the
            arguments that its parameters name.
        manager: The manager that guards the function.
        container: A Dishka `AsyncContainer` that provides a manager.

    Raises:
        InvalidKeyError: At decoration: the key uses a parameter that the function does not have.
        ApplicationError: At decoration: contradictory arguments, a return annotation to which a stored result cannot
            be converted, or a generator function, which returns before its work is done.
            At a call: no manager was found, the call requests a key that it is running itself, or a plain function is
            called in the thread of an event loop.
        OutcomeUnknownError: At a call: `reconcile` answered `Unknown`; call again after its `delay`.
        IdempotencyConflictError: At a call: a concurrent duplicate is still running after `lock_timeout`.
        IdempotencyError: At a call: any error of `IdempotencyManager.run`.
        BaseException: At a call: any error of the function, unchanged.  If it is not an `Exception`, the key stays
            reserved until the lease ends, as after a crash.
    """
    parsed_ttl, longest_wait = duration(ttl, "ttl"), duration(lock_timeout, "lock_timeout")
    _check_options(manager, container, parsed_ttl)
    block = None if on_failure is None else chosen(OnFailure, on_failure, "on_failure")
    if re_execute_on_read and (ttl is not None or block is not None):
        raise ApplicationError(
            "re_execute_on_read stores no outcome, so ttl and on_failure have no effect: remove them"
        )
    if re_execute_on_read and reconcile is not None:
        raise ApplicationError(
            "re_execute_on_read runs the function for each call, so the effect of an earlier call says nothing about "
            "this one: remove reconcile"
        )

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = getattr(function, "__qualname__", repr(function))
        _check_function(function, name)
        signature = inspect.signature(function)
        guard = _Guard(
            function,
            name,
            signature,
            key_maker(key, signature, name),
            fingerprint_maker(fingerprint, signature, name, function),
            parsed_ttl,
            longest_wait,
            scope,
            re_execute_on_read,
            block,
            None if reconcile is None else reconciler(reconcile, signature, function),
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
        raise ApplicationError("@idempotent takes either manager or container, not both")
    if manager is not None and ttl is not None:
        manager.checked_ttl(ttl)


def _check_function(function: Callable[..., object], name: str) -> None:
    if inspect.isclass(function):
        raise ApplicationError(f"{name} is a class, and its instances cannot be stored: decorate one of its methods")
    if isinstance(function, staticmethod | classmethod):
        raise ApplicationError(f"put @idempotent below @{type(function).__name__} of {name}, nearest to the function")
    refuse_generator(function)
    if (why := why_unreadable(return_type_of(function))) is not None:
        raise ApplicationError(f"the result of {name} cannot be restored for a later caller: {why}")


@dataclass(frozen=True, slots=True)
class _Guard:
    """A decorated function and its options."""

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
    reconcile: Callable[[Arguments], Any] | None
    manager: IdempotencyManager | None
    container: Container | None

    async def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call(args, kwargs)

        async def work(_: Attempt) -> Any:
            return await self.function(*args, **kwargs)

        question: Question | None = None
        if (reconcile := self.reconcile) is not None:

            async def ask(_: Attempt) -> Any:
                return await reconcile(call)

            question = ask
        return await self._run(await self._manager_of(call), call, work, question)

    def run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_a_loop():
            raise ApplicationError(
                f"{self.name} is a plain function, and calling it here would block the running event loop: "
                f"write `await asyncio.to_thread({self.name.rpartition('.')[2]}, …)`, or make it an async def"
            )
        call = self._call(args, kwargs)
        manager = self._known(call) or wait_for(own_loop(), lambda _: self._manager_of(call))

        async def guard(here: Here) -> Any:
            async def work(attempt: Attempt) -> Any:
                # A lazy iterator is consumed in the function's thread and does not block the event loop.
                value = await here(lambda: materialized(self.function(*args, **kwargs), self.function), attempt)
                refuse_awaitable(value, self.function)
                return value

            question: Question | None = None
            if (reconcile := self.reconcile) is not None:

                async def ask(attempt: Attempt) -> Any:
                    return await here(lambda: reconcile(call), attempt, is_work=False)

                question = ask
            return await self._run(manager, call, work, question)

        return wait_for(manager.running_loop or own_loop(), guard)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # Dishka's integrations add parameters to the signature of injected functions, and pass only some of them.
        injected = hasattr(self.function, "__dishka_injected__")
        return Arguments(self.signature, args, kwargs, injected=injected)

    async def _run(
        self,
        manager: IdempotencyManager,
        call: Arguments,
        work: Callable[[Attempt], Awaitable[Any]],
        question: Question | None,
    ) -> Any:
        if self.scope is not None:
            manager = manager.in_scope(self.scope)
        ttl = None if self.ttl is None else manager.checked_ttl(self.ttl)
        request = Work(
            manager.space.key(self.key(call)),
            self.fingerprint(call),
            ttl,
            on_failure=self.on_failure,
            forgotten=self.forgotten,
        )
        return await manager.run_work(
            request,
            work,
            returns=self.function,
            on_in_progress=self._policy(manager),
            wait_timeout=self.lock_timeout,
            question=question,
        )

    def _policy(self, manager: IdempotencyManager) -> OnInProgress:
        """Return the policy for a running duplicate.  Skipping is not possible, because the caller expects a result."""
        must_wait = self.lock_timeout is not None or manager.config.on_in_progress is OnInProgress.SKIP
        return OnInProgress.WAIT if must_wait else manager.config.on_in_progress

    def _known(self, call: Arguments) -> IdempotencyManager | None:
        passed = (value for value in call.named.values() if isinstance(value, IdempotencyManager))
        return next(passed, self.manager)

    async def _manager_of(self, call: Arguments) -> IdempotencyManager:
        if (known := self._known(call)) is not None:
            return known
        container = self.container or CURRENT.get(None)
        if container is None:
            raise ApplicationError(
                f"no manager found for {self.name}: write @idempotent(…, manager=manager), or "
                "container=container, or give the function a parameter of type IdempotencyManager"
            )
        return cast("IdempotencyManager", await container.get(IdempotencyManager))
