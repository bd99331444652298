"""A run that begins in one place and ends in another: for frameworks that call hooks rather than us calling the work.

    opened = OpenRun(manager, work)
    outcome = await opened.begin()          # None: the work is ours to do now
    …                                       # it is done here, by whoever does it
    outcome = await opened.finish(value)    # remembered

Its pass runs in a task beside, which keeps the lease.  If that is lost, the task that has begun the run is cancelled;
`raise_if_lost` turns that cancellation into what it means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from integr8s_idem.engine.active_runs import Run
from integr8s_idem.engine.leases import LateStartError
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Attempt, Outcome, Work
from integr8s_idem.errors import ApplicationError


class DetachedRun:
    """One pass over some work that is done between two calls."""

    def __init__(self, manager: IdempotencyManager, work: Work) -> None:
        self.work = work
        self._manager = manager
        self._run: Run | None = None
        self._pass: asyncio.Task[Outcome[Any]] | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._told = self._lost = False

    @property
    def attempt(self) -> Attempt:
        """That of the run."""
        assert self._run is not None, "the run has begun"
        return self._run.attempt

    async def begin(self, owner: asyncio.Task[Any] | None = None) -> Outcome[Any] | None:
        """Ask to do the work.  `None`: it is ours, until `finish`, `fail` or `abandon`.

        `owner`: the task that does the work, if it is not the one that calls.

        Raises:
            StoreError: As for every verb; nothing is begun.
        """
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._end: asyncio.Future[Any] = loop.create_future()
        self._owner = owner or asyncio.current_task()

        async def work(_: Attempt) -> Any:
            self._run = self._manager.executor.runs.current()
            self._begun.set_result(None)
            return await self._end

        self._pass = loop.create_task(self._manager.execute(self.work, work))
        ended = await self._wait_for_start()
        if ended is None:
            self._pass.add_done_callback(self._ended)
        return ended

    def is_late(self) -> bool:
        """Whether too little of the lease is left to start the work now."""
        assert self._run is not None, "the run has begun"
        assert self._run.lease is not None
        return self._run.lease.is_late()

    async def begin_again(self) -> Outcome[Any] | None:
        """Reserve the work again, which has not been started and whose lease is late.  Returns and raises as `begin`.

        A reservation that is still ours goes on as the same attempt.
        """
        assert self._pass is not None, "the run has begun"
        if self._lost:
            self._take_back()
        self._pass.remove_done_callback(self._ended)
        loop = asyncio.get_running_loop()
        end, self._begun, self._end = self._end, loop.create_future(), loop.create_future()
        if not end.done():
            assert self._run is not None, "the run has begun"
            assert self._run.lease is not None
            end.set_exception(LateStartError(self._run.lease))
        ended = await self._wait_for_start()
        if ended is None:
            self._pass.add_done_callback(self._ended)
        return ended

    async def _wait_for_start(self) -> Outcome[Any] | None:
        assert self._pass is not None, "the run has begun"
        either: set[asyncio.Future[Any]] = {self._pass, self._begun}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.abandon()
            raise
        return self._pass.result() if self._pass.done() else None

    def _ended(self, ended: asyncio.Task[Outcome[Any]]) -> None:
        if not self._told and not ended.cancelled() and self._owner is not None:
            # The lease is lost: whoever does the work has to stop, before somebody else begins it.
            self._lost = True
            self._owner.cancel()

    @contextmanager
    def within(self) -> Iterator[None]:
        """The code in the block is part of the run: it may ask for its steps, and not for its own key."""
        assert self._run is not None, "the run has begun"
        with self._manager.executor.runs.within(self._run):
            yield

    def raise_if_lost(self) -> None:
        """To be called where a cancellation has come out of the work.

        Raises:
            LeaseLostError: It came from us.
        """
        if self._lost:
            assert self._pass is not None
            self._take_back()
            self._pass.result()
            raise ApplicationError("a run has ended before its work")

    def _take_back(self) -> None:
        """The owner was cancelled for the sake of a run that is over; it goes on as if nobody had."""
        assert self._owner is not None
        self._lost = False
        self._owner.uncancel()

    async def finish(self, value: object) -> Outcome[Any]:
        """The work is done.

        Raises:
            LeaseLostError: The reservation was lost on the way.
            StoreError: As for every verb; `ResultNotStoredError` if it could not be remembered.
        """
        return await self._settle(lambda: self._end.set_result(value))

    async def fail(self, error: Exception) -> Outcome[Any]:
        """The work has failed.

        Raises:
            LeaseLostError: The reservation was lost on the way.
        """
        return await self._settle(lambda: self._end.set_exception(error))

    async def _settle(self, tell: Callable[[], None]) -> Outcome[Any]:
        assert self._pass is not None, "the run has begun"
        self._told = True
        if self._lost:  # and the work did not heed it
            self._take_back()
        if not self._end.done():
            tell()
        return await asyncio.shield(self._pass)

    async def abandon(self) -> None:
        """Give the key back: whoever does the work was cancelled."""
        assert self._pass is not None, "the run has begun"
        self._pass.remove_done_callback(self._ended)
        self._pass.cancel()
        await asyncio.wait({self._pass})
