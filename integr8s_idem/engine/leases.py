"""Leases of this process: checked before each start, renewed in batches, given up before they end.

No handler starts with too little of its lease left: `HeldLease.is_late` is asked immediately before each call, by a
clock that advances while the event loop is blocked.  A handler whose lease could not be renewed is cancelled a little
before the lease ends: by the time another worker may start, this one has stopped.  The store's token covers what no
clock of this process can see, such as a process that is stopped between the check and the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from itertools import groupby
from types import TracebackType
from typing import Final, TypeAlias

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem._util.lease_clock import Clock, clock_of
from integr8s_idem.errors import LeaseLostError, StoreError
from integr8s_idem.records import Reserved
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer, Signal

RENEW_AFTER: Final = 1 / 3
"""Share of the lease after which it is renewed: two renewals may be lost before the third is too late."""

RETRY_AFTER: Final = 1 / 12
"""Share of the lease after which a renewal that got no answer is tried again."""


FORGET_AFTER_LEASES: Final = 10
"""Leases after which a reservation of a batch that nobody has settled is forgotten."""


class LateStartError(Exception):
    """Too little of a lease was left to start its handler.  Never leaves its run: the work is reserved again."""

    def __init__(self, lease: HeldLease) -> None:
        super().__init__()
        self.lease = lease
        """Whose handler does not start."""


ReserveAnew: TypeAlias = Callable[[], Awaitable[Reserved | None]]


def fence_margin(lease: float) -> float:
    """Seconds before the end of a lease at which its handler is cancelled: a tenth, at most one second."""
    return min(lease / 10, 1.0)


class HeldLease(Deadline):
    """One lease, from its reservation to the end of its handler.

    It is renewed from the beginning.  Entering it begins the handler's time: as a deadline it ends a little before the
    lease does, and moves on with every renewal.  Leaving the block raises `LeaseLostError` if it was cut short.
    """

    __slots__ = ("_keeper", "_now", "deadline", "renew_at", "reservation", "reserve_anew", "start_before", "withdrawn")

    def __init__(self, keeper: LeaseKeeper, reservation: Reserved, asked_at: float, reserve_anew: ReserveAnew) -> None:
        super().__init__(None)
        self._keeper = keeper
        self._now = keeper.now
        self.reserve_anew = reserve_anew
        self.reservation = reservation
        self.withdrawn = False
        """Whether the store has answered a renewal that it holds it as ours no more."""
        self.deadline: float
        """When the lease ends at the earliest, by the event loop's clock."""
        self.renew_at: float
        """When it is renewed, by the event loop's clock."""
        self.start_before: float
        """Until when its handler may start, by the lease clock."""
        self.when = self._count_from(asked_at, reservation.lease)

    def is_late(self) -> bool:
        """Whether too little of it is left to start its handler now.  May be asked in any thread."""
        return self._now() >= self.start_before

    @property
    def lost(self) -> bool:
        """Whether the handler was cancelled for the lease's sake."""
        return self.expired

    def renewed(self, asked_at: float, lease: timedelta) -> None:
        """The store has answered yes to a renewal asked for at `asked_at`, by the lease clock."""
        self.reschedule(self._count_from(asked_at, lease))

    def lose(self) -> None:
        """The store has answered no: cancel the handler now, or do not start it."""
        self.withdrawn = True
        self.start_before = float("-inf")
        self.reschedule(asyncio.get_running_loop().time())
        if not self.entered:
            self.drop()

    def has_grace(self, now: float) -> bool:
        """Only before the lease ends: after that another worker may have started."""
        return now < self.deadline

    @property
    def is_held(self) -> bool:
        """Whether it is renewed."""
        return self._keeper.holds(self)

    def drop(self) -> None:
        """Renew it no longer: its handler does not start."""
        self._keeper.drop(self)

    def _count_from(self, asked_at: float, lease: timedelta) -> float:
        """When the handler is cancelled unless the lease is renewed, by the event loop's clock."""
        # From the asking, not from the answer: the store's lease began somewhere between the two.
        seconds, until_margin, until_renewal = self._keeper.times_of(lease)
        self.start_before = asked_at + until_margin
        began = asyncio.get_running_loop().time() - (self._now() - asked_at)
        self.deadline = began + seconds
        self.renew_at = began + until_renewal
        return began + until_margin

    def leave(self) -> bool:
        self._keeper.drop(self)
        return super().leave()

    def __enter__(self) -> HeldLease:
        super().__enter__()
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

    def __init__(
        self, repository: IdempotencyRepository, scope: str, observer: Observer = SILENT, clock: Clock | None = None
    ) -> None:
        """`clock`: the lease clock; that of the event loop if not given."""
        self.scope = scope
        self._given_clock = clock
        self.now: Clock = clock or self._read_first
        """The time by the lease clock, in seconds.  The first time it is asked in the thread of the event loop."""
        self._lease: timedelta | None = None
        self._times = (0.0, 0.0, 0.0)
        self._repository = repository
        self._observer = observer
        self._held: dict[HeldLease, None] = {}
        """In the order in which they were taken, which is that of a renewal."""
        self._timer: asyncio.Handle | None = None
        self._wakes_at = 0.0
        """When the timer fires.  It cannot be asked: for what is due at once, uvloop gives a handle without a time."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renewal: asyncio.Task[None] | None = None

    def _read_first(self) -> float:
        # Which clock it is depends on the event loop that the leases are held in.
        self.now = clock_of(asyncio.get_running_loop())
        return self.now()

    def times_of(self, lease: timedelta) -> tuple[float, float, float]:
        """Seconds of a lease, until its margin, and until it is renewed.  All leases of a manager are of one length."""
        if lease is not self._lease:
            seconds = lease.total_seconds()
            self._lease, self._times = lease, (seconds, seconds - fence_margin(seconds), seconds * RENEW_AFTER)
        return self._times

    def hold(
        self, reservation: Reserved, asked_at: float, reserve_anew: ReserveAnew, *, renewed: bool = True
    ) -> HeldLease:
        """Hold a lease from now on: `with` it around the work, or `drop` it.

        Args:
            asked_at: The lease clock before `reserve` was sent.
            reserve_anew: Asked when the store no longer knows the reservation: a new one if the record
                is merely gone, `None` if somebody else had the key since.
            renewed: Whether it lasts as long as the work does; otherwise the work has this one lease.
        """
        lease = HeldLease(self, reservation, asked_at, reserve_anew)
        if renewed:
            self.take(lease)
        return lease

    def take(self, lease: HeldLease) -> None:
        """Look after `lease` from now on."""
        self._held[lease] = None
        self._wake_at(lease.renew_at)

    def drop(self, lease: HeldLease) -> None:
        """Look after `lease` no longer."""
        self._held.pop(lease, None)

    def holds(self, lease: HeldLease) -> bool:
        """Whether `lease` is looked after."""
        return lease in self._held

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
        if self._loop is not loop:
            self.now = self._given_clock or clock_of(loop)
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
        asked_at, next_try = self.now(), asyncio.get_running_loop().time() + duration.total_seconds() * RETRY_AFTER
        for lease in leases:  # until the answer says more: whatever goes wrong, the pace stays decent
            lease.renew_at = next_try
        try:
            answers: Iterable[bool] = await self._repository.renew([lease.reservation for lease in leases], duration)
        except StoreError:
            self._observer.count(Signal.STORE_ERROR)
            return
        for lease, still_ours in zip(leases, answers, strict=True):
            if lease not in self._held:
                continue
            if still_ours:
                lease.renewed(asked_at, duration)
            else:
                await self._find_out(lease)

    async def renew_late(self, lease: HeldLease) -> bool:
        """Renew one lease at once; whether it is ours still and enough of it is left.

        Raises:
            StoreError: As for every verb.
        """
        asked_at = self.now()
        duration = lease.reservation.lease
        [still_ours] = await self._repository.renew([lease.reservation], duration)
        if still_ours:
            lease.renewed(asked_at, duration)
        return still_ours and not lease.is_late()

    async def _find_out(self, lease: HeldLease) -> None:
        """Our record is gone, or somebody else's: go on in the first case, stop in the second."""
        asked_at = self.now()
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
            lease.renewed(asked_at, again.lease)


class BatchLeases:
    """What is known of leases whose holder settles them in batches and renews them by itself.

    Until when each may be started, by the lease clock, and which batch it belongs to.  Those that nobody settles are
    forgotten after a while.
    """

    def __init__(self) -> None:
        self._start_before: dict[Reserved, float] = {}
        self._batches: dict[Reserved, int] = {}
        self._last_batch = 0

    def add(self, reservations: Iterable[Reserved], asked_at: float) -> None:
        """Know the leases of one batch, which were asked for at `asked_at`."""
        self._forget_lapsed(asked_at)
        self._last_batch += 1
        for each in reservations:
            self._start_before[each] = _start_before(each, asked_at)
            self._batches[each] = self._last_batch

    def renewed(self, reservations: Iterable[Reserved], asked_at: float) -> None:
        """Leases that were renewed begin anew at `asked_at`."""
        for each in reservations:
            if each not in self._batches:
                self._last_batch += 1
                self._batches[each] = self._last_batch
            self._start_before[each] = _start_before(each, asked_at)

    def settle(self, reservations: Iterable[Reserved]) -> None:
        """Forget reservations that are settled or lost."""
        for each in reservations:
            self._start_before.pop(each, None)
            self._batches.pop(each, None)

    def may_start(self, reservation: Reserved, now: float) -> bool:
        """Whether enough is left of the lease of `reservation`; not if it is not known."""
        return now < self._start_before.get(reservation, float("-inf"))

    def late_beside(self, reservation: Reserved, now: float) -> list[Reserved]:
        """`reservation`, and those of its batch that may not be started now either."""
        batch = self._batches.get(reservation)
        late = [each for each, until in self._start_before.items() if now >= until and self._batches[each] == batch]
        return list(dict.fromkeys([reservation, *late]))

    def _forget_lapsed(self, now: float) -> None:
        gone = [
            each
            for each, until in self._start_before.items()
            if now > until + FORGET_AFTER_LEASES * each.lease.total_seconds()
        ]
        self.settle(gone)


def _start_before(reservation: Reserved, asked_at: float) -> float:
    lease = reservation.lease.total_seconds()
    return asked_at + lease - fence_margin(lease)


def _duration(lease: HeldLease) -> timedelta:
    return lease.reservation.lease
