"""Runs events that may be what crashes their process, alone where that can be had."""

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
"""What came of a first try."""

Try: TypeAlias = Callable[[], Awaitable[FirstOutcome]]
"""Makes one try."""


@dataclass(frozen=True, slots=True)
class PoisonEventRunner:
    """Runs the suspects of one service."""

    isolation: IsolationGate
    share: float
    """Of the time, at most, in which suspects run alone."""
    longest: float
    """Seconds for which a suspect may keep the others waiting each time."""
    observer: Observer

    async def run(
        self,
        execution: GuardedExecution,
        suspect: Run,
        closing: asyncio.Future[None],
        wait_for_store: WaitForStore,
        beside_others: Callable[[Try], Awaitable[FirstOutcome]],
    ) -> FirstOutcome:
        """One try of a suspect.

        Args:
            closing: Done when the event is to be released: it comes again, here or elsewhere.
            beside_others: Makes a try as any other event does.

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
                return await (self._alone(execution, turn, run) if turn.is_alone else beside_others(run))
        finally:
            if lease.is_held:  # it has not come to a try
                suspect.release()
            execution.isolate()  # the next try, too

    def _report(self, turn: Turn, execution: GuardedExecution, lapsed: int) -> None:
        if turn.is_alone:
            self.observer.count(Signal.ISOLATED, execution.event.event_type)
            what = f"it runs alone in this process for up to {self.longest:g} s, to find out whether it crashes workers"
        else:
            what = (
                f"it runs beside others, since another event has been handled for more than {self.longest:g} s: its "
                "handler is still running, or its outcome waits for the store"
            )
        logger.warning("%s: %d attempts have lapsed; %s", execution.label, lapsed, what)

    async def _alone(self, execution: GuardedExecution, turn: Turn, run: Try) -> FirstOutcome:
        """A try that is alone until its turn ends."""
        after = asyncio.get_running_loop().create_task(self._go_on_beside_others(execution, turn))
        try:
            return await run()
        finally:
            after.cancel()

    async def _go_on_beside_others(self, execution: GuardedExecution, turn: Turn) -> None:
        await asyncio.wait({turn.ended})  # which the cancellation of this task must not cancel
        execution.no_longer_alone()
