"""Runs that are under way in this process: which the current code is part of, and who waits for which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from integr8s_idem.engine.leases import HeldLease, LateStartError
from integr8s_idem.engine.work import Attempt, Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import Completion, InProgress

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Run:
    """One run of some work that is under way."""

    among: ActiveRuns
    work: Work
    attempt: Attempt
    commits_itself: bool
    """Its outcome commits with a transaction of the application's."""
    lease: HeldLease | None = None
    """`None` in a transaction of the caller's, which holds the record itself."""
    outer: Run | None = None
    """The run that it is part of."""
    at_end: Sequence[Callable[[], None]] = ()
    """Called when the work has returned."""
    steps: object = None
    """Its steps, once it has asked for them."""
    over: bool = False
    """The work has returned or raised; what it began beside itself may go on still."""
    _ended: asyncio.Future[None] | None = None

    def ended(self) -> asyncio.Future[None]:
        """Done when it is over.  Made for whoever asks first: hardly any run is waited for."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def end(self) -> None:
        """It is over: tell those who wait."""
        self.over = True
        if self._ended is not None:
            self._ended.set_result(None)


@dataclass(slots=True, eq=False)
class Returned(Generic[T]):
    """A run whose function has returned, and whose outcome is not written yet."""

    run: Run
    value: T
    outcome: Completion | None
    """`None` if the function has written it itself."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """Work that may be what crashes its process: it is reserved, and its function was not called."""

    lease: HeldLease


_RUN: ContextVar[Run | None] = ContextVar("the innermost run that the current code is part of", default=None)
"""Tasks inherit it from the code that begins them."""


def run_of(attempt: Attempt) -> Run | None:
    """Return the run of `attempt`, if it has a lease and the current code is the innermost part of it."""
    run = _RUN.get()
    return run if run is not None and run.attempt is attempt else None


def check_start(run: Run | None) -> None:
    """Refuse to call the function of `run` if too little of its lease is left.  Call it immediately before the call.

    Raises:
        LateStartError: The lease has ended or is about to: the work is to be reserved again.
    """
    if run is not None and run.lease is not None and run.lease.is_late():
        raise LateStartError(run.lease)


class ActiveRuns:
    """Those of one manager."""

    def __init__(self) -> None:
        self._of_keys: dict[str, Run] = {}

    def of(self, key: str) -> Run | None:
        """The run of a key, if it is under way here."""
        return self._of_keys.get(key)

    def keys(self) -> list[str]:
        """Those that are worked on here."""
        return list(self._of_keys)

    def current(self) -> Run | None:
        """The innermost run that the current code is part of, if it is one of these."""
        run = _RUN.get()
        return run if run is not None and run.among is self else None

    def begin(self, run: Run) -> Run:
        """Others of this process who ask for its key are told when the run is over; itself it must not wait for."""
        run.outer = _RUN.get()
        self._of_keys[run.attempt.key] = run
        _RUN.set(run)
        return run

    def leave(self, run: Run) -> None:
        """The current code, which began `run`, is part of it no longer."""
        _RUN.set(run.outer)

    def over(self, run: Run) -> None:
        """It is settled, or will be by somebody else."""
        if self._of_keys.get(run.attempt.key) is run:
            del self._of_keys[run.attempt.key]
        run.end()
        # The key may have been reserved anew under it: the next run needs a reservation of its own.
        run.work.token = b""

    @contextmanager
    def within(self, run: Run) -> Iterator[None]:
        """The code in the block is part of `run`, which is under way."""
        outer = _RUN.get()
        _RUN.set(run)
        try:
            yield
        finally:
            _RUN.set(outer)

    def refuse_to_wait_for_itself(self, found: InProgress, work: Work) -> None:
        """A run that waits for its own key, by itself or by a task it began, has a mistake that no wait mends.

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
