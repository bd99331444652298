"""What the store knows of dead letters: their records, and those of their replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from integr8s_idem.config import MemoryStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.errors import CorruptRecordError, StoreError
from integr8s_idem.keys import LAST_GENERATION, generation_key
from integr8s_idem.operations.dead_letters import Letter
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is, open_store

Known: TypeAlias = IdempotencyRecord | Corrupt | None
"""What is kept under a key; `None` for nothing, or where nobody could be asked."""


@dataclass
class DeadLetterRecords:
    """Reads records as long as the store answers.  It gives advice only: without it everything is as safe."""

    repository: IdempotencyRepository | None
    """`None`: nobody is asked, or not any more."""
    problem: str = ""
    """Why, unless nobody wanted it."""

    async def of_replays(self, letters: Sequence[Letter]) -> list[Known]:
        """For each letter the record of its next generation: what became of a replay of it.  One round trip."""
        wanted = {
            letter.place: generation_key(letter.record_key, letter.generation + 1)
            for letter in letters
            if letter.record_key
        }
        found = dict(zip(wanted, await self._read(list(wanted.values())), strict=True))
        return [found.get(letter.place) for letter in letters]

    async def history(self, letter: Letter) -> Mapping[int, IdempotencyRecord | Corrupt]:
        """The records of its work by generation, as far as there are any."""
        if not letter.record_key:
            return {}
        generations = range(LAST_GENERATION + 1)
        found = await self._read([generation_key(letter.record_key, generation) for generation in generations])
        return {generation: known for generation, known in zip(generations, found, strict=True) if known is not None}

    async def _read(self, keys: Sequence[str]) -> Sequence[Known]:
        """One that cannot be read spoils a whole call: then they are read one by one."""
        if self.repository is None or not keys:
            return [None] * len(keys)
        try:
            return await self.repository.get(keys)
        except CorruptRecordError as error:
            if len(keys) == 1:
                return [Corrupt(key=keys[0], reason=error.reason)]
        except StoreError as error:
            self.repository, self.problem = None, str(error)
            return [None] * len(keys)
        return [known for key in keys for known in await self._read([key])]


@asynccontextmanager
async def open_letter_records(settings: Settings, *, ask: bool = True) -> AsyncIterator[DeadLetterRecords]:
    """Of the store that the settings name, which is left as it is.  Never fails for the store's sake."""
    store = settings.store
    async with AsyncExitStack() as stack:
        if not ask or isinstance(store, MemoryStoreSettings):
            yield DeadLetterRecords(None)
        elif isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(Path(store.path).exists):
            yield DeadLetterRecords(None, f"there is no file {store.path}, which [store] path names")
        else:
            yield await _opened(settings, stack)


async def _opened(settings: Settings, stack: AsyncExitStack) -> DeadLetterRecords:
    stack.enter_context(as_it_is())
    try:
        opening = open_store(settings.store, key_prefix=settings.idempotency.key_prefix)
        return DeadLetterRecords(await stack.enter_async_context(opening))
    except StoreError as error:
        return DeadLetterRecords(None, str(error))
