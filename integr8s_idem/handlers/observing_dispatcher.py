"""`ObservingEventDispatcher`: run every delivery, and find out which of them a guard would have stopped.

Handlers run as with an `EventDispatcher`: their errors are retried and dead-lettered in the same way, and nothing waits
for the store, which is asked in the background.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from integr8s_idem.codecs import Codec
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.observed_work import ObservedWork, Place, WorkObserver
from integr8s_idem.engine.work import Discarded, Executed, Outcome, WaitForStore, Work
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.handler import EventHandler, HandlerExecution
from integr8s_idem.handlers.handler_calls import HandlerFunction, RegisteredHandler, call_with_event
from integr8s_idem.handlers.outgoing import Publisher
from integr8s_idem.handlers.router import EventRouter, Invoke
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.stores.outbox import OutboxStore
from integr8s_idem.telemetry import Gauge


class ObservedExecution(HandlerExecution):
    """An unguarded execution whose attempts are observed.

    The key is computed once, before the handler can modify the event.
    """

    __slots__ = ("_observed", "_work", "place")
    handler: ObservingEventHandler

    def __init__(self, handler: ObservingEventHandler, event: BaseEvent, generation: int = 0) -> None:
        super().__init__(handler, event, generation)
        self.place: Place | None = None
        """Where its message is, if it has one.  Set before the first attempt."""
        self._observed: ObservedWork | None = None
        self._work = handler.work_of(event, generation)

    async def attempt(self, *, wait_for_store: WaitForStore | None = None) -> Outcome[Any]:
        if self._work is None:
            return await super().attempt(wait_for_store=wait_for_store)
        if self._observed is None:
            self._observed = self.handler.work_observer.observed(self._work, self.place)
        self._observed.begin()
        is_done = False
        try:
            outcome = await super().attempt(wait_for_store=wait_for_store)
            is_done = isinstance(outcome, Executed | Discarded)
            return outcome
        finally:
            self._observed.end(is_done=is_done)


class ObservingEventHandler(EventHandler):
    """A handler whose deliveries are observed.  Calling it makes one attempt."""

    def __init__(
        self, function: HandlerFunction, work_observer: WorkObserver, resolver: KeyResolver, **options: Any
    ) -> None:
        """`options`: those of `EventHandler`."""
        super().__init__(function, **options)
        self.work_observer = work_observer
        self.resolver = resolver

    def execution(self, event: BaseEvent, generation: int = 0) -> ObservedExecution:
        return ObservedExecution(self, event, generation)

    def work_of(self, event: BaseEvent, generation: int) -> Work | None:
        """Return the work to observe; `None` if no key can be made, which is counted."""
        try:
            keyed = self.resolver.resolve(self.name, event, generation)
        except Exception as error:  # noqa: BLE001  # a key function is the user's code; the handler runs without it
            self.work_observer.note_no_key(event.event_type, error)
            return None
        key = keyed.key.hidden() if self.work_observer.space.hash_keys else keyed.key
        return Work(key, keyed.fingerprint, event_type=event.event_type, handler=self.name)


class ObservingEventDispatcher(EventDispatcher):
    """Runs the handlers of a router for every delivery, and counts the duplicates."""

    manager: IdempotencyManager
    ttl: timedelta
    resolver: KeyResolver
    """Creates the keys."""
    waits_for_store = False

    def __init__(
        self,
        router: EventRouter,
        manager: IdempotencyManager,
        *,
        resolver: KeyResolver | None = None,
        ttl: Duration | None = None,
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        timeout: Duration | None = None,
        outbox: OutboxStore | None = None,
        codec: Codec | None = None,
        failures: Iterable[FailureRule] = (),
    ) -> None:
        """Create a dispatcher with the arguments of an `IdempotentEventDispatcher`.

        Args:
            outbox: An outbox that a relay empties.  Handlers publish without it, since they are not transactional.

        Raises:
            InvalidKeyError: The resolver cannot create a key for an event of the router.
        """
        self.manager = manager
        self.resolver = resolver or KeyResolver()
        own = duration(ttl, "ttl")
        self.ttl = manager.config.ttl if own is None else manager.checked_ttl(own)
        self.outbox = outbox
        for event in router.events:
            self.resolver.check(event)
        self._work_observer = WorkObserver(manager, self.ttl)
        super().__init__(
            router,
            scope=manager.scope,
            invoke=invoke,
            publisher=publisher,
            observer=manager.observer,
            timeout=timeout,
            max_attempts=manager.config.max_attempts,
            codec=codec,
            failures=failures,
        )
        self.observer.measure(Gauge.OBSERVE_TTL, self.ttl.total_seconds())

    def wrap(self, registered: RegisteredHandler) -> ObservingEventHandler:
        return ObservingEventHandler(
            registered.function,
            self._work_observer,
            self.resolver,
            scope=self._scope,
            observer=self.observer,
            max_attempts=self._max_attempts,
            **self._options_of(registered),
        )
