"""Limit how many events with the same value of a field a handler handles at a time.

An item takes its place before its key is reserved, and gives it up when its attempt ends.  While it waits for a place
it holds nothing else: no slot and no lease.  So no two items can wait for each other, and the waiting items of one
value leave all slots to the others.  Those of one value get its places in the order in which they asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from integr8s_idem.handlers.handler_calls import FieldLimit
from integr8s_idem.worker.assignments import WorkItem

_Name: TypeAlias = tuple[int, Hashable]
"""A handler, by its identity, and a value."""

Turn: TypeAlias = asyncio.Future[None]
"""Done when the item that waits for it has its place."""


@dataclass(slots=True, eq=False)
class _Places:
    """The places of one value that are taken, and the items that wait for one."""

    taken: int = 0
    waiting: deque[tuple[WorkItem, Turn]] = field(default_factory=deque)


class ValueLimits:
    """The places that are taken, of all limited handlers of one worker."""

    def __init__(self) -> None:
        self._places: dict[_Name, _Places] = {}
        """Only of values with events in flight, so that memory is limited by these."""
        self._names: dict[WorkItem, _Name] = {}
        """Values of the items that have a place."""
        self._turns: dict[WorkItem, tuple[_Name, Turn]] = {}
        """Items that wait."""

    def take(self, item: WorkItem) -> Turn | None:
        """Take a place for `item`, or return the turn for which it must wait."""
        handler = item.execution.handler
        limit = handler.limit
        if limit is None or item in self._names:
            return None
        value = value_of(limit, item)
        if value is None:
            return None
        name = (id(handler), value)
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = _Places()
        if places.taken < limit.at_most:
            places.taken += 1
            self._names[item] = name
            return None
        turn: Turn = asyncio.get_running_loop().create_future()
        places.waiting.append((item, turn))
        self._turns[item] = (name, turn)
        return turn

    def leave(self, item: WorkItem) -> None:
        """Give up the place of `item`, or its wait for one; does nothing if it has neither."""
        if (waited := self._turns.pop(item, None)) is not None:
            waited[1].cancel()
            return
        if (name := self._names.pop(item, None)) is not None:
            self._pass_on(name)

    def _pass_on(self, name: _Name) -> None:
        """Give a place to the first item that waits for it."""
        places = self._places[name]
        while places.waiting:
            item, turn = places.waiting.popleft()
            if not turn.done():
                del self._turns[item]
                self._names[item] = name
                turn.set_result(None)
                return
        places.taken -= 1
        if not places.taken:
            del self._places[name]

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return len(self._turns)

    def __len__(self) -> int:
        return len(self._places)


def value_of(limit: FieldLimit, item: WorkItem) -> Hashable:
    """Return the value that counts for `limit`; `None` if the event has none, and is not limited."""
    value = getattr(item.execution.event, limit.field)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]
