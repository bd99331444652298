"""The leases held by this process: checked before each start, renewed in batches, released before they expire.

No handler starts with too little of its lease left: `HeldLease.is_late` is checked immediately before each call, with
a clock that advances while the event loop is blocked.  A handler whose lease could not be renewed is cancelled shortly
before the lease ends, so that it has stopped before another worker may start.  Cases that no local clock can detect,
such as a process that is suspended between the check and the call, are covered by the store's token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextvars import copy_context
from datetime import timedelta
from itertools import groupby
from typing import Final, TypeAlias

from msgspec import Struct

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem._util.lease_clock import Clock, clock_of
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import LeaseLostError, StoreError
from integr8s_idem.records import Reserved
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer, Signal
from integr8s_idem.telemetry.log_fields import logging_with

RENEW_AFTER: Final = 1 / 3
"""Fraction of the lease after which it is renewed; two renewals may fail before the third is too late."""

RETRY_AFTER: Final = 1 / 12
"""Fraction of the lease after which a renewal without an answer is retried."""


class LateStartError(Exception):
    """Too little of a lease was left to start its handler.  Caught by the run, which reserves the work again."""

    def __init__(self, lease: HeldLease) -> None:
        super().__init__()
        self.lease = lease
        """The late lease."""


ReserveAnew: TypeAlias = Callable[[Work], Awaitable[Reserved | None]]


def fence_margin(lease: float) -> float:
    """Return how many seconds before the end of a lease its handler is cancelled: a tenth, at most one second."""
    return min(lease / 10, 1.0)


class LeaseTimes(Struct, frozen=True, gc=False):
    """The times of a lease, in seconds."""

    lease: timedelta
    asked_at: float
    """When it was requested, by the lease clock."""
    start_before: float
    """The latest time to start the handler, by the lease clock."""
    cancel_at: float
    """When to cancel the handler, by the event loop's clock."""
    renew_at: float
    """When to renew the lease, by the event loop's clock."""
    end: float
    """The earliest end of the lease, by the event loop's clock."""


class HeldLease(Deadline):
    """A lease, from its reservation to the end of its handler.

    It is renewed from the beginning until `drop` or `leave`.  Entering it starts the handler's deadline, which is
    shortly before the end of the lease and moves with every renewal.  Exiting the block raises `LeaseLostError` if the
    handler was cancelled.
    """

    __slots__ = ("_keeper", "deadline", "now", "renew_at", "reservation", "start_before", "withdrawn", "work")

    def __init__(self, keeper: LeaseKeeper, reservation: Reserved, times: LeaseTimes, work: Work) -> None:
        # As `Deadline.__init__`; a call would cost as much as the assignments.
        self.when = times.cancel_at
        self.expired = False
        self._clock = None
        self._keeper = keeper
        self.now = keeper.now
        self.work = work
        self.reservation = reservation
        self.withdrawn = False
        """Whether the store has rejected a renewal because this process no longer holds the key."""
        self.deadline = times.end
        """The earliest end of the lease, by the event loop's clock."""
        self.renew_at = times.renew_at
        """The time of the next renewal, by the event loop's clock."""
        self.start_before = times.start_before
        """The latest time to start the handler, by the lease clock."""

    def is_late(self) -> bool:
        """Whether too little of the lease is left to start its handler now.  Thread-safe."""
        return self.now() >= self.start_before

    @property
    def lost(self) -> bool:
        """Whether the handler was cancelled because of the lease."""
        return self.expired

    def renewed(self, asked_at: float, lease: timedelta) -> None:
        """Extend the lease after a successful renewal that was requested at `asked_at`, by the lease clock."""
        times = self._keeper.times_of(lease, asked_at)
        self.start_before, self.deadline, self.renew_at = times.start_before, times.end, times.renew_at
        self.reschedule(times.cancel_at)

    def lose(self) -> None:
        """Cancel the handler, or prevent its start, after the store has rejected a renewal."""
        self.withdrawn = True
        self.start_before = float("-inf")
        self.reschedule(asyncio.get_running_loop().time())
        if not self.entered:
            self.drop()

    def has_grace(self, now: float) -> bool:
        """Whether the handler may finish after its cancellation: only until the lease ends."""
        return now < self.deadline

    def drop(self) -> None:
        """Stop renewing the lease, whose handler has ended or does not start."""
        self._keeper.held.pop(self, None)

    def leave(self) -> bool:
        self.drop()
        return super().leave()

    def ended(self, error: BaseException | None) -> None:
        try:
            super().ended(error)
        except TimeoutError:
            held = self.reservation
            raise LeaseLostError(
                held.key, held.attempt, held.lease, self._keeper.scope, withdrawn=self.withdrawn
            ) from None


class LeaseKeeper:
    """Renews the leases of one manager with as few calls as possible, using a single timer."""

    def __init__(
        self,
        repository: IdempotencyRepository,
        scope: str,
        reserve_anew: ReserveAnew,
        observer: Observer = SILENT,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            reserve_anew: Called if the store no longer knows the reservation of some work: returns a new one if the
                record was lost, `None` if another worker has had the key.
            clock: The lease clock; that of the event loop if not given.
        """
        self.scope = scope
        self._reserve_anew = reserve_anew
        self._given_clock = clock
        self.now: Clock = clock or self._read_first
        """Returns the time by the lease clock, in seconds.  The first call must be made in the event loop's thread."""
        self._last_times: LeaseTimes | None = None
        self._repository = repository
        self._observer = observer
        self.held: dict[HeldLease, None] = {}
        """In the order in which the leases were taken, which is the order of renewals."""
        self._timer: asyncio.Handle | None = None
        # Of the timer and of the renewals, which serve all runs: not that of the run that set the timer.
        with logging_with(service=scope):
            self._context = copy_context()
        self._wakes_at = 0.0
        """When the timer fires.  uvloop's handle has no time if the timer is due immediately."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewal: asyncio.Task[None] | None = None

    def _read_first(self) -> float:
        self.enter(asyncio.get_running_loop())
        return self.now()

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hold leases in `loop` from now on, by its clock."""
        self._loop, self._timer, self._last_times = loop, None, None
        self.now = self._given_clock or clock_of(loop)

    def leave_loop(self) -> None:
        """Drop the leases of an event loop that no longer runs, so that others can take over their keys."""
        self.held.clear()
        self._loop = self._timer = self._renewal = None

    def times_of(self, lease: timedelta, asked_at: float) -> LeaseTimes:
        """Return the times of a lease that was requested at `asked_at`, by the lease clock; kept for its batch."""
        last = self._last_times
        if last is not None and last.lease is lease and last.asked_at == asked_at:
            return last
        seconds = lease.total_seconds()
        until_margin = seconds - fence_margin(seconds)
        # Count from the request and not from the answer: the store's lease began between the two.
        now = self.now()
        if self._loop is None:  # the clock was given
            self.enter(asyncio.get_running_loop())
        assert self._loop is not None
        began = self._loop.time() - (now - asked_at)
        times = self._last_times = LeaseTimes(
            lease=lease,
            asked_at=asked_at,
            start_before=asked_at + until_margin,
            cancel_at=began + until_margin,
            renew_at=began + seconds * RENEW_AFTER,
            end=began + seconds,
        )
        return times

    def hold(self, reservation: Reserved, asked_at: float, work: Work, *, renewed: bool = True) -> HeldLease:
        """Start to renew a lease.  Use it as a context manager around the work, and `drop` it afterwards.

        Args:
            asked_at: The time by the lease clock before `reserve` was sent.
            renewed: Whether to renew the lease while the work runs; otherwise the work must finish within one lease.
        """
        times = self.times_of(reservation.lease, asked_at)
        lease = HeldLease(self, reservation, times, work)
        if renewed:
            self.take(lease)
        return lease

    def take(self, lease: HeldLease) -> None:
        """Start renewing `lease`."""
        self.held[lease] = None
        if self._timer is None or lease.renew_at < self._wakes_at:
            self._wake_at(lease.renew_at)

    def __len__(self) -> int:
        return len(self.held)

    def close(self) -> None:
        """Stop renewing.  Handlers that still run are cancelled when their leases end."""
        self.held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._renewal is not None:
            self._renewal.cancel()

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            if self._wakes_at <= when:
                return
            self._timer.cancel()
        assert self._loop is not None, "a lease is held"
        self._wakes_at = when
        self._timer = self._loop.call_at(when, self._wake, context=self._context)

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            return  # a timer of an earlier loop, which runs again
        self._timer = None
        if self._renewal is None or self._renewal.done():
            self._renewal = loop.create_task(self._renew_due())
        # Otherwise a renewal is waiting for its answer and will schedule the rest afterwards.

    async def _renew_due(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Renew slightly early, so that leases taken one after the other share a call.
            due = [
                lease
                for lease in self.held
                if not lease.lost
                and lease.renew_at <= loop.time() + lease.reservation.lease.total_seconds() * RETRY_AFTER
            ]
            due.sort(key=_duration)
            for duration, leases in groupby(due, key=_duration):
                await self._renew(duration, list(leases))
        finally:
            if loop is self._loop and (live := [lease.renew_at for lease in self.held if not lease.lost]):
                self._wake_at(min(live))

    async def _renew(self, duration: timedelta, leases: list[HeldLease]) -> None:
        asked_at, next_try = self.now(), asyncio.get_running_loop().time() + duration.total_seconds() * RETRY_AFTER
        for lease in leases:  # limits the rate of renewals if the call fails
            lease.renew_at = next_try
        try:
            answers: Iterable[bool] = await self._repository.renew([lease.reservation for lease in leases], duration)
        except StoreError:
            for event_type, number in Counter(lease.work.event_type for lease in leases).items():
                self._observer.count(Signal.STORE_ERROR, event_type, number)
            return
        for lease, still_held in zip(leases, answers, strict=True):
            if lease not in self.held:
                continue
            if still_held:
                lease.renewed(asked_at, duration)
            else:
                await self._resolve_rejected(lease)

    async def renew_late(self, lease: HeldLease) -> bool:
        """Renew one lease immediately; return whether it is still held with enough time left.

        Raises:
            StoreError: The store did not answer.
        """
        asked_at = self.now()
        duration = lease.reservation.lease
        [still_held] = await self._repository.renew([lease.reservation], duration)
        if still_held:
            lease.renewed(asked_at, duration)
        return still_held and not lease.is_late()

    async def _resolve_rejected(self, lease: HeldLease) -> None:
        """Handle a rejected renewal: continue if the record was merely lost, stop if the key has another owner."""
        asked_at = self.now()
        try:
            again = await self._reserve_anew(lease.work)
        except StoreError:
            self._observer.count(Signal.STORE_ERROR, lease.work.event_type)
            return
        if lease not in self.held:
            return
        if again is None:
            lease.renew_at = lease.deadline
            lease.lose()
        else:
            lease.reservation = again
            lease.renewed(asked_at, again.lease)


def start_deadline(reservation: Reserved, asked_at: float) -> float:
    lease = reservation.lease.total_seconds()
    return asked_at + lease - fence_margin(lease)


def _duration(lease: HeldLease) -> timedelta:
    return lease.reservation.lease
