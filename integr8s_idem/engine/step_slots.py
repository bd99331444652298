"""Assign the steps of one run to slots, and read the steps of earlier runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import Any, Final
from urllib.parse import quote, unquote

from integr8s_idem.engine.active_runs import ActiveRun
from integr8s_idem.engine.executor import FIRST_LOOK
from integr8s_idem.engine.results import (
    encode_result,
    repeatable,
)
from integr8s_idem.errors import (
    ApplicationError,
    StoreUnavailableError,
)
from integr8s_idem.keys import KeySpace, first_generation_key, generation_key
from integr8s_idem.keys.fingerprints import fingerprint, without_field_set
from integr8s_idem.records import (
    IdempotencyRecord,
    IdempotencyStatus,
    StoredResult,
)
from integr8s_idem.stores import IdempotencyRepository

SLOTS_PER_READ: Final = 16
"""Number of slots read in one round trip.  The first of these pages without a record is the last one that is read."""

MOST_SLOTS: Final = 10_000

_NAME: Final = "; step="


class Once(str, Enum):
    """Whether an interrupted step runs again."""

    AT_LEAST_ONCE = "at_least_once"
    """The step runs again: use it if repetition is harmless."""
    AT_MOST_ONCE = "at_most_once"
    """The step does not run again, and the unit is given up: use it for side effects that must never happen twice."""


LONGEST_NAME: Final = 100
"""Maximum number of characters of a step's name."""


class StepSlot:
    """A step and its result."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        once: Once,
    ) -> None:
        self.name = name
        self.function = function
        self.once = once
        self._args, self._kwargs = args, kwargs
        self.value: Any = None

    async def call(self) -> object:
        running = self.function(*self._args, **self._kwargs)
        if not inspect.isawaitable(running):
            raise ApplicationError(f"step {self.name} is not an async function; its side effects have already happened")
        self.value = repeatable(await running, f"step {self.name}", self.function)
        return with_step_name(self.value, self.name)


class StepSlots:
    """Assigns the steps of a unit to slots.

    A step that is cancelled before it is reserved leaves no record.  Its slot is given to another step, and no step
    takes a slot a page or more above one that may have no record, since a later run would not find it.
    """

    def __init__(self, space: KeySpace, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._repository = repository
        self._run = run
        self._looking = asyncio.Lock()
        self._looked = run.attempt.number == 1 and not run.attempt.generation
        """The first run has no earlier steps."""
        self._taken: dict[bytes, int] = {}
        self._next = 0
        self._spare: list[int] = []
        """A heap of slots that were released."""
        self._unrecorded: set[int] = set()
        """Slots of steps that the store may not know yet."""
        self._changed = asyncio.Event()
        """Set when one of them is recorded or released."""
        self._found: dict[bytes, IdempotencyRecord] = {}
        """Steps of earlier runs in this generation."""
        self._before: dict[bytes, IdempotencyRecord] = {}
        """Steps completed in an earlier generation; a replay does not repeat them."""

    async def take(self, mark: bytes) -> int:
        """Return the slot of a step: where it was found, or the next free one, after waiting for the records below it.

        Then call `note_recorded` once the store has answered, and `release` at the end of the step.
        """
        while mark not in self._taken:
            slot = self._spare[0] if self._spare else self._next
            if slot - min(self._unrecorded, default=slot) < SLOTS_PER_READ:
                self._take(mark, slot)
            else:
                self._changed.clear()
                await self._changed.wait()
        return self._taken[mark]

    def _take(self, mark: bytes, slot: int) -> None:
        if self._spare:
            heappop(self._spare)
        else:
            self._next += 1
        self._taken[mark] = slot
        self._unrecorded.add(slot)

    def note_recorded(self, mark: bytes) -> None:
        """Note that the slot of a step has a record, of this step or of another one."""
        if mark in self._taken:
            self._unrecorded.discard(self._taken[mark])
            self._changed.set()

    def release(self, mark: bytes) -> None:
        """Release the slot of a step, unless it has a record.  If it has one after all, the next step notices."""
        slot = self._taken.get(mark)
        if slot is not None and slot in self._unrecorded:
            self._unrecorded.remove(slot)
            del self._taken[mark]
            heappush(self._spare, slot)
            self._changed.set()

    def done_before(self, mark: bytes) -> IdempotencyRecord | None:
        return self._before.get(mark)

    def not_among(self, marks: set[bytes]) -> list[str]:
        """Return the names of steps of earlier runs that are not in `marks`."""
        found = {**self._before, **self._found}
        return [_name_in(record) for mark, record in found.items() if mark not in marks]

    async def look(self) -> None:
        """Read the steps of earlier runs, once."""
        async with self._looking:
            if not self._looked:
                await self._look()
                self._looked = True

    async def look_again(self, mark: bytes) -> None:
        """Read the steps again after the slot of `mark` turned out to be taken by another step."""
        async with self._looking:
            del self._taken[mark]
            await self._look()

    async def _look(self) -> None:
        attempt = self._run.attempt
        first = first_generation_key(attempt.key, attempt.generation)
        for generation in range(attempt.generation):
            for _, record in await self._records(generation_key(first, generation)):
                if record.status is IdempotencyStatus.COMPLETED and record.fingerprint is not None:
                    self._before[without_field_set(record.fingerprint)] = record
        for slot, record in await self._records(attempt.key):
            self._next = max(self._next, slot + 1)
            if record.fingerprint is not None:
                # Development versions before 0.2.0 left the first bit as it was.
                mark = without_field_set(record.fingerprint)
                self._taken[mark] = slot
                self._found[mark] = record

    async def _records(self, unit: str) -> list[tuple[int, IdempotencyRecord]]:
        found: list[tuple[int, IdempotencyRecord]] = []
        for begin, keys in _pages(self._space, [unit]):
            page = enumerate(await self._get(keys), begin)
            records = [(slot, record) for slot, record in page if record is not None]
            found += records
            if not records:
                break
        return found

    async def _get(self, keys: list[str]) -> list[IdempotencyRecord | None]:
        while True:
            try:
                return await self._repository.get(keys)
            except StoreUnavailableError as error:
                await pause_briefly(error)


async def delete_steps(
    space: KeySpace, delete: Callable[[Sequence[str]], Awaitable[int]], units: Sequence[str]
) -> None:
    """Delete the steps of `units`, given by their full keys, and the steps of these steps.

    `delete`: deletes records by their full keys, and returns how many existed.

    Raises:
        StoreError: The store did not answer; some may be deleted.
    """
    for _, keys in _pages(space, units):
        if not await delete(keys):
            return
        await delete_steps(space, delete, keys)


def _pages(space: KeySpace, units: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the full keys of the slots of `units`, page by page, each with its first slot."""
    for begin in range(0, MOST_SLOTS, SLOTS_PER_READ):
        slots = range(begin, begin + SLOTS_PER_READ)
        yield begin, [space.full(space.step(unit, "", slot)) for unit in units for slot in slots]


def mark_of(name: str) -> bytes:
    """Return the fingerprint of a step's name, which identifies the step in its slot."""
    return fingerprint(name.encode("utf-8", "surrogatepass"))


async def pause_briefly(_: object) -> None:
    await asyncio.sleep(FIRST_LOOK * 4)


def with_step_name(value: object, name: str) -> object:
    try:
        stored = encode_result(value)
    except Exception:  # noqa: BLE001  # user-defined serializers may raise; the step is done, so drop the result
        return value
    return StoredResult(stored.body, f"{stored.content_type}{_NAME}{quote(name, safe='')}")


def without_step_name(stored: StoredResult) -> StoredResult:
    return StoredResult(stored.body, stored.content_type.partition(_NAME)[0])


def step_name(stored: StoredResult) -> str:
    """Return the name of the step with this result; empty if it is not the result of a step."""
    return unquote(stored.content_type.partition(_NAME)[2])


def _name_in(record: IdempotencyRecord) -> str:
    name = step_name(record.result) if record.result is not None else ""
    return name or "(unfinished)"
