"""The runs of one Kafka message, or of the records of a batch, from their reservation to their outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import OnInProgress
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import Attempt, Outcome, Work
from integr8s_idem.errors import LeaseLostError, StoreError
from integr8s_idem.integrations.kafka_loops import End, end_of
from integr8s_idem.records import Pending


class MessageRuns:
    """The open runs of a message, each with its Kafka record."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self._manager = manager
        self._open: list[tuple[Run, Any]] = []

    def __len__(self) -> int:
        return len(self._open)

    # Reservations.

    async def begin(self, work: Work | End, record: Any) -> End | None:
        """Reserve the key of a record.  Return `None` if this process has reserved it, otherwise how the work ended.

        Raises:
            InProgressError: Another run did not end within `wait_timeout`.
            StoreError: The store did not answer.
        """
        ended = await self._begin(work, record)
        await turn_of_the_loop()
        while ended is None and isinstance(work, Work) and self._open[0][0].is_late():
            ended = await self._begin_again(*self._open[0])
        return ended

    async def begin_all(self, requests: Sequence[tuple[Work | End, Any]]) -> list[End | None]:
        """Call `begin` for each.  If one raises, release all."""
        ends: dict[int, End | None] = {}
        late: list[Work] = []
        try:
            while pending := [index for index in range(len(requests)) if index not in ends]:
                await self._begin_pending(requests, pending, ends)
                await turn_of_the_loop()
                # While the last record was reserved, the lease of the first may have expired.
                for run, record in [each for each in self._open if each[0].is_late()]:
                    self._open.remove((run, record))
                    run.not_started()
                    late.append(run.work)
                    del ends[_index_of(record, requests)]
        except BaseException:
            for work in late:
                self._manager.executor.release_unstarted(work)
            self.release()
            raise
        return [ends[index] for index in range(len(requests))]

    def start(self) -> list[Attempt]:
        """Start the timers of all open runs.  The caller must not await between the lease check and this call."""
        task = asyncio.current_task()
        assert task is not None, "messages are handled in tasks"
        return [run.start(task) for run, _ in self._open]

    async def _begin(self, work: Work | End, record: Any) -> End | None:
        if isinstance(work, End):
            return work
        executor = self._manager.executor
        opened = await executor.open(work)
        if isinstance(opened, Pending):
            opened = await executor.settled(
                work,
                opened,
                partial(executor.open, work),
                on_in_progress=OnInProgress.WAIT,
                wait_timeout=self._manager.config.wait_timeout,
            )
        return self._hold(work, opened, record)

    async def _begin_again(self, run: Run, record: Any) -> End | None:
        """Reserve a key again after the lease of its run expired before the run was started."""
        self._open.remove((run, record))
        run.not_started()
        try:
            return await self._begin(run.work, record)
        except BaseException:
            self._manager.executor.release_unstarted(run.work)
            raise

    async def _begin_pending(
        self, requests: Sequence[tuple[Work | End, Any]], pending: Sequence[int], ends: dict[int, End | None]
    ) -> None:
        """Begin all at once; then those that are in progress elsewhere, each when the other run has ended.

        While a batch waits for a key, it holds only keys that sort before it, and releases the others: if each of two
        instances waited for a key of the other, both would wait until they time out.
        """
        begun = await asyncio.gather(*(self._try_to_begin(*requests[i]) for i in pending), return_exceptions=True)
        busy: dict[int, str] = {}
        for index, end in zip(pending, begun, strict=True):
            if isinstance(end, BaseException):
                raise end
            if isinstance(end, Pending):
                busy[index] = end.key
            else:
                ends[index] = end
        while busy:
            index = min(busy, key=busy.__getitem__)
            for run, record in self._after(busy[index]):
                self._open.remove((run, record))
                run.release()
                released = _index_of(record, requests)
                del ends[released]
                busy[released] = self._manager.space.full(run.work.key)
            del busy[index]
            ends[index] = await self._begin(*requests[index])

    async def _try_to_begin(self, work: Work | End, record: Any) -> End | Pending | None:
        """As `_begin`, without waiting for another run."""
        if isinstance(work, End):
            return work
        opened = await self._manager.executor.open(work)
        return opened if isinstance(opened, Pending) else self._hold(work, opened, record)

    def _hold(self, work: Work, opened: Run | Outcome[Any], record: Any) -> End | None:
        if not isinstance(opened, Run):
            return end_of(work, opened)
        self._open.append((opened, record))
        return None

    def _after(self, key: str) -> list[tuple[Run, Any]]:
        """Return the runs that hold a key that sorts after `key`."""
        return [each for each in self._open if each[0].lease is not None and each[0].lease.reservation.key > key]

    # The work.

    def within(self) -> AbstractContextManager[None]:
        """Make the block part of the run, if there is only one: see `Run.within`."""
        return self._open[0][0].within() if len(self._open) == 1 else nullcontext()

    def raise_if_lost(self) -> None:
        """Raise if a lease is lost, and withdraw the cancellation of this task.

        Raises:
            LeaseLostError: The lease is lost.
        """
        for run, _ in self._open:
            run.raise_if_lost()

    def lost(self) -> list[Exception]:
        """Return why runs have cancelled this task; nothing if none has."""
        return [error for run, _ in self._open if (error := _lost(run)) is not None]

    # Outcomes.

    async def finish(self, value: object) -> list[object]:
        """Record that all work is done, and return how each recording has ended, errors included.

        `value`: the result, if there is only one run.
        """
        lost = self._stop()
        held = [run for run, _ in self._open if run not in lost]
        unrecorded = [run.finish(value) for run in held] if len(held) == 1 else await self._finish_together(held)
        return [*lost.values(), *await _ends_of(unrecorded)]

    async def fail(self, error: Exception) -> list[tuple[Run, Any, object]]:
        """Record that the work has failed; return the runs that had not lost their leases, their records and ends."""
        lost = self._stop(error)
        held = [(run, record) for run, record in self._open if run not in lost]
        ends = await _ends_of([run.fail(error) for run, _ in held])
        return [(run, record, end) for (run, record), end in zip(held, ends, strict=True)]

    def release(self) -> None:
        """Release all open runs."""
        runs, self._open = self._open, []
        for run, _ in runs:
            run.release()

    async def _finish_together(self, runs: Sequence[Run]) -> list[Coroutine[Any, Any, object]]:
        """Record the outcomes of a batch in one call, and return calls that record those that were not written.

        The rows of a batch may have been committed together: a crash must not leave some of its records incomplete.
        """
        returned = [run.returned(run.lease, None) for run in runs if run.lease is not None]
        try:
            written = await self._manager.executor.complete_together(returned)
        except StoreError:
            written = [False] * len(returned)
        return [each.run.complete(each) for each, is_written in zip(returned, written, strict=True) if not is_written]

    def _stop(self, error: Exception | None = None) -> dict[Run, LeaseLostError]:
        """Stop the timers of all runs, so that none of them cancels this task while it waits for their outcomes.

        Returns the runs whose lease had already expired.
        """
        lost = {}
        for run, _ in self._open:
            try:
                run.stop(error)
            except LeaseLostError as expired:
                lost[run] = expired
        return lost


def _index_of(record: Any, requests: Sequence[tuple[Work | End, Any]]) -> int:
    return next(index for index, (_, requested) in enumerate(requests) if requested is record)


async def _ends_of(calls: Sequence[Coroutine[Any, Any, object]]) -> list[object]:
    """Await concurrent calls, and return their results or errors.  A single call needs no task of its own."""
    if len(calls) != 1:
        gathered = asyncio.gather(*calls, return_exceptions=True)
        try:
            return await asyncio.shield(gathered)
        except asyncio.CancelledError:
            # Only now have all of them begun: a task that is cancelled before could not record its outcome later.
            gathered.cancel()
            with suppress(asyncio.CancelledError):
                await gathered
            raise
    try:
        return [await calls[0]]
    except Exception as error:  # noqa: BLE001  # returned to the caller
        return [error]


def _lost(run: Run) -> Exception | None:
    """Return the reason why a run cancelled its handler's task, or `None` if it did not."""
    try:
        run.raise_if_lost()
    except Exception as error:  # noqa: BLE001  # logged by the caller
        return error
    return None
