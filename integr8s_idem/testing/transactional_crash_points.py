"""Wrappers with the crash points of transactional handlers and of the relay; see `crash_points` for the others.

    plan = CrashPlan(CrashPoint.AFTER_OUTCOME)
    store = CrashingSqlStore(SqlIdempotencyRepository(engine), plan)       # the container's IdempotencyRepository
    relay = Relay(CrashingOutbox(dispatcher.outbox, plan), CrashingPublisher(kafka_settings, plan), claim_seconds=60)

    class CrashingDispatcherProvider(IdempotentDispatcherProvider):
        def invoker(self, container):
            return crashing_transaction(plan, super().invoker(container))

The application reports the points around its commit, in the provider of its session:

    await plan.around("transaction_commit", session.commit)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from integr8s_idem.engine.work import Transaction
from integr8s_idem.handlers.handler_calls import BatchCall, BeforeCommit, HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.stores.outbox import Backlog, Claim, OutboxStore, Waiting
from integr8s_idem.stores.sql import SqlIdempotencyRepository
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, crashing_invoke

__all__ = ["CrashingOutbox", "CrashingSqlStore", "crashing_transaction"]


class CrashingSqlStore(CrashingStore, SqlIdempotencyRepository):
    """A `CrashingStore` that handlers' transactions can join; writes in these transactions have no points."""

    def __init__(self, inner: SqlIdempotencyRepository, plan: CrashPlan) -> None:
        SqlIdempotencyRepository.__init__(self, inner.engine)
        CrashingStore.__init__(self, inner, plan)


class CrashingOutbox:
    """An outbox with points around the relay's claims, and around the deletion of confirmed rows."""

    def __init__(self, inner: OutboxStore, plan: CrashPlan) -> None:
        self._inner = inner
        self._plan = plan

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._inner.turn()

    def notice(self) -> None:
        self._inner.notice()

    async def arrived(self, at_most: float) -> None:
        await self._inner.arrived(at_most)

    @property
    def has_hints(self) -> bool:
        return self._inner.has_hints

    async def hear_hints(self) -> None:
        await self._inner.hear_hints()

    async def claim(self, length: timedelta) -> Claim | None:
        return await self._plan.around("claim", lambda: self._inner.claim(length))

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        return await self._inner.read(claim, after=after, besides=besides)

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        if not ids:
            return await self._inner.done(claim, ids, length)
        return await self._plan.around("forget", lambda: self._inner.done(claim, ids, length))

    async def check(self) -> None:
        await self._inner.check()

    async def count(self) -> int:
        return await self._inner.count()

    async def backlog(self) -> Backlog:
        return await self._inner.backlog()

    async def tried(self) -> None:
        await self._inner.tried()


def crashing_transaction(plan: CrashPlan, invoke: Invoke) -> Invoke:
    """Wrap an `invoke` that runs handlers in transactions with points around their outcome.  See `crashing_invoke`."""

    async def call(handler: RegisteredHandler, what: HandlerCall | BatchCall) -> Any:
        if isinstance(what, BatchCall) or what.before_commit is None:
            return await invoke(handler, what)
        return await invoke(handler, replace(what, before_commit=_crashing(plan, what.before_commit)))

    return crashing_invoke(plan, call)


def _crashing(plan: CrashPlan, before_commit: BeforeCommit) -> BeforeCommit:
    async def write(result: Any, transaction: Transaction) -> None:
        await plan.around("outcome", lambda: before_commit(result, transaction))

    return write
