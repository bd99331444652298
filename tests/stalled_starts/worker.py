"""A worker in its own process: `run_worker(StallOrder(...))`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from integr8s_idem import Attempt, IdempotencyManager
from integr8s_idem.engine import batch_leases, leases
from integr8s_idem.records import Completion, Reserved
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan
from tests.crashes.orders import SERVICE
from tests.crashes.worker import exit_with
from tests.stalled_starts.entries import ENTRIES, TRANSACTIONAL, Bench
from tests.stalled_starts.journal import Check, Journal, boot_time
from tests.stalled_starts.orders import StallOrder as Order
from tests.support.counting import CountingObserver
from tests.support.homes import open_records

__all__ = ["Order", "run_worker"]


class JournalingStore(CrashingStore):
    """A repository that writes accepted completions to the journal."""

    def __init__(self, inner: IdempotencyRepository, journal: Journal) -> None:
        super().__init__(inner, CrashPlan())
        self._journal = journal

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        answers = await super().complete(completions)
        for completion, accepted in zip(completions, answers, strict=True):
            if accepted:
                self._journal.note_completion(completion.reservation.key, completion.reservation.fence)
        return answers


class Checks(dict[tuple[str, int], Check]):
    """The last check of each reservation, by key and fence."""

    def watch(self) -> None:
        """Record all checks of this process from now on."""
        if not hasattr(leases.HeldLease, "is_late"):
            return  # an older version without checks
        held: Any = leases.HeldLease
        batches: Any = batch_leases.BatchLeases
        is_late, may_start = held.is_late, batches.may_start

        def watched_is_late(lease: leases.HeldLease) -> bool:
            at = boot_time()
            answer = bool(is_late(lease))
            self._remember(lease.reservation, at, lease.start_before, is_late=answer)
            return answer

        def watched_may_start(known: Any, reservation: Reserved, now: float) -> bool:
            answer = bool(may_start(known, reservation, now))
            self._remember(reservation, now, known._deadlines.get(reservation, 0.0), is_late=not answer)
            return answer

        held.is_late, batches.may_start = watched_is_late, watched_may_start

    def _remember(self, held: Reserved, at: float, start_before: float, *, is_late: bool) -> None:
        end = start_before + leases.fence_margin(held.lease.total_seconds())
        self[held.key, held.fence] = Check(at, max(end, 0.0), is_late)  # minus infinity is not JSON


class ProcessBench(Bench):
    """Writes the starts of this process to the journal."""

    def __init__(self, order: Order, manager: IdempotencyManager, journal: Journal, checks: Checks) -> None:
        super().__init__(order, manager)
        self._journal = journal
        self._checks = checks

    def handle(self, work: str, key: str, attempt: int, fence: int) -> str:
        self._journal.note_start(work, key, attempt, fence, self._checks.get((key, fence)))
        time.sleep(self.order.seconds_of(work, attempt))
        return f"{work} by fence {fence}"

    def handle_together(self, attempts: Mapping[str, Attempt]) -> list[str]:
        for work, attempt in attempts.items():
            check = self._checks.get((attempt.key, attempt.fence))
            self._journal.note_start(work, attempt.key, attempt.number, attempt.fence, check)
        time.sleep(max(self.order.seconds_of(work, attempt.number) for work, attempt in attempts.items()))
        return list(attempts)

    def ready(self) -> None:
        self._journal.note_ready()


def run_worker(order: Order, parent: int) -> int:
    """Work until all works of the order are done or the process `parent` is gone, and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(order, parent))


async def _work(order: Order, parent: int) -> int:
    watching = asyncio.create_task(exit_with(parent))
    journal, checks, observer = Journal(Path(order.folder)), Checks(), CountingObserver()
    checks.watch()
    async with open_records(order.store, order.key_prefix) as records:
        # Transactional handlers do not write their outcome by `store.complete`.
        store = records if order.entry == TRANSACTIONAL else JournalingStore(records, journal)
        manager = IdempotencyManager(order.idempotency, store, observer, scope=SERVICE)
        await ENTRIES[order.entry](ProcessBench(order, manager, journal, checks))
        await manager.close()
    prevented = getattr(Signal, "STALE_START_PREVENTED", None)
    journal.note_count("prevented", observer.counts[prevented] if prevented else 0)
    watching.cancel()
    await asyncio.wait({watching})
    return 0
