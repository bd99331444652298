"""Batch handlers: events that arrive close together, given to one call.

Each event keeps its own key, lease and attempt: it is reserved before it joins a batch and settled after it, so that
duplicates never reach the handler, and one that fails takes no other along.  An event whose first run failed comes
alone the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.engine.active_runs import ActiveRun, check_start
from integr8s_idem.engine.leases import LateStartError
from integr8s_idem.engine.results import materialized
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, PartialFailureError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.router import BatchSize, Outgoing


@dataclass(slots=True, eq=False)
class Member:
    """One event in a batch."""

    event: BaseEvent
    attempt: Attempt
    outgoing: Outgoing
    run: ActiveRun | None = None
    """Its run; `None` without a guard."""
    end: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """What the batch has returned for it, or raised."""


RunBatch = Callable[[Sequence[Member]], Awaitable[Any]]


class BatchCollector:
    """Gathers members until a batch is full, or has waited long enough."""

    def __init__(self, size: BatchSize, run: RunBatch, name: str) -> None:
        self._size = size
        self._run = run
        self._name = name
        self._waiting: list[Member] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def join(self, member: Member) -> Any:
        """What the batch returns for `member`, or raises."""
        if member.attempt.number > 1:
            # It, or one that it was with, has failed: alone it shows which.
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
        # In a context of its own: it is part of no member's run more than of another's.
        task = asyncio.get_running_loop().create_task(self._settle(members), context=Context())
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)
        for member in members:
            member.end.add_done_callback(lambda _: self._end_if_deserted(task, members))

    def _end_if_deserted(self, task: asyncio.Task[None], members: Sequence[Member]) -> None:
        """A batch that nobody waits for any more, since all its leases are lost, stops."""
        if all(member.end.cancelled() for member in members):
            task.cancel()

    async def _settle(self, gathered: Sequence[Member]) -> None:
        members = [member for member in gathered if _may_start(member)]
        if not members:
            return
        try:
            results, failures = await self._ends(members)
        except LateStartError:
            # Between the first look and the call; none of them has started, and each is reserved again.
            results = [None] * len(members)
            failures = {
                at: LateStartError(one.run.lease) for at, one in enumerate(members) if one.run and one.run.lease
            }
        except Exception as error:  # noqa: BLE001  # each member tells it
            results, failures = [None] * len(members), dict.fromkeys(range(len(members)), error)
        for index, member in enumerate(members):
            if member.end.done():
                continue
            if index in failures:
                member.end.set_exception(failures[index])
            else:
                member.end.set_result(results[index])

    async def _ends(self, members: Sequence[Member]) -> tuple[Sequence[Any], Mapping[int, Exception]]:
        """What the handler returned for each member, and which have failed by their index."""
        try:
            return self._results(members, await self._run(members)), {}
        except PartialFailureError as error:
            unclear = [
                str(index)
                for index, failure in error.failures.items()
                if index not in range(len(members)) or not isinstance(failure, Exception)
            ]
            if unclear:
                # One of them has failed, and would be taken for done.
                raise ApplicationError(
                    f"batch handler {self._name} was given {len(members)} events and says that {', '.join(unclear)} "
                    "has failed: name each failure by the index of its event, from 0, and give an exception"
                ) from error
            return self._results(members, error.results), error.failures

    def _results(self, members: Sequence[Member], returned: Any) -> Sequence[Any]:
        if returned is None:
            return [None] * len(members)
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes) or len(returned) != len(members):
            raise ApplicationError(
                f"batch handler {self._name} was given {len(members)} events and returned "
                f"{type(returned).__name__}: return None, or one result for each event, in their order"
            )
        return [materialized(each) for each in returned]


def _may_start(member: Member) -> bool:
    """Whether enough of its lease is left.  If not, it is reserved again, and the rest of its batch goes on."""
    try:
        check_start(member.run)
    except LateStartError as error:
        if not member.end.done():
            member.end.set_exception(error)
        return False
    return not member.end.done()
