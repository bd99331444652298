"""Collect events for batch handlers, which handle several events in one call.

Each event keeps its own key, lease and attempt: it is reserved before it joins a batch and settled afterwards.  So
duplicates never reach the handler, and an event that fails does not affect the others.  An event whose first run failed
is retried alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem._util.futures import fail_future
from integr8s_idem.engine.active_runs import ActiveRun, check_start
from integr8s_idem.engine.leases import HeldLease, LateStartError
from integr8s_idem.engine.results import materialized
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, PartialFailureError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler_calls import BatchSize
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.telemetry.log_fields import SOURCE, CommonSource, context_fields


@dataclass(slots=True, eq=False)
class Member:
    """An event in a batch."""

    event: BaseEvent
    attempt: Attempt
    outgoing: Outgoing
    run: ActiveRun | None = None
    """Its run; `None` for an unguarded handler."""
    note_failed_together: Callable[[], None] = lambda: None
    """Called if it fails in a batch with others, only one of which may be the cause."""
    context: Context = field(default_factory=copy_context)
    """The context in which the event is handled."""
    end: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The result of the batch for this event, or its error."""
    batch: asyncio.Task[None] | None = None
    """Calls the handler; `None` before that, and if it does so without this event."""
    was_cancelled: bool = False
    """Whether its caller was cancelled, and waits for the end of the batch."""

    @property
    def has_left(self) -> bool:
        """Whether nobody needs the result of the handler for this event."""
        return self.was_cancelled or self.batch is None

    def holds(self, lease: HeldLease) -> bool:
        """Whether `lease` is that of its run."""
        return self.run is not None and self.run.lease is lease

    def leave(self, error: BaseException) -> None:
        """End without the handler, with an error of any kind."""
        self.batch = None
        fail_future(self.end, error)

    def open_end(self) -> asyncio.Future[Any]:
        """Return `end`, or its successor if the caller was cancelled in this turn, which has cancelled `end`."""
        if self.end.done():
            self.end = asyncio.get_running_loop().create_future()
        return self.end

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of log records about it."""
        # In a copy, since several threads of a handler may log at the same time.
        return self.context.copy().run(context_fields, keys=True)


RunBatch = Callable[[Sequence[Member]], Awaitable[Any]]


class BatchCollector:
    """Collects members until a batch is full or has waited for its maximum time."""

    def __init__(self, size: BatchSize, run: RunBatch, name: str) -> None:
        self._size = size
        self._run = run
        self._name = name
        self._waiting: list[Member] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: dict[asyncio.Task[None], Sequence[Member]] = {}

    async def join(self, member: Member) -> Any:
        """Add `member` to a batch, and return its result or raise its error.

        If the caller is cancelled after the batch has begun, it waits for the end of the batch all the same: the
        handler may succeed, and nobody else may handle the event until then.  A batch whose callers are all cancelled
        is cancelled, too.
        """
        self._add(member)
        while True:
            end = member.end
            try:
                return await end
            except asyncio.CancelledError:
                if (member.end is not end or not end.cancelled()) and member.batch is not None:
                    return member.end.result()  # the batch has ended in the turn of the cancellation
                if not self._stay(member):
                    raise

    def _add(self, member: Member) -> None:
        if member.attempt.number > 1:
            # This event or another one of its batch has failed: run it alone to find out which.
            self._begin([member])
            return
        self._waiting.append(member)
        if len(self._waiting) >= self._size.most:
            self._flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._size.wait.total_seconds(), self._flush)

    def _stay(self, member: Member) -> bool:
        """Let a member whose caller was cancelled wait for the end of its batch; `False` if none is in progress."""
        if member in self._waiting:
            self._waiting.remove(member)
        batch = member.batch
        if batch is None or batch.done():
            return False
        member.was_cancelled, member.end = True, asyncio.get_running_loop().create_future()
        if all(each.has_left for each in self._batches[batch]):
            batch.cancel()
        return True

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        members, self._waiting = self._waiting, []
        if members:
            self._begin(members)

    def _begin(self, members: Sequence[Member]) -> None:
        # A new context, since the batch does not belong to the run of a single member.
        context = Context()
        context.run(SOURCE.set, CommonSource(members))
        batch = asyncio.get_running_loop().create_task(self._settle(members), context=context)
        self._batches[batch] = members
        for member in members:
            member.batch = batch
        batch.add_done_callback(self._ended)

    def _ended(self, batch: asyncio.Task[None]) -> None:
        for member in self._batches.pop(batch):
            member.end.cancel()  # has no effect unless the batch was cancelled before it started

    async def _settle(self, members: Sequence[Member]) -> None:
        while members := [member for member in members if _may_start(member)]:
            try:
                results, failures = await self._run_batch(members)
            except Exception as error:  # noqa: BLE001  # raised for each member
                if isinstance(error, LateStartError) and any(each.holds(error.lease) for each in members):
                    continue  # a lease became too short since the check: the handler has not started
                _note_failed_together(members)
                results, failures = [None] * len(members), dict.fromkeys(range(len(members)), error)
            except BaseException as error:
                # Such as a cancellation by the handler itself: the members must not wait for ever.
                for member in members:
                    fail_future(member.open_end(), error)
                raise
            for index, member in enumerate(members):
                if index in failures:
                    fail_future(member.open_end(), failures[index])
                else:
                    member.open_end().set_result(results[index])
            return

    async def _run_batch(self, members: Sequence[Member]) -> tuple[Sequence[Any], Mapping[int, Exception]]:
        """Run the handler, and return the results of all members and the errors of failed ones by index."""
        try:
            return self._results(members, await self._run(members)), {}
        except PartialFailureError as error:
            invalid = [
                str(index)
                for index, failure in error.failures.items()
                if index not in range(len(members)) or not isinstance(failure, Exception)
            ]
            if invalid:
                # Some member has failed, and would count as completed.
                raise ApplicationError(
                    f"batch handler {self._name} received {len(members)} events and raised PartialFailureError with "
                    f"invalid failures: {', '.join(invalid)}; map the index of each failed event (from 0) to its error"
                ) from error
            return self._results(members, error.results), error.failures

    def _results(self, members: Sequence[Member], returned: Any) -> Sequence[Any]:
        if returned is None:
            return [None] * len(members)
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes) or len(returned) != len(members):
            raise ApplicationError(
                f"batch handler {self._name} received {len(members)} events and returned an invalid result of type "
                f"{type(returned).__name__}; return None, or a list with one result for each event, in their order"
            )
        return [materialized(each) for each in returned]


def _note_failed_together(members: Sequence[Member]) -> None:
    if len(members) > 1:
        for member in members:
            member.note_failed_together()


def _may_start(member: Member) -> bool:
    """Whether the member is still part of its batch; one whose lease is late is reserved again, without the rest."""
    if member.was_cancelled or member.end.cancelled():
        member.leave(asyncio.CancelledError())
        return False
    try:
        check_start(member.run)
    except LateStartError as error:
        member.leave(error)
        return False
    return True
