"""Look up the idempotency records of dead letters and of their replays."""

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
from integr8s_idem.operations.dead_letters import StoredDeadLetter
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is, open_store

FoundRecord: TypeAlias = IdempotencyRecord | Corrupt | None
"""The record of a key; `None` if there is none or the store is unavailable."""


@dataclass
class RecordLookup:
    """Reads records until the store fails.  The records are advisory: a replay is safe without them."""

    repository: IdempotencyRepository | None
    """`None` if the store is not queried, or no longer."""
    problem: str = ""
    """Why the store is not queried; empty if that was requested."""

    async def replay_records(self, dead_letters: Sequence[StoredDeadLetter]) -> list[FoundRecord]:
        """Return the record of each dead letter's next generation, which its replay has.  One round trip."""
        keys = {
            dead_letter.place: generation_key(dead_letter.record_key, dead_letter.generation + 1)
            for dead_letter in dead_letters
            if dead_letter.record_key
        }
        records = dict(zip(keys, await self._read(list(keys.values())), strict=True))
        return [records.get(dead_letter.place) for dead_letter in dead_letters]

    async def history(self, dead_letter: StoredDeadLetter) -> Mapping[int, IdempotencyRecord | Corrupt]:
        """Return the existing records of the dead letter's work, by generation."""
        if not dead_letter.record_key:
            return {}
        generations = range(LAST_GENERATION + 1)
        records = await self._read([generation_key(dead_letter.record_key, generation) for generation in generations])
        return {
            generation: record
            for generation, record in zip(generations, records, strict=True)
            if record is not None
        }  # fmt: skip

    async def _read(self, keys: Sequence[str]) -> Sequence[FoundRecord]:
        """Read records.  A corrupt record fails the whole call; the keys are then read one at a time."""
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
        return [record for key in keys for record in await self._read([key])]


@asynccontextmanager
async def open_record_lookup(settings: Settings, *, query: bool = True) -> AsyncIterator[RecordLookup]:
    """Open the store of the settings without changing it.  A store that is unavailable is not an error.

    Args:
        settings: Settings of the services.
        query: Whether to query the store at all.
    """
    store = settings.store
    async with AsyncExitStack() as stack:
        if not query or isinstance(store, MemoryStoreSettings):
            yield RecordLookup(None)
        elif isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(Path(store.path).exists):
            yield RecordLookup(None, f"file {store.path} of [store] path does not exist")
        else:
            yield await _open(settings, stack)


async def _open(settings: Settings, stack: AsyncExitStack) -> RecordLookup:
    stack.enter_context(as_it_is())
    try:
        opening = open_store(settings.store, key_prefix=settings.idempotency.key_prefix)
        return RecordLookup(await stack.enter_async_context(opening))
    except StoreError as error:
        return RecordLookup(None, str(error))
