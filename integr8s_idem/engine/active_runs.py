"""Runs that are under way in this process: which one the current code is part of, and who waits for which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from integr8s_idem.engine.leases import HeldLease, LateStartError
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import InProgress


class ActiveRun:
    """One run of some work that is under way."""

    __slots__ = ("_ended", "among", "at_end", "attempt", "commits_itself", "is_over", "lease", "outer", "steps", "work")
    attempt: Attempt
    """Set when it starts."""

    def __init__(self, among: ActiveRuns, work: Work, lease: HeldLease | None, commits_itself: bool) -> None:
        """
        Args:
            lease: `None` in a transaction of the caller, which holds the record itself, and without a reservation.
            commits_itself: Whether its outcome commits with a transaction of the application.
        """
        self.among = among
        self.work = work
        self.lease = lease
        self.commits_itself = commits_itself
        self.outer: ActiveRun | None = None
        """The run that it is part of."""
        self.at_end: Sequence[Callable[[], None]] = ()
        """Called when the work has returned."""
        self.steps: object = None
        """Its steps, once it has asked for them."""
        self.is_over = False
        """The work has returned or raised; what it began beside itself may still be running."""
        self._ended: asyncio.Future[None] | None = None

    def ended(self) -> asyncio.Future[None]:
        """Done when it is over.  Made for the first caller: hardly any run is waited for."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def end(self) -> None:
        """Mark the run as over and wake those who wait for it."""
        self.is_over = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


_RUN: ContextVar[ActiveRun | None] = ContextVar("the innermost run that the current code is part of", default=None)
"""Tasks inherit it from the code that begins them."""


def run_of(attempt: Attempt) -> ActiveRun | None:
    """Return the run of `attempt`, if it has a lease and the current code is the innermost part of it."""
    run = _RUN.get()
    return run if run is not None and run.attempt is attempt else None


def check_start(run: ActiveRun | None) -> None:
    """Refuse to call the function of `run` if too little of its lease is left.  Call it immediately before the call.

    Raises:
        LateStartError: The lease has ended or is about to: the work is to be reserved again.
    """
    if run is not None and run.lease is not None and run.lease.is_late():
        raise LateStartError(run.lease)


class ActiveRuns:
    """Those of one manager."""

    def __init__(self) -> None:
        self._of_keys: dict[str, ActiveRun] = {}

    def of(self, key: str) -> ActiveRun | None:
        """The run of a key, if it is under way here."""
        return self._of_keys.get(key)

    def keys(self) -> list[str]:
        """Those that are worked on here."""
        return list(self._of_keys)

    def current(self) -> ActiveRun | None:
        """The innermost run that the current code is part of, if it is one of these."""
        run = _RUN.get()
        return run if run is not None and run.among is self else None

    def add(self, run: ActiveRun) -> None:
        """Let others in this process who ask for the key of `run` wait for it."""
        run.outer = _RUN.get()
        self._of_keys[run.attempt.key] = run

    def enter(self, run: ActiveRun) -> None:
        """Add `run`; the current code is part of it until `leave`."""
        run.outer = _RUN.get()
        self._of_keys[run.attempt.key] = run
        _RUN.set(run)

    def leave(self, run: ActiveRun) -> None:
        """The current code, which entered `run`, is no longer part of it."""
        _RUN.set(run.outer)

    def remove(self, run: ActiveRun) -> None:
        """The run is settled, or will be by another owner."""
        if self._of_keys.get(run.attempt.key) is run:
            del self._of_keys[run.attempt.key]
        run.end()
        # The key may have been reserved anew under it: the next run needs a reservation of its own.
        run.work.token = b""

    @contextmanager
    def within(self, run: ActiveRun) -> Iterator[None]:
        """The code in the block is part of `run`, which is under way."""
        outer = _RUN.get()
        _RUN.set(run)
        try:
            yield
        finally:
            _RUN.set(outer)

    def refuse_to_wait_for_itself(self, found: InProgress, work: Work) -> None:
        """Refuse a run that waits for its own key, directly or in a task that it began.

        Raises:
            ApplicationError: It would wait for itself.
        """
        running, around = self._of_keys.get(found.key), _RUN.get()
        while around is not None and around is not running:
            around = around.outer
        if around is not None:
            raise ApplicationError(
                f"{work.key.label} was asked for within its own run (attempt {found.attempt}), which would wait for "
                "itself: give the inner work a key of its own"
            )
