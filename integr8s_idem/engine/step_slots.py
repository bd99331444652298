"""Assign the steps of one run to slots, and read the steps of earlier runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from enum import Enum
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
"""Number of slots read in one round trip."""


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
    """Assigns the steps of a unit to slots."""

    def __init__(self, space: KeySpace, repository: IdempotencyRepository, run: ActiveRun) -> None:
        self._space = space
        self._repository = repository
        self._run = run
        self._looking = asyncio.Lock()
        self._looked = run.attempt.number == 1 and not run.attempt.generation
        """The first run has no earlier steps."""
        self._taken: dict[bytes, int] = {}
        self._free = 0
        self._found: dict[bytes, IdempotencyRecord] = {}
        """Steps of earlier runs in this generation."""
        self._before: dict[bytes, IdempotencyRecord] = {}
        """Steps completed in an earlier generation; a replay does not repeat them."""

    def of(self, mark: bytes) -> int:
        """Return the slot of a step: where it was found, or the next free one."""
        if mark not in self._taken:
            self._taken[mark] = self._free
            self._free += 1
        return self._taken[mark]

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
            self._free = max(self._free, slot + 1)
            if record.fingerprint is not None:
                # Development versions before 0.2.0 left the first bit as it was.
                mark = without_field_set(record.fingerprint)
                self._taken[mark] = slot
                self._found[mark] = record

    async def _records(self, unit: str) -> list[tuple[int, IdempotencyRecord]]:
        found: list[tuple[int, IdempotencyRecord]] = []
        for begin in range(0, 10_000, SLOTS_PER_READ):
            keys = [self._space.full(self._space.step(unit, "", begin + offset)) for offset in range(SLOTS_PER_READ)]
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
