"""Run events that may crash their process, alone if possible."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import NotStarted, Outcome, WaitForStore
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.assignments import AbandonedError
from integr8s_idem.worker.isolation_gate import IsolationGate, Turn

logger = logging.getLogger(__name__)

FirstOutcome: TypeAlias = Outcome[Any] | NotStarted | Run
"""Outcome of an attempt; a `Run` is a suspect that must run alone."""

RunOnce: TypeAlias = Callable[[], Awaitable[FirstOutcome]]
"""Makes one attempt."""


@dataclass(frozen=True, slots=True)
class PoisonEventRunner:
    """Runs the suspects of one service."""

    isolation: IsolationGate
    share: float
    """Maximum fraction of the time in which suspects run alone."""
    longest: float
    """Maximum seconds of a turn, while the others wait."""
    observer: Observer

    async def run(
        self,
        execution: GuardedExecution,
        suspect: Run,
        closing: asyncio.Future[None],
        wait_for_store: WaitForStore,
        with_others: Callable[[RunOnce], Awaitable[FirstOutcome]],
    ) -> FirstOutcome:
        """Make one attempt of a suspect.

        Args:
            closing: Done when the event is to be released; it will be redelivered.
            with_others: Makes an attempt concurrently with other handlers.

        Raises:
            AbandonedError: The event is to be released.
        """
        lease = suspect.lease
        assert lease is not None, "a suspect is reserved"
        try:
            async with self.isolation.turn(self.share, self.longest, unless=closing) as turn:
                if turn is None:
                    raise AbandonedError
                self._report(turn, execution, lease.reservation.lapsed)
                run = partial(execution.run_isolated, suspect, alone=turn.is_alone, wait_for_store=wait_for_store)
                return await (self._alone(execution, turn, run) if turn.is_alone else with_others(run))
        finally:
            if not suspect.is_over:  # no attempt was made
                suspect.release()
            execution.isolate()  # also at the next attempt

    def _report(self, turn: Turn, execution: GuardedExecution, lapsed: int) -> None:
        if turn.is_alone:
            self.observer.count(Signal.ISOLATED, execution.event.event_type)
            what = f"it runs alone in this process for up to {self.longest:g} s, to find out whether it crashes workers"
        else:
            what = (
                "it runs concurrently with others, because a handler has been running for more than "
                f"{self.longest:g} s, or its outcome is waiting for the store"
            )
        logger.warning("%s: %d attempts have lapsed; %s", execution.label, lapsed, what)

    async def _alone(self, execution: GuardedExecution, turn: Turn, run: RunOnce) -> FirstOutcome:
        """Make an attempt that is alone until its turn ends."""
        after = asyncio.get_running_loop().create_task(self._end_isolation(execution, turn))
        try:
            return await run()
        finally:
            after.cancel()

    async def _end_isolation(self, execution: GuardedExecution, turn: Turn) -> None:
        await asyncio.wait({turn.ended})  # unlike `await turn.ended`, this does not cancel the future
        execution.no_longer_alone()
