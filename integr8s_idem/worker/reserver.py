"""Reserve work items, many in one round trip, and decide what follows from each verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from integr8s_idem.engine.executor import Declined
from integr8s_idem.engine.run import Run, RunOptions
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import StoreError, StoreUnavailableError
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.records import Previous, Reserved, Verdict
from integr8s_idem.worker.assignments import WorkItem
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.look_ahead import LookAhead, Reservable
from integr8s_idem.worker.runners import Runners
from integr8s_idem.worker.slot_horizon import SlotHorizon

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_LAPSED: Final = Previous.LAPSED


class Reserver:
    """Reserves items for the runners."""

    def __init__(
        self,
        processor: DeliveryProcessor,
        options: RunOptions,
        ahead: LookAhead,
        runners: Runners,
        conclusions: Conclusions,
        horizon: SlotHorizon,
    ) -> None:
        self._processor = processor
        self._options = options
        self._ahead = ahead
        self._runners = runners
        self._conclusions = conclusions
        self._horizon = horizon

    async def reserve(self, due: Sequence[Reservable], ahead: Sequence[Reservable]) -> None:
        """Reserve items whose turn it is, and items that wait for their turn in their lanes.

        Of two items with the same key, the first gets it.
        """
        executor = self._processor.executor
        asked_at = executor.now()
        try:
            verdicts = await executor.reserve_together([execution.work for _, execution in (*due, *ahead)])
        except StoreError as error:
            for item, execution in due:
                self._unreserved(item, execution.work, error)
        except Exception as error:  # noqa: BLE001  # the service is stopped with it
            for item, _ in due:
                self._conclusions.broken(item, error)
        except BaseException:
            for item, _ in due:
                self._conclusions.abandon(item)
            raise
        else:
            self._process(due, ahead, verdicts, asked_at)
        self._runners.start()

    def _process(
        self, due: Sequence[Reservable], ahead: Sequence[Reservable], verdicts: Sequence[Verdict], asked_at: float
    ) -> None:
        executor = self._processor.executor
        # First those that wait, since the turn of one may come while the others are processed.
        for (item, _), verdict in zip(ahead, verdicts[len(due) :], strict=True):
            self._ahead.keep(item, verdict, asked_at, executor)
        for (item, execution), verdict in zip(due, verdicts, strict=False):
            if isinstance(verdict, Reserved):
                self.start(item, executor.reserved(execution.work, verdict, asked_at, self._options))
            else:
                self.decline(item, execution, verdict)

    def start(self, item: WorkItem, run: Run) -> None:
        """Run a reserved item, unless too many earlier attempts have lapsed."""
        item.run = None
        reserved = None if run.lease is None else run.lease.reservation
        if reserved is not None and (reserved.lapsed or reserved.previous is _LAPSED):
            if reserved.previous is _LAPSED:
                self._horizon.slow_down()
                if (lane := item.delivery.lane) is not None:
                    lane.slow_down()
            # An event that crashes its worker in every other attempt and fails in the others is a suspect, too.
            if self._is_held_back(item, run):
                return
        item.run = run
        self._runners.add(item)

    def _is_held_back(self, item: WorkItem, run: Run) -> bool:
        """Whether the item may not run with others, since too many earlier attempts have lapsed."""
        if run.is_suspect:
            self._conclusions.isolate(item, run)
        elif run.has_crashed_too_often:
            self._conclusions.attempt(item, run.give_up, run)
        else:
            return False
        return True

    def decline(self, item: WorkItem, execution: GuardedExecution, verdict: Declined) -> None:
        """Conclude an item that the store did not reserve, or run it if a policy allows that."""
        opened = item.delivery.context.run(self._processor.executor.declined, execution.work, verdict, self._options)
        if isinstance(opened, Run):
            self.start(item, opened)
        else:
            self._conclusions.conclude(item, opened)

    def _unreserved(self, item: WorkItem, work: Work, error: StoreError) -> None:
        """Run an item without the store if a policy allows it; otherwise wait for the store."""
        if isinstance(error, StoreUnavailableError):
            item.run = self._processor.executor.unreserved(work, self._options)
        if item.run is not None:
            self._runners.add(item)
        else:
            self._conclusions.raised(item, error)
