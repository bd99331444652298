"""Leases of this process: renewed in batches, given up before they end.

A handler whose lease could not be renewed is cancelled a little before the lease ends, by this
process's monotonic clock: by the time somebody else may start, we have stopped.  The store's token
covers what no clock of ours can see, such as a process that was stopped as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from itertools import groupby
from types import TracebackType
from typing import Final, TypeAlias

from integr8s_idem.deadlines import Deadline
from integr8s_idem.errors import LeaseLostError, StoreError
from integr8s_idem.records import Reserved
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer, Signal

RENEW_AFTER: Final = 1 / 3
"""Share of the lease after which it is renewed: two renewals may be lost before the third is too late."""

RETRY_AFTER: Final = 1 / 12
"""Share of the lease after which a renewal that got no answer is tried again."""


ReserveAnew: TypeAlias = Callable[[], Awaitable[Reserved | None]]


def fence_margin(lease: float) -> float:
    """Seconds before the end of a lease at which its handler is cancelled: a tenth, at most one second."""
    return min(lease / 10, 1.0)


class HeldLease(Deadline):
    """One lease while its handler runs.  Leaving the block raises `LeaseLostError` if it was cut short.

    As a deadline it ends a little before the lease does, and moves on with every renewal.
    """

    __slots__ = ("_keeper", "_renewed", "deadline", "renew_at", "reservation", "reserve_anew", "withdrawn")

    def __init__(
        self, keeper: LeaseKeeper, reservation: Reserved, asked_at: float, reserve_anew: ReserveAnew, renewed: bool
    ) -> None:
        super().__init__(None)
        self._keeper = keeper
        self._renewed = renewed
        self.reserve_anew = reserve_anew
        self.reservation = reservation
        self.withdrawn = False
        """Whether the store has answered a renewal that it holds it as ours no more."""
        self.deadline = 0.0
        """When the lease ends at the earliest, by the event loop's clock."""
        self.renew_at = 0.0
        self.when = self._count_from(asked_at, reservation.lease.total_seconds())

    @property
    def lost(self) -> bool:
        """Whether the handler was cancelled for the lease's sake."""
        return self.expired

    def renewed(self, asked_at: float, lease: float) -> None:
        """The store has answered yes to a renewal asked for at `asked_at`."""
        self.reschedule(self._count_from(asked_at, lease))

    def lose(self) -> None:
        """The store has answered no: cancel the handler now."""
        self.withdrawn = True
        self.reschedule(asyncio.get_running_loop().time())

    def _count_from(self, asked_at: float, lease: float) -> float:
        """When the handler is cancelled unless the lease is renewed, by the event loop's clock."""
        # From the asking, not from the answer: the store's lease began somewhere between the two.
        self.deadline = asked_at + lease
        self.renew_at = asked_at + lease * RENEW_AFTER
        return self.deadline - fence_margin(lease)

    def __enter__(self) -> HeldLease:
        super().__enter__()
        if self._renewed:
            self._keeper.take(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.drop(self)
        try:
            super().__exit__(kind, error, trace)
        except TimeoutError:
            held = self.reservation
            raise LeaseLostError(
                held.key, held.attempt, held.lease, self._keeper.scope, withdrawn=self.withdrawn
            ) from None


class LeaseKeeper:
    """Renews every lease of one manager with as few calls as possible.  Costs one timer while nothing is due."""

    def __init__(self, repository: IdempotencyRepository, scope: str, observer: Observer = SILENT) -> None:
        self.scope = scope
        self._repository = repository
        self._observer = observer
        self._held: set[HeldLease] = set()
        self._timer: asyncio.Handle | None = None
        self._wakes_at = 0.0
        """When the timer fires.  It cannot be asked: for what is due at once, uvloop gives a handle without a time."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewal: asyncio.Task[None] | None = None

    def hold(
        self, reservation: Reserved, asked_at: float, reserve_anew: ReserveAnew, *, renewed: bool = True
    ) -> HeldLease:
        """`with` it around the work.

        Args:
            asked_at: Event-loop time before `reserve` was sent.
            reserve_anew: Asked when the store no longer knows the reservation: a new one if the record
                is merely gone, `None` if somebody else had the key since.
            renewed: Whether it lasts as long as the work does; otherwise the work has this one lease.
        """
        return HeldLease(self, reservation, asked_at, reserve_anew, renewed)

    def take(self, lease: HeldLease) -> None:
        """Look after `lease` from now on."""
        self._held.add(lease)
        self._wake_at(lease.renew_at)

    def drop(self, lease: HeldLease) -> None:
        """Look after `lease` no longer."""
        self._held.discard(lease)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Stop renewing.  Whatever still runs will be cancelled when its lease ends."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._renewal is not None:
            self._renewal.cancel()

    def _wake_at(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._loop is loop:  # a timer of an earlier loop never fires
            if self._wakes_at <= when:
                return
            self._timer.cancel()
        self._loop, self._wakes_at = loop, when
        self._timer = loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.get_running_loop().create_task(self._renew_due())
        # Otherwise a renewal still waits for its answer; it looks at the rest when it has it.

    async def _renew_due(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # A little ahead, so that leases taken one after the other share a call.
            due = [
                lease
                for lease in self._held
                if not lease.lost
                and lease.renew_at <= loop.time() + lease.reservation.lease.total_seconds() * RETRY_AFTER
            ]
            due.sort(key=_duration)
            for duration, leases in groupby(due, key=_duration):
                await self._renew(duration, list(leases))
        finally:
            if live := [lease.renew_at for lease in self._held if not lease.lost]:
                self._wake_at(min(live))

    async def _renew(self, duration: timedelta, leases: list[HeldLease]) -> None:
        asked_at = asyncio.get_running_loop().time()
        for lease in leases:  # until the answer says more: whatever goes wrong, the pace stays decent
            lease.renew_at = asked_at + duration.total_seconds() * RETRY_AFTER
        try:
            answers: Iterable[bool] = await self._repository.renew([lease.reservation for lease in leases], duration)
        except StoreError:
            self._observer.count(Signal.STORE_ERROR)
            return
        for lease, still_ours in zip(leases, answers, strict=True):
            if lease not in self._held:
                continue
            if still_ours:
                lease.renewed(asked_at, duration.total_seconds())
            else:
                await self._find_out(lease)

    async def _find_out(self, lease: HeldLease) -> None:
        """Our record is gone, or somebody else's: go on in the first case, stop in the second."""
        asked_at = asyncio.get_running_loop().time()
        try:
            again = await lease.reserve_anew()
        except StoreError:
            self._observer.count(Signal.STORE_ERROR)
            return
        if lease not in self._held:
            return
        if again is None:
            lease.renew_at = lease.deadline
            lease.lose()
        else:
            lease.reservation = again
            lease.renewed(asked_at, again.lease.total_seconds())


def _duration(lease: HeldLease) -> timedelta:
    return lease.reservation.lease
