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
from integr8s_idem.engine.leases import LateStartError
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
        self._batches: set[asyncio.Task[None]] = set()

    async def join(self, member: Member) -> Any:
        """Add `member` to a batch, and return its result or raise its error."""
        if member.attempt.number > 1:
            # This event or another one of its batch has failed: run it alone to find out which.
            self._begin([member])
        else:
            self._waiting.append(member)
            if len(self._waiting) >= self._size.most:
                self._flush()
            elif self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._size.wait.total_seconds(), self._flush)
        try:
            return await member.end
        finally:
            if member in self._waiting:
                self._waiting.remove(member)

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
        task = asyncio.get_running_loop().create_task(self._settle(members), context=context)
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)
        for member in members:
            member.end.add_done_callback(lambda _: self._cancel_if_abandoned(task, members))

    def _cancel_if_abandoned(self, task: asyncio.Task[None], members: Sequence[Member]) -> None:
        """Cancel a batch when no member waits for it, for example because all leases are lost."""
        if all(member.end.cancelled() for member in members):
            task.cancel()

    async def _settle(self, gathered: Sequence[Member]) -> None:
        members = [member for member in gathered if _may_start(member)]
        if not members:
            return
        try:
            results, failures = await self._run_batch(members)
        except LateStartError:
            # A lease became too short since the check: none of the members has started, and each is reserved again.
            results = [None] * len(members)
            failures = {
                index: LateStartError(member.run.lease)
                for index, member in enumerate(members)
                if member.run and member.run.lease
            }
        except Exception as error:  # noqa: BLE001  # raised for each member
            _note_failed_together(members)
            results, failures = [None] * len(members), dict.fromkeys(range(len(members)), error)
        except BaseException as error:
            # Such as a cancellation by the handler itself: the members must not wait for ever.
            for member in members:
                fail_future(member.end, error)
            raise
        for index, member in enumerate(members):
            if index in failures:
                fail_future(member.end, failures[index])
            elif not member.end.done():
                member.end.set_result(results[index])

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
    """Whether enough of the member's lease is left; otherwise it is reserved again, without the rest of the batch."""
    try:
        check_start(member.run)
    except LateStartError as error:
        fail_future(member.end, error)
        return False
    return not member.end.done()
