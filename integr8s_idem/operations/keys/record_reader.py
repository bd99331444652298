"""Open the configured store for inspection, and read records in bounded batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from integr8s_idem.config import MemoryStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.errors import ApplicationError, CorruptRecordError
from integr8s_idem.keys import KeySpace
from integr8s_idem.operations.keys.key_parser import ParsedKey, parse_key
from integr8s_idem.operations.keys.record_filter import RecordFilter
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository, RecordAdmin
from integr8s_idem.stores.factory import as_it_is, open_store

AnyRecord = IdempotencyRecord | Corrupt
Advance = Callable[[int], None]
"""Called with the number of keys that were scanned."""

_BATCH_SIZE: Final = 500
_STEP_BATCH_SIZE: Final = 16
_MAX_STEPS: Final = 10_000


@asynccontextmanager
async def open_repository(settings: Settings) -> AsyncIterator[IdempotencyRepository]:
    """Open the store of the settings without creating tables or files.

    Raises:
        ApplicationError: The store cannot be read from this process.
        StoreError: The store refuses the connection.
    """
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        raise ApplicationError(
            'records of a store of kind "memory" exist only in the process that created them; use a persistent store'
        )
    if isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(Path(store.path).exists):
        raise ApplicationError(f"file {store.path} of [store] path does not exist: there are no records yet")
    with as_it_is():
        async with open_store(store, key_prefix=settings.idempotency.key_prefix) as repository:
            yield repository


async def read_records(repository: IdempotencyRepository, keys: Sequence[str]) -> dict[str, AnyRecord]:
    """Return the existing records of `keys`, including corrupt ones."""
    found: dict[str, AnyRecord] = {}
    for start in range(0, len(keys), _BATCH_SIZE):
        asked = list(dict.fromkeys(keys[start : start + _BATCH_SIZE]))
        while asked:
            try:
                records = await repository.get(asked)
            except CorruptRecordError as error:
                # Read the others again without the corrupt record.
                found[error.key] = Corrupt(key=error.key, reason=error.reason)
                asked = [key for key in asked if key != error.key]
                continue
            found |= {key: record for key, record in zip(asked, records, strict=True) if record is not None}
            break
    return found


async def read_steps(repository: IdempotencyRepository, space: KeySpace, unit: str) -> dict[int, AnyRecord]:
    """Return the records of the steps of `unit` by place.  `unit` is a full key with its generation."""
    return (await read_steps_of_units(repository, {unit: space}))[unit]


async def read_steps_of_units(
    repository: IdempotencyRepository, spaces: Mapping[str, KeySpace]
) -> dict[str, dict[int, AnyRecord]]:
    """Return the records of the steps of each unit by place.  `spaces` has the full keys of the units."""
    found: dict[str, dict[int, AnyRecord]] = {unit: {} for unit in spaces}
    units = set(spaces)
    for begin in range(0, _MAX_STEPS, _STEP_BATCH_SIZE):
        places = range(begin, begin + _STEP_BATCH_SIZE)
        steps = {
            space.full(space.step(unit, "", place)): (unit, place)
            for unit, space in spaces.items()
            if unit in units
            for place in places
        }
        page = await read_records(repository, list(steps))
        units = {steps[key][0] for key in page}
        if not units:
            break
        for key, record in page.items():
            unit, place = steps[key]
            found[unit][place] = record
    return found


async def scan_records(
    repository: IdempotencyRepository,
    prefix: str,
    key_parts: Sequence[str] = (),
    advance: Advance = lambda _: None,
) -> AsyncIterator[AnyRecord]:
    """Yield every record under `prefix` whose key contains `key_parts`, one page of the store at a time.

    Stores that do not implement `RecordAdmin` omit corrupt records.
    """
    if isinstance(repository, RecordAdmin):
        async for page in repository.survey(prefix, key_parts):
            for found in page.found:
                if _contains(found, key_parts):
                    yield found
            advance(page.passed)
        return
    async for record in repository.scan(prefix):
        advance(1)
        if _contains(record, key_parts):
            yield record


async def matching_records(
    repository: IdempotencyRepository, key_prefix: str, record_filter: RecordFilter, advance: Advance = lambda _: None
) -> AsyncGenerator[tuple[AnyRecord, ParsedKey], None]:
    """Yield the records that match the filter, with their parsed keys."""
    async for found in scan_records(repository, record_filter.prefix(key_prefix), record_filter.key_parts, advance):
        parsed = parse_key(found.key, key_prefix)
        if record_filter.matches(found, parsed):
            yield found, parsed


async def estimated_size(repository: IdempotencyRepository) -> int | None:
    """Return the approximate number of keys that a scan reads; `None` if unknown."""
    return await repository.size() if isinstance(repository, RecordAdmin) else None


def require_admin(repository: IdempotencyRepository) -> RecordAdmin:
    """Return `repository` if operators can change its records.

    Raises:
        ApplicationError: The store does not implement `RecordAdmin`.
    """
    if isinstance(repository, RecordAdmin):
        return repository
    raise ApplicationError(
        f"{type(repository).__name__} does not support changes by operators: it must implement "
        "integr8s_idem.stores.RecordAdmin"
    )


def _contains(found: AnyRecord, parts: Iterable[str]) -> bool:
    return all(part in found.key for part in parts)
