"""Handlers with a reconcile function, which is asked before each run that may repeat an effect.

It is called like the handler: in a REQUEST scope of its own, under the lease and the timeout of the handler, and after
the same check of the lease.  Its events are published if it answers `Done`, and have the ids of the handler's events.
"""

from __future__ import annotations

from typing import Any

from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.reconciliation import ask, may_follow_an_effect
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler import EventHandler, GuardedExecution, HandlerExecution, IdempotentEventHandler
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, HandlerFunction, RegisteredHandler
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.reconciliation import Done, ReconcileFunction
from integr8s_idem.telemetry import Signal


class ReconcilingExecution(GuardedExecution):
    """All attempts of a handler with a reconcile function at one event."""

    __slots__ = ("has_started", "is_reconciled")

    def __init__(self, handler: ReconcilingEventHandler, event: BaseEvent, generation: int = 0) -> None:
        super().__init__(handler, event, generation)
        self.has_started = False
        """Whether this process has started the handler, which the record does not say once it has vanished."""
        self.is_reconciled = False
        """Whether the reconcile function has found the effect of an earlier attempt."""


class ReconcilingEventHandler(IdempotentEventHandler):
    """A guarded handler with a reconcile function."""

    def __init__(
        self, function: HandlerFunction, manager: IdempotencyManager, *, reconcile: ReconcileFunction, **options: Any
    ) -> None:
        """
        Args:
            reconcile: The reconcile function.
            options: As for `IdempotentEventHandler`.

        Raises:
            ApplicationError: The handler is transactional, so that its database knows the outcome.
        """
        super().__init__(function, manager, **options)
        if self.outbox is not None:
            raise ApplicationError(
                f"handler {self.name} has a reconcile function, but it is transactional: its writes, events and "
                "outcome are committed together, so its outcome is never unknown. Remove reconcile=…, or handle it "
                "without transaction=…"
            )
        event = self._registered.event
        self._reconcile = RegisteredHandler(event, self.name, reconcile, is_reconcile=True)
        # Limits the call as that of a handler, and turns any other error than an Exception into a failure.
        self._asked = EventHandler(
            reconcile,
            name=f"{self.name} (reconcile)",
            event=event,
            scope=manager.scope,
            invoke=self._invoke_reconcile,
            observer=manager.observer,
            timeout=options.get("timeout"),
        )

    def execution(self, event: BaseEvent, generation: int = 0) -> ReconcilingExecution:
        return ReconcilingExecution(self, event, generation)

    async def work(self, execution: HandlerExecution, attempt: Attempt, *, patient: bool = False) -> Any:
        assert isinstance(execution, ReconcilingExecution), "made by `execution`"
        if execution.has_started or may_follow_an_effect(attempt):
            if execution.own_cancellations:
                execution.refuse_if_given_up(attempt.number)
            done = await self._find_effect(execution, attempt, patient)
            if done is not None:
                execution.is_reconciled = True
                self.observer.count(Signal.HANDLED, execution.event.event_type)
                return done.result
        execution.has_started = True
        return await super().work(execution, attempt, patient=patient)

    async def _find_effect(self, execution: ReconcilingExecution, attempt: Attempt, patient: bool) -> Done | None:
        event, outgoing = execution.event, Outgoing()
        call = HandlerCall(event, attempt, outgoing)
        done = await ask(lambda _: self._asked.call(call), attempt, self.observer, event.event_type, self.name)
        if done is not None and outgoing.events:
            await self._publish(outgoing.finished(event, attempt.key, self.scope), patient)
        return done

    async def _invoke_reconcile(self, _: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        return await self.invoke(self._reconcile, call)
