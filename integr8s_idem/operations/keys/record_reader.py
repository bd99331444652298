"""The store that the settings name, opened to be looked at; and records read from it in bounded parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from integr8s_idem.config import MemoryStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.errors import ApplicationError, CorruptRecordError
from integr8s_idem.keys import KeySpace
from integr8s_idem.operations.keys.key_parser import Named, named
from integr8s_idem.operations.keys.record_filter import Wanted
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository, RecordAdmin
from integr8s_idem.stores.factory import as_it_is, open_store

Found = IdempotencyRecord | Corrupt
Advance = Callable[[int], None]
"""Told how many more keys were gone by."""

_AT_ONCE: Final = 500
_STEPS_AT_ONCE: Final = 16
_MOST_STEPS: Final = 10_000


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[IdempotencyRepository]:
    """The store of the settings as it is: no table is made, no file.

    Raises:
        ApplicationError: There is nothing that could be looked at from here.
        StoreError: The store refuses us.
    """
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        raise ApplicationError(
            'records of a store of kind "memory" live in the process that made them, and are seen from nowhere else; '
            "use a store that outlives it"
        )
    if isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(Path(store.path).exists):
        raise ApplicationError(f"there is no file {store.path}, which [store] path names: nothing was remembered yet")
    with as_it_is():
        async with open_store(store, key_prefix=settings.idempotency.key_prefix) as repository:
            yield repository


async def read(repository: IdempotencyRepository, keys: Sequence[str]) -> dict[str, Found]:
    """What is there under `keys`, damaged records too."""
    found: dict[str, Found] = {}
    for start in range(0, len(keys), _AT_ONCE):
        asked = list(dict.fromkeys(keys[start : start + _AT_ONCE]))
        while asked:
            try:
                records = await repository.get(asked)
            except CorruptRecordError as error:
                # It names the record; the others are asked for again.
                found[error.key] = Corrupt(key=error.key, reason=error.reason)
                asked = [key for key in asked if key != error.key]
                continue
            found |= {key: record for key, record in zip(asked, records, strict=True) if record is not None}
            break
    return found


async def steps_of(repository: IdempotencyRepository, space: KeySpace, unit: str) -> dict[int, Found]:
    """The records of the steps of a unit, by their places; `unit`: its full key, generation included."""
    found: dict[int, Found] = {}
    for begin in range(0, _MOST_STEPS, _STEPS_AT_ONCE):
        keys = {space.full(space.step(unit, "", place)): place for place in range(begin, begin + _STEPS_AT_ONCE)}
        page = await read(repository, list(keys))
        if not page:
            break
        found |= {keys[key]: record for key, record in page.items()}
    return found


async def survey(
    repository: IdempotencyRepository,
    prefix: str,
    holding: Sequence[str] = (),
    advance: Advance = lambda _: None,
) -> AsyncIterator[Found]:
    """Every record under `prefix` whose key holds these parts, one page of the store in memory at a time.

    A store that is not `RecordAdmin` shows no damaged ones.
    """
    if isinstance(repository, RecordAdmin):
        async for page in repository.survey(prefix, holding):
            for found in page.found:
                if _holds(found, holding):
                    yield found
            advance(page.passed)
        return
    async for record in repository.scan(prefix):
        advance(1)
        if _holds(record, holding):
            yield record


async def wanted_records(
    repository: IdempotencyRepository, key_prefix: str, wanted: Wanted, advance: Advance = lambda _: None
) -> AsyncGenerator[tuple[Found, Named], None]:
    """The records that are wanted, with what their keys say."""
    async for found in survey(repository, wanted.prefix(key_prefix), wanted.holding, advance):
        told = named(found.key, key_prefix)
        if wanted.takes(found, told):
            yield found, told


async def size(repository: IdempotencyRepository) -> int | None:
    """About how many keys a survey goes by; `None` if the store cannot tell."""
    return await repository.size() if isinstance(repository, RecordAdmin) else None


def tended(repository: IdempotencyRepository) -> RecordAdmin:
    """`repository`, if people can change what they see in it.

    Raises:
        ApplicationError: It is a store that offers no such thing.
    """
    if isinstance(repository, RecordAdmin):
        return repository
    raise ApplicationError(
        f"{type(repository).__name__} can change a record for its owner only: a store that people can look after "
        "has the methods of integr8s_idem.stores.RecordAdmin"
    )


def _holds(found: Found, parts: Iterable[str]) -> bool:
    return all(part in found.key for part in parts)
