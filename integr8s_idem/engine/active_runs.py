"""The runs in progress in this process: which one the current code belongs to, and waiting for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from msgspec import Struct

from integr8s_idem._util.context_vars import RUN
from integr8s_idem._util.loop_fairness import Pace
from integr8s_idem.engine.leases import HeldLease, LateStartError
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import Pending


class StepsOfRun(Protocol):
    """The steps that a run has requested."""

    def report_orphans(self) -> None:
        """Report steps that an earlier attempt completed and this one, which has returned, did not request."""
        ...


NOT_STARTED: Final = Attempt("", 0, 0, 0.0, "", 0)
"""The attempt of a run before it starts."""


class ActiveRun(Struct, eq=False):
    """A run in progress."""

    among: ActiveRuns
    work: Work
    lease: HeldLease | None
    """`None` for a run in the caller's transaction, which holds the record, or without a reservation."""
    commits_itself: bool
    """Whether the outcome commits with a transaction of the application."""
    attempt: Attempt = NOT_STARTED
    """Set when the run starts."""
    outbox_count: tuple[Attempt, int] = (NOT_STARTED, 0)
    """An attempt, and the number of its events in an outbox of plain code."""
    outer: ActiveRun | None = None
    """The run that started this one, if any."""
    steps: StepsOfRun | None = None
    """The steps of the run, once requested."""
    is_over: bool = False
    """Whether the outcome of the work is settled, or left to another owner; tasks that it started may still run."""
    end_future: asyncio.Future[None] | None = None
    """Set by `ended`."""

    @property
    def has_started(self) -> bool:
        """Whether it has an attempt."""
        return self.attempt is not NOT_STARTED

    def next_outbox_index(self) -> int:
        """Return the index of the next event that the attempt writes into an outbox of plain code, from 0."""
        attempt, index = self.outbox_count
        if attempt is not self.attempt:
            index = 0
        self.outbox_count = (self.attempt, index + 1)
        return index

    def ended(self) -> asyncio.Future[None]:
        """Return a future that is done when the run is over.  It is made on demand, because few runs have waiters."""
        if self.end_future is None:
            self.end_future = asyncio.get_running_loop().create_future()
        return self.end_future

    def end(self) -> None:
        """Mark the run as over and wake its waiters."""
        self.is_over = True
        if self.end_future is not None and not self.end_future.done():
            self.end_future.set_result(None)


_RUN: ContextVar[ActiveRun | None] = RUN


def run_of(attempt: Attempt) -> ActiveRun | None:
    """Return the run of `attempt` if it is the innermost run of the current code, otherwise `None`."""
    run = _RUN.get()
    return run if run is not None and run.attempt is attempt else None


def check_start(run: ActiveRun | None) -> None:
    """Check that enough of the lease of `run` is left.  Call it immediately before the function of the run.

    Raises:
        LateStartError: The lease has expired or is about to: reserve the work again.
    """
    if run is not None and (lease := run.lease) is not None and lease.is_late():
        raise LateStartError(lease)


class ActiveRuns:
    """The runs in progress of one manager."""

    pace: Pace
    """That of the event loop in which they run.  Set by the executor."""

    def __init__(self, service: str = "") -> None:
        self.service = service
        """Scope of the manager: usually the name of the service.  For log records."""
        self._by_key: dict[str, ActiveRun] = {}

    def of(self, key: str) -> ActiveRun | None:
        """Return the run of `key` in this process, or `None`."""
        return self._by_key.get(key)

    def keys(self) -> list[str]:
        """Return the keys of all runs in progress."""
        return list(self._by_key)

    def current(self) -> ActiveRun | None:
        """Return the innermost run of the current code if it belongs to this manager."""
        run = _RUN.get()
        return run if run is not None and run.among is self else None

    def add(self, run: ActiveRun) -> None:
        """Register `run`, so that other callers in this process can wait for it."""
        run.outer = _RUN.get()
        self._by_key[run.attempt.key] = run

    def enter(self, run: ActiveRun) -> None:
        """Register `run` and make it the innermost run of the current code until `leave`."""
        run.outer = _RUN.get()
        self._by_key[run.attempt.key] = run
        _RUN.set(run)

    def leave(self, run: ActiveRun) -> None:
        """Restore the run that was innermost before `enter`."""
        _RUN.set(run.outer)

    def remove(self, *runs: ActiveRun) -> None:
        """Remove runs that are settled, or whose keys have other owners."""
        for run in runs:
            if self._by_key.get(run.attempt.key) is run:
                del self._by_key[run.attempt.key]
            if run.end_future is None:
                run.is_over = True
            else:
                run.end()
            # The key may have been reserved again under this token, and the next run needs its own reservation.
            run.work.token = b""

    def forget_all(self) -> None:
        """Forget the runs of an event loop that no longer runs: nobody can wait for their end."""
        self._by_key.clear()

    @contextmanager
    def within(self, run: ActiveRun) -> Iterator[None]:
        """Make `run` the innermost run of the block.

        A run without a reservation is not registered: nobody waits for it, and the key may be that of another run.
        """
        outer = run.outer = _RUN.get()
        _RUN.set(run)
        try:
            yield
        finally:
            _RUN.set(outer)

    def refuse_to_wait_for_itself(self, found: Pending, work: Work) -> None:
        """Check that the current code does not wait for a run that it is part of, directly or in a task.

        Raises:
            ApplicationError: The run would wait for itself.
        """
        running, around = self._by_key.get(found.key), _RUN.get()
        while around is not None and around is not running:
            around = around.outer
        if around is not None:
            raise ApplicationError(
                f"{work.key.label} was requested within its own run (attempt {found.attempt}), which would wait for "
                "itself: use another key for the inner work"
            )
